// Draws the messages of a chat, and what can be done with each.

import { button, copyButton, find, make } from "./dom.js";
import { Prose } from "./markdown.js";

const ENDS = {
	length: "Ended at the limit of tokens.",
	stopped: "Stopped.",
	writing: "Another tab writes this answer, or was closed while it did.",
};

let views = [];

/** Draws all of a chat. `acts` has edit(message, text), again() and goOn(); `run` is the answer being written. */
export function show(chat, run, acts) {
	views = chat.messages.map((message) =>
		message.role === "user" ? new Question(message, acts) : new Answer(message, acts),
	);
	find("thread").replaceChildren(...views.map((view) => view.element));
	update(run);
}

/** Draws what changed. */
export function update(run) {
	for (const view of views) view.update(view === views.at(-1), run);
}

/** Enter sends, with Shift it is a new line; while an input method composes, Enter is its own. */
export const isSend = ({ key, shiftKey, isComposing }) => key === "Enter" && !shiftKey && !isComposing;

class Question {
	#text = make("div", { class: "text" });
	#tools = make("div", { class: "tools" });
	#edit = button("Edit", "edit", () => this.#open());

	constructor(message, acts) {
		this.message = message;
		this.acts = acts;
		const label = make("h2", { class: "sr" }, "You");
		this.element = make("li", { class: "message question" }, label, this.#text, this.#tools);
		this.#read();
	}

	update(_isLast, run) {
		this.#edit.disabled = Boolean(run);
	}

	#read() {
		const { content } = this.message;
		this.#text.replaceChildren(content);
		this.#tools.replaceChildren(
			copyButton(() => content),
			this.#edit,
		);
	}

	#open() {
		const field = make("textarea", { "aria-label": "Your message" });
		field.value = this.message.content;
		const leave = () => {
			this.#read();
			this.#edit.focus();
		};
		const send = () => field.value.trim() && this.acts.edit(this.message, field.value.trim());
		field.addEventListener("keydown", (event) => {
			if (event.key === "Escape") leave();
			else if (isSend(event)) send();
			else return;
			event.preventDefault();
			event.stopPropagation();
		});
		this.#text.replaceChildren(field);
		this.#tools.replaceChildren(button("Cancel", null, leave), button("Send", null, send, "primary"));
		field.focus();
	}
}

class Answer {
	#thought = new Prose(make("div", { class: "prose" }));
	#thinking = make("details", { class: "thinking" }, make("summary", {}, "Thoughts"), this.#thought.root);
	#prose = new Prose(make("div", { class: "prose" }));
	#calls = make("div", { class: "calls" });
	#note = make("p", { class: "note" });
	#facts = make("p", { class: "facts" });
	#tools = make("div", { class: "tools" });
	#drawn = null;

	constructor(message, acts) {
		this.message = message;
		this.acts = acts;
		const label = make("h2", { class: "sr" }, "Answer");
		const foot = make("div", { class: "foot" }, this.#tools, this.#facts);
		const parts = [this.#thinking, this.#prose.root, this.#calls, this.#note, foot];
		this.element = make("li", { class: "message answer" }, label, ...parts);
	}

	update(isLast, run) {
		const { message } = this;
		const { content, reasoning, calls, state, problem, timings } = message;
		const isRunning = run?.answer === message;
		const now = JSON.stringify([content.length, reasoning.length, calls, state, run?.note, isLast, !run]);
		if (now === this.#drawn) return;
		this.#drawn = now;
		this.#prose.show(content);
		this.#thinking.hidden = !reasoning;
		this.#thought.show(reasoning);
		this.#calls.replaceChildren(...calls.map(callOf));
		this.element.ariaBusy = isRunning;
		this.element.classList.toggle("writing", isRunning);
		const isBad = !isRunning && Boolean(problem);
		const end = isBad ? (state === "cut" ? `Cut: ${problem}` : problem) : (ENDS[state] ?? "");
		const note = content || reasoning || calls.length ? "" : run?.note;
		this.#note.textContent = isRunning ? note : end;
		this.#note.classList.toggle("bad", isBad);
		this.#facts.textContent = isRunning ? "" : facts(timings ?? {});
		this.#tools.replaceChildren(...(isRunning ? [] : this.#buttons(isLast && !run)));
	}

	#buttons(canAct) {
		const { content, state, calls } = this.message;
		const isPart = state !== "done" && content.trim() && !calls.length;
		return [
			content && copyButton(() => content),
			canAct && isPart && button("Continue", "on", () => this.acts.goOn()),
			canAct && button(state === "failed" ? "Try again" : "Regenerate", "again", () => this.acts.again()),
		].filter(Boolean);
	}
}

/** Speed and waiting, as the server measured them. */
function facts({ predicted_n: tokens, predicted_per_second: rate, prompt_ms: read, queue_ms: queued = 0 }) {
	const said = [];
	if (tokens) said.push(`${tokens} ${tokens === 1 ? "token" : "tokens"}`);
	if (rate) said.push(`${rate.toFixed(rate < 10 ? 1 : 0)} tokens/s`);
	if (read) said.push(`first token after ${duration(read + queued)}`);
	if (queued >= 100) said.push(`${duration(queued)} of it in the queue`);
	return said.join(" · ");
}

const duration = (ms) => (ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(1)} s`);

function callOf({ name, arguments: text }) {
	let shown = text;
	try {
		shown = JSON.stringify(JSON.parse(text), null, 2);
	} catch {
		// Not whole yet, or never: shown as it came.
	}
	const head = make("div", { class: "head" }, make("span", {}, "Tool call: ", make("b", {}, name)));
	const label = { tabindex: 0, role: "group", "aria-label": `Arguments for ${name}` };
	return make("div", { class: "code" }, head, make("pre", label, make("code", {}, shown)));
}
