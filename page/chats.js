// Keeps the chats: in memory, and each under its own key in localStorage, for several tabs.
//
// A chat: {id, revision, before (the revision it came of), title, named, updated, settings, messages}. A message: {role, content}; an answer also has
// reasoning, calls, state (writing, done, length, stopped, cut, failed), problem and timings.

const PREFIX = "torchtpu.chat.";
const DEFAULTS = "torchtpu.settings";
const FORMAT = "torchtpu-chats";
const VERSION = 1;
const ENDED = ["done", "length", "stopped", "cut", "failed"];
const PLAIN = { system: "", maxTokens: null, stop: [] };

const known = new Map();
const written = new Set(); // this tab's revisions
const storage = localStorage;

/** Reads what is stored and returns what to tell the person, or null. `onchange(id)`: another tab wrote. */
export function open(onchange) {
	const broken = Object.keys(storage).filter((key) => key.startsWith(PREFIX) && !take(key));
	addEventListener("storage", ({ key, newValue }) => {
		if (!key?.startsWith(PREFIX)) return;
		const id = key.slice(PREFIX.length);
		const mine = known.get(id);
		const theirs = take(key);
		if (!theirs) known.delete(id);
		// Both tabs wrote at once, and theirs stayed.
		const last = mine?.revision;
		const isLost = written.has(last) && theirs && ![theirs.revision, JSON.parse(newValue)?.before].includes(last);
		if (isLost) save(copy(mine));
		onchange(id);
	});
	return broken.length ? `Stored chats that cannot be read, left as they are: ${broken.length}.` : null;
}

function take(key) {
	const chat = stored(key);
	if (chat) known.set(chat.id, chat);
	return chat;
}

function stored(key) {
	try {
		const chat = JSON.parse(storage.getItem(key));
		return Array.isArray(chat?.messages) ? chat : null;
	} catch {
		return null;
	}
}

/** All chats, the one written to last first. */
export const all = () => [...known.values()].sort((a, b) => b.updated - a.updated);

export const get = (id) => known.get(id);

/** A new chat; it is kept once something is said in it. */
export function create() {
	const settings = { ...PLAIN, ...JSON.parse(storage.getItem(DEFAULTS)) };
	return { id: newId(), revision: 0, title: "New chat", named: false, updated: Date.now(), settings, messages: [] };
}

/** Keeps a chat and returns what to tell the person, or null.

What another tab has written since is left alone: this tab's version becomes another chat. */
export function save(chat) {
	const other = stored(PREFIX + chat.id);
	let told = null;
	if (other && other.revision !== chat.revision) {
		known.set(other.id, other);
		copy(chat);
		told = "Another tab wrote in this chat: this tab's version is a chat of its own now.";
	}
	known.set(chat.id, chat);
	try {
		const revision = newId();
		storage.setItem(PREFIX + chat.id, JSON.stringify({ ...chat, before: chat.revision, revision }));
		chat.revision = revision;
		written.add(revision);
	} catch {
		told = "This browser has no more room for chats: the last text is not kept. Export some and delete them.";
	}
	return told;
}

const copy = (chat) => Object.assign(chat, { id: newId(), revision: 0, title: `${chat.title} (copy)`, named: true });

/** Forgets a chat. */
export function remove({ id }) {
	known.delete(id);
	storage.removeItem(PREFIX + id);
}

/** Makes `settings` those of new chats. */
export const setDefaults = (settings) => storage.setItem(DEFAULTS, JSON.stringify(settings));

/** Chats as a file's text. */
export function exported(chats) {
	const kept = chats.map(({ id, revision, before, ...chat }) => chat);
	return JSON.stringify({ format: FORMAT, version: VERSION, chats: kept }, null, 2);
}

/** The chats of a file's text, with new ids, so that they replace none; not kept yet.

Throws an Error with a sentence for the person. */
export function imported(text) {
	let file = null;
	try {
		file = JSON.parse(text);
	} catch {
		// Told below: it is no file of ours.
	}
	if (file?.format !== FORMAT || file.version !== VERSION || !Array.isArray(file.chats)) {
		throw new Error(`Expected a file that this page exported (${FORMAT}, version ${VERSION}), found another.`);
	}
	return file.chats.map((chat, at) => {
		const { title, updated, settings: { system, maxTokens, stop } = {}, messages } = chat ?? {};
		return Object.assign(create(), {
			title: string(title).slice(0, 100) || "Imported chat",
			named: true,
			updated: Number(updated) || 0,
			settings: { system: string(system), maxTokens: Number(maxTokens) || null, stop: list(stop).map(string) },
			messages: list(messages).map((message, n) => checked(message, `chats[${at}].messages[${n}]`)),
		});
	});
}

function checked(message, where) {
	const { role, content, reasoning, calls, state, problem, timings } = message ?? {};
	if (!["user", "assistant"].includes(role) || typeof content !== "string") {
		throw new Error(`Expected a role and a text in ${where}, found something else.`);
	}
	if (role === "user") return { role, content };
	return {
		role,
		content,
		reasoning: string(reasoning),
		calls: list(calls).map((call) => ({ id: string(call?.id), name: string(call?.name), arguments: string(call?.arguments) })),
		state: ENDED.includes(state) ? state : "cut",
		problem: string(problem),
		timings: timings ?? null,
	};
}

const string = (value) => (typeof value === "string" ? value : "");
const list = (value) => (Array.isArray(value) ? value : []);

// randomUUID is hidden from pages that come over http from another machine.
const newId = () => crypto.getRandomValues(new Uint32Array(3)).join("-");
