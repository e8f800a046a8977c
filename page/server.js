// Talks to the server that gave this page: paths, the API key, and errors in the server's own words.

const KEY = "torchtpu.key";
const base = new URL(".", location.href);

/** Where the server is, for sentences. */
export const place = location.host;

/** The server answered, and refused. */
export class Refused extends Error {
	constructor(status, message, { code = null, retryAfter = 2, body = null } = {}) {
		super(message);
		Object.assign(this, { status, code, retryAfter, body });
	}
}

/** Nobody answered. */
export class Unreachable extends Error {
	constructor() {
		super(`No server answers at ${place}.`);
	}
}

let askForKey = async () => null;
let asking = null;

/** `ask(refused)` gives the key that the server wants, or null; `refused`: it had one. */
export function onKeyNeeded(ask) {
	askForKey = ask;
}

/** A response with a good status. `asks`: the person may be asked for a key.

Throws Refused, Unreachable, or the AbortError of `signal`. */
export async function call(path, { body, signal, asks } = {}) {
	for (;;) {
		const key = sessionStorage.getItem(KEY);
		const response = await send(path, body, signal, key);
		if (response.ok) return response;
		const refused = await refusal(response);
		if (!asks || refused.status !== 401 || !(await newKey(key))) throw refused;
	}
}

/** The JSON of a response with a good status. */
export async function read(path, options) {
	const response = await call(path, options);
	try {
		return await response.json();
	} catch {
		throw new Refused(response.status, `Expected JSON from ${path}, found something else.`);
	}
}

async function send(path, body, signal, key) {
	const headers = { accept: "application/json, text/event-stream, text/plain" };
	// Headers are bytes to a browser, one for each character.
	if (key) headers.authorization = `Bearer ${String.fromCharCode(...new TextEncoder().encode(key))}`;
	if (body) headers["content-type"] = "application/json";
	const request = { headers, signal, cache: "no-store", credentials: "omit" };
	if (body) Object.assign(request, { method: "POST", body: JSON.stringify(body) });
	try {
		return await fetch(new URL(path, base), request);
	} catch (error) {
		throw error instanceof TypeError ? new Unreachable() : error;
	}
}

async function refusal(response) {
	const retryAfter = Number(response.headers.get("retry-after")) || 2;
	// What is not JSON comes from a proxy between, most likely; its number has to do.
	const body = await response.json().catch(() => null);
	const error = body?.error;
	const name = `${response.status} ${response.statusText}`.trim();
	const message = error?.message ?? (typeof error === "string" ? error : `The server answered ${name}.`);
	return new Refused(response.status, message, { code: error?.code ?? null, retryAfter, body });
}

async function newKey(refused) {
	// Somebody else may have asked meanwhile.
	if (sessionStorage.getItem(KEY) !== refused) return true;
	asking ??= askForKey(refused !== null).finally(() => (asking = null));
	const key = await asking;
	if (key) sessionStorage.setItem(KEY, key);
	return Boolean(key);
}
