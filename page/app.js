// The page: which chat is shown, what the person does with it, and what is told about it.

import * as chats from "./chats.js";
import { connection } from "./connection.js";
import { announce, find, icon } from "./dom.js";
import * as panel from "./panel.js";
import { Run } from "./run.js";
import { onKeyNeeded, read, Refused } from "./server.js";
import * as settings from "./settings.js";
import * as sidebar from "./sidebar.js";
import * as thread from "./thread.js";

const SAVE_EVERY = 1000;
const DRAFT = "torchtpu.draft";
const THEME = "torchtpu.theme";
const STATES = { ok: "Ready", loading: "Loading", gone: "No answer" };

const field = find("say");
const title = find("title");
const scroll = find("scroll");
const runs = new Map();
let shown = chats.create();
let model;
let undo = null;

// What is shown

function show(chat) {
	shown = chat;
	thread.show(chat, runs.get(chat), acts);
	around();
	toEnd();
}

/** Draws everything around the messages. */
function around() {
	const isEmpty = !shown.messages.length;
	const isRunning = runs.has(shown);
	history.replaceState(null, "", `#${shown.id}`);
	document.title = isEmpty ? "torchtpu-rs" : `${shown.title} · torchtpu-rs`;
	title.value = shown.title;
	find("welcome").hidden = !isEmpty;
	find("chat-menu-button").hidden = isEmpty;
	find("system").hidden = !shown.settings.system.trim();
	find("system-text").textContent = shown.settings.system;
	find("send").hidden = isRunning;
	find("stop").hidden = !isRunning;
	sidebar.list(shown, runs, (chat) => {
		show(chat);
		sidebar.drawer(false);
		field.focus();
	});
}

function tell(text, act = null) {
	find("notice").hidden = !text;
	find("notice-text").textContent = text ?? "";
	find("undo").hidden = !act;
	undo = act;
}

const isAtEnd = () => scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 60;
const toEnd = () => (scroll.scrollTop = scroll.scrollHeight);
const showEndButton = () => (find("to-end").hidden = isAtEnd());

/** Draws what grew, and follows it unless the person has scrolled up to read. */
function follow(chat) {
	if (chat !== shown) return;
	const stays = isAtEnd();
	thread.update(runs.get(chat));
	if (stays) toEnd();
	showEndButton();
}

// Asking

function say(text) {
	if (!shown.named && !shown.messages.length) shown.title = titleOf(text);
	shown.messages.push({ role: "user", content: text });
	ask();
}

function ask() {
	shown.messages.push({ role: "assistant", content: "", reasoning: "", calls: [] });
	answer(shown, false);
}

/** Has the last message of a chat written. */
function answer(chat, isContinued) {
	const run = new Run(chat, model, isContinued);
	let saved = 0;
	let isDrawing = false;
	let isBehind = false;
	const draw = () => {
		isBehind = isDrawing;
		if (isDrawing) return;
		isDrawing = true;
		requestAnimationFrame((began) => {
			follow(chat);
			// A long answer takes longer to draw: at most a quarter of the time goes there.
			setTimeout(() => {
				isDrawing = false;
				if (isBehind) draw();
			}, (performance.now() - began) * 3);
		});
	};
	run.addEventListener("change", () => {
		if (!runs.has(chat)) return;
		if (performance.now() - saved > SAVE_EVERY) {
			saved = performance.now();
			keep(chat);
		}
		draw();
	});
	run.addEventListener("end", () => {
		// A chat that was deleted meanwhile does not come back.
		if (!runs.delete(chat)) return;
		if (!model && run.answer.state === "done") meet();
		keep(chat);
		follow(chat);
		around();
		announce(spoken(run.answer));
	});
	runs.set(chat, run);
	chat.updated = Date.now();
	keep(chat);
	show(shown);
	field.focus();
	announce("The model answers.");
	run.go();
}

const acts = {
	edit(message, text) {
		shown.messages.splice(shown.messages.indexOf(message));
		say(text);
	},
	again() {
		shown.messages.pop();
		ask();
	},
	goOn() {
		const last = shown.messages.at(-1);
		// A template drops white space at the end, so the model would say it again.
		last.content = last.content.trimEnd();
		answer(shown, true);
	},
};

function keep(chat) {
	const told = chats.save(chat);
	if (told) tell(told);
}

function titleOf(text) {
	const line = text.split("\n")[0];
	return line.length > 48 ? `${line.slice(0, 47).trimEnd()}…` : line;
}

/** What a screen reader says of an answer that ended. */
function spoken({ content, state, problem }) {
	const how = { done: "", length: "Ended at the limit.", stopped: "Stopped." }[state] ?? problem;
	return `${how} ${content.slice(0, 600)}`;
}

// The person

function send() {
	const text = field.value.trim();
	if (!text) return;
	if (runs.has(shown)) {
		announce("The model still answers. Escape stops it.");
		return;
	}
	tell(null);
	field.value = "";
	sessionStorage.removeItem(DRAFT);
	say(text);
}

function newChat() {
	show(chats.create());
	sidebar.drawer(false);
	field.focus();
}

function forget() {
	const chat = shown;
	runs.get(chat)?.stop();
	runs.delete(chat);
	chats.remove(chat);
	show(chats.all()[0] ?? chats.create());
	tell(`“${chat.title}” is deleted.`, () => {
		chat.revision = 0;
		tell(null);
		keep(chat);
		show(chat);
	});
	field.focus();
}

async function take(file) {
	try {
		const found = await sidebar.upload(file);
		if (found.length) show(found[0]);
		tell(`Imported chats: ${found.length}.`);
	} catch (error) {
		tell(error.message);
	}
}

const stop = () => {
	runs.get(shown)?.stop();
	field.focus();
};
const setUp = () =>
	settings.edit(shown, (entered) => {
		shown.settings = entered;
		if (shown.messages.length) keep(shown);
		around();
	});
const closeDrawer = () => sidebar.drawer(false);
const clicks = {
	stop,
	new: newChat,
	"new-small": newChat,
	menu: () => sidebar.drawer(true),
	"menu-close": closeDrawer,
	shade: closeDrawer,
	rename: () => title.select(),
	delete: forget,
	export: () => sidebar.download([shown], shown.title.replace(/[^\p{L}\p{N}]+/gu, "-")),
	"export-all": () => sidebar.download(chats.all(), "chats"),
	import: () => find("file").click(),
	status: () => panel.toggle(),
	"panel-close": () => panel.toggle(false),
	"to-end": toEnd,
	"notice-close": () => tell(null),
	undo: () => undo(),
	"settings-button": setUp,
	system: setUp,
	"settings-cancel": () => find("settings").close(),
	"key-cancel": () => find("key").close(),
	// A popover stays open when one of its buttons is pressed.
	"chat-menu": () => find("chat-menu").hidePopover(),
};
for (const [id, act] of Object.entries(clicks)) find(id).addEventListener("click", act);
for (const suggestion of document.querySelectorAll("#welcome button")) {
	suggestion.addEventListener("click", () => say(suggestion.textContent));
}
find("file").addEventListener("change", ({ target }) => {
	take(target.files[0]);
	target.value = "";
});
find("composer").addEventListener("submit", (event) => {
	event.preventDefault();
	send();
});
field.addEventListener("input", () => sessionStorage.setItem(DRAFT, field.value));
field.addEventListener("keydown", (event) => {
	if (!thread.isSend(event)) return;
	event.preventDefault();
	send();
});
title.addEventListener("change", () => {
	const name = title.value.trim();
	if (name) Object.assign(shown, { title: name, named: true });
	if (shown.messages.length) keep(shown);
	around();
});
title.addEventListener("keydown", (event) => {
	if (event.key === "Escape") title.value = shown.title;
	else if (event.key !== "Enter") return;
	event.stopPropagation();
	field.focus();
});
scroll.addEventListener("scroll", showEndButton, { passive: true });
addEventListener("keydown", (event) => {
	if (event.key !== "Escape" || document.querySelector("dialog[open], :popover-open")) return;
	if (sidebar.isDrawerOpen()) sidebar.drawer(false);
	else if (find("panel").contains(document.activeElement)) panel.toggle(false);
	else if (runs.has(shown)) stop();
});
for (const type of ["beforeunload", "pagehide"]) {
	addEventListener(type, () => {
		for (const [chat, run] of runs) {
			run.leave();
			keep(chat);
		}
	});
}

const themes = find("theme");
themes.value = document.documentElement.dataset.theme ?? "";
themes.addEventListener("change", () => {
	document.documentElement.dataset.theme = themes.value;
	localStorage.setItem(THEME, themes.value);
});

// The server

onKeyNeeded((refused) => {
	const dialog = find("key");
	find("key-refused").hidden = !refused;
	find("key-field").value = "";
	dialog.returnValue = "";
	dialog.showModal();
	return new Promise((resolve) => {
		const given = () => resolve(dialog.returnValue ? find("key-field").value.trim() : null);
		dialog.addEventListener("close", given, { once: true });
	});
});

/** Learns what is served. */
async function meet() {
	try {
		model = (await read("v1/models", { asks: true })).data[0]?.id;
		find("model").textContent = model ?? "";
		const { decoding } = await read("v1/engine");
		find("greedy").hidden = decoding !== "greedy";
	} catch (error) {
		// Other servers have no such path, and what else is wrong is said elsewhere.
		if (!(error instanceof Refused)) connection.look();
	}
}

connection.addEventListener("change", () => {
	const { state, text, progress } = connection;
	const isWell = state === "ok";
	const wasWell = find("trouble").hidden;
	document.body.dataset.server = state;
	find("state").textContent = STATES[state] ?? "Not ready";
	find("trouble").hidden = isWell;
	find("trouble-text").textContent = text;
	find("progress").hidden = progress === null;
	if (progress !== null) find("progress").value = progress;
	if (isWell) meet();
	if (isWell !== wasWell) announce(isWell ? "The server is back." : text);
});

// Begin

for (const each of document.querySelectorAll("[data-icon]")) each.prepend(icon(each.dataset.icon));
tell(
	chats.open((id) => {
		if (id !== shown.id) around();
		else if (!runs.has(shown)) show(chats.get(id) ?? chats.create());
	}),
);
field.value = sessionStorage.getItem(DRAFT) ?? "";
show(chats.get(location.hash.slice(1)) ?? chats.all()[0] ?? shown);
field.focus();
connection.look();
