// One answer on its way: asks, waits its turn, follows the stream, and says how it ended.

import { connection } from "./connection.js";
import { gauges } from "./metrics.js";
import { call } from "./server.js";
import { chunks, Cut } from "./stream.js";

const PATIENCE = 500;
const BUSY = [429, 503];
const SENDING = "Sending …";

const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

/** The last message of a chat while it is written; "change" says that there is more to show, "end" comes once. */
export class Run extends EventTarget {
	#leave = new AbortController();
	#reason = null;
	#left = null;
	#isPausing = false;
	#hasBegun = false;

	/** What happens while there is no text yet. */
	note = SENDING;

	/** `isContinued`: the message has a text that the model goes on with. */
	constructor(chat, model, isContinued) {
		super();
		this.answer = chat.messages.at(-1);
		this.body = request(chat, model, isContinued);
		Object.assign(this.answer, { state: "writing", problem: null, timings: null });
	}

	/** Ends the answer, here and on the server, which sees the connection close. */
	stop() {
		this.#leave.abort();
	}

	/** Marks the answer as one that ends here: the connection breaks when the page goes. */
	leave() {
		this.#left = "the page was left before the answer ended.";
		this.#end("cut", this.#left);
	}

	/** Runs to the end, whichever. */
	async go() {
		this.#watchQueue();
		try {
			for await (const chunk of chunks(await this.#admitted())) this.#take(chunk);
			if (!this.#reason) throw new Cut("The answer stopped before its end.");
			this.#end(this.#reason === "length" ? "length" : "done", null);
		} catch (error) {
			if (error.name === "AbortError") this.#end("stopped", null);
			else this.#end(this.#left || error instanceof Cut ? "cut" : "failed", this.#left ?? error.message);
			connection.look();
		}
		this.dispatchEvent(new Event("end"));
	}

	async #admitted() {
		for (;;) {
			try {
				return await call("v1/chat/completions", { body: this.body, signal: this.#leave.signal, asks: true });
			} catch (error) {
				if (!BUSY.includes(error.status)) throw error;
				await this.#pause(error);
			}
		}
	}

	/** Waits as long as the server asks for; less if it was loading and is ready sooner. */
	async #pause({ code, message, retryAfter }) {
		this.#isPausing = true;
		connection.look();
		for (let left = retryAfter; left > 0; left -= 0.25) {
			const { state, text } = connection;
			if (code === "model_loading" && state === "ok") break;
			this.#tell(state === "loading" ? text : `${message} Asking again in ${Math.ceil(left)} s.`);
			await sleep(250);
			this.#leave.signal.throwIfAborted();
		}
		this.#isPausing = false;
		this.#tell(SENDING);
	}

	/** Says where the request stands until the first piece of the answer comes. */
	async #watchQueue() {
		for (;;) {
			await sleep(PATIENCE);
			// A server without these counters has nothing to tell about its queue.
			const { running, waiting } = this.#isPausing ? {} : await gauges().catch(() => ({}));
			if (this.#hasBegun || this.answer.state !== "writing") return;
			if (waiting) this.#tell(`In the queue: ${running} running, ${waiting} waiting, this one among them.`);
			else if (running) this.#tell("The model reads …");
		}
	}

	#tell(note) {
		if (note === this.note) return;
		this.note = note;
		this.dispatchEvent(new Event("change"));
	}

	#take({ choices: [choice] = [], timings, usage }) {
		const { answer } = this;
		this.#hasBegun = true;
		const { content, reasoning_content, reasoning, tool_calls = [] } = choice?.delta ?? {};
		answer.content += content ?? "";
		answer.reasoning += reasoning_content ?? reasoning ?? "";
		for (const { index = 0, id, function: part } of tool_calls) {
			const called = (answer.calls[index] ??= { id, name: "", arguments: "" });
			called.name += part?.name ?? "";
			called.arguments += part?.arguments ?? "";
		}
		this.#reason = choice?.finish_reason ?? this.#reason;
		answer.timings = timings ?? answer.timings ?? (usage && { predicted_n: usage.completion_tokens });
		this.dispatchEvent(new Event("change"));
	}

	#end(state, problem) {
		Object.assign(this.answer, { state, problem });
	}
}

/** The body of a request for the last message of a chat. */
function request({ settings: { system, maxTokens, stop }, messages }, model, isContinued) {
	const said = (isContinued ? messages : messages.slice(0, -1))
		.filter(({ content, calls }) => content.trim() || calls?.length)
		.map(wire);
	if (system.trim()) said.unshift({ role: "system", content: system });
	return {
		model,
		messages: said,
		stream: true,
		stream_options: { include_usage: true },
		max_tokens: maxTokens ?? undefined,
		stop: stop.length ? stop : undefined,
		...(isContinued && { continue_final_message: true, add_generation_prompt: false }),
	};
}

function wire({ role, content, calls = [] }) {
	if (!calls.length) return { role, content };
	const tool_calls = calls.map(({ id, ...called }) => ({ id, type: "function", function: called }));
	return { role, content, tool_calls };
}
