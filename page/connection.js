// Asks the server again and again how it is, and the laptop's shim, where there is one, how the VM is.

import { call, place, read, Refused, Unreachable } from "./server.js";

const CALM = 5000;
const ANXIOUS = 1000;
const LIMIT = 8000;

/** What is known of the server; "change" is told when it is something else than before. */
class Connection extends EventTarget {
	/** ok, loading, booting, broken or gone. */
	state = "gone";
	/** The state in a sentence. */
	text = "";
	/** 0 to 1 while the model loads. */
	progress = null;
	#shim;
	#timer;
	#looking;

	/** Looks now, and from then on every few seconds while the page is seen. */
	look() {
		clearTimeout(this.#timer);
		this.#looking ??= this.#lookOnce().finally(() => {
			this.#looking = null;
			const next = this.state === "ok" ? CALM : ANXIOUS;
			if (!document.hidden) this.#timer = setTimeout(() => this.look(), next);
		});
	}

	/** What the shim says; null where none is, undefined when it does not answer. */
	async askShim() {
		if (this.#shim === null) return null;
		try {
			this.#shim = await read("shim/status", { signal: AbortSignal.timeout(LIMIT) });
		} catch ({ status }) {
			// A server without a shim in front knows no such path, or wants its key first.
			this.#shim = status === 404 || status === 401 ? null : undefined;
		}
		return this.#shim;
	}

	async #lookOnce() {
		const found = await health();
		if (["broken", "gone"].includes(found.state)) Object.assign(found, boot(await this.askShim()));
		const isNew = Object.entries(found).some(([name, value]) => this[name] !== value);
		Object.assign(this, found);
		if (isNew) this.dispatchEvent(new Event("change"));
	}
}

export const connection = new Connection();
document.addEventListener("visibilitychange", () => document.hidden || connection.look());

async function health() {
	try {
		await call("health", { signal: AbortSignal.timeout(LIMIT) });
		return { state: "ok", text: "Ready", progress: null };
	} catch (error) {
		if (error instanceof Refused) return unwell(error);
		const waited = error instanceof Unreachable ? error.message : `${place} has not answered for ${LIMIT / 1000} s.`;
		return { state: "gone", text: `${waited} Looking again every second.`, progress: null };
	}
}

function unwell({ message, body }) {
	const { status, phase, progress, total, error } = body ?? {};
	if (status === "loading") {
		const share = total ? ` ${Math.round(progress * 100)} %` : "";
		return { state: status, text: `Loading the model: ${phase}${share}`, progress: total ? progress : null };
	}
	const words = {
		draining: "The server is shutting down.",
		failed: `The model could not be loaded: ${error}`,
		dead: "The server's engine has ended; it has to be started again.",
	};
	return { state: "broken", text: words[status] ?? message, progress: null };
}

/** What a VM that does not serve yet says, in place of a server that does not answer. */
function boot(shim) {
	if (shim?.error) return { text: shim.error };
	const [name, text] = shim?.stages?.find(([each]) => each === shim.stage) ?? [];
	return name ? { state: "booting", text: `The VM is at ${name}: ${text}` } : {};
}
