// Draws Markdown, also while it grows. Markup in it is shown as text; what comes out is sanitized all the same.

import { copyButton, make } from "./dom.js";
import { Marked } from "./vendor/marked.esm.js";
import "./vendor/purify.min.js";

const HARMLESS = /^<\/?(?:br|kbd|sub|sup)\s*\/?>$/i;
const KEPT = {
	ALLOWED_TAGS: "a blockquote br code del em h3 h4 h5 h6 hr kbd li ol p pre strong sub sup table tbody td th thead tr ul".split(" "),
	ALLOWED_ATTR: ["align", "class", "href", "start"],
	ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
	ADD_URI_SAFE_ATTR: ["align", "start"],
	ALLOW_ARIA_ATTR: false,
	ALLOW_DATA_ATTR: false,
	RETURN_DOM_FRAGMENT: true,
};

const escaped = (text) => text.replace(/[&<>"']/g, (found) => `&#${found.charCodeAt(0)};`);

const marked = new Marked({
	renderer: {
		html({ text, block }) {
			if (block) return `<p>${escaped(text)}</p>`;
			return HARMLESS.test(text) ? text : escaped(text);
		},
		// A picture would be loaded from wherever the model says; a link is followed only on purpose.
		image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || "picture")}</a>`,
		// The page's own headings come above those of an answer.
		heading({ tokens, depth }) {
			const tag = `h${Math.min(depth + 2, 6)}`;
			return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
		},
		checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
	},
});

/** A text that grows, drawn block by block: what did not change is not touched, so it can be selected meanwhile. */
export class Prose {
	#blocks = [];

	constructor(root) {
		this.root = root;
	}

	/** Draws `text`, which usually begins with the text drawn before. */
	show(text) {
		const tokens = marked.lexer(text).filter(({ type }) => type !== "space" && type !== "def");
		tokens.forEach((token, at) => {
			const html = marked.parser([token]);
			const old = this.#blocks[at];
			if (old?.html === html) return;
			const element = make("div", { class: "block" }, clean(html));
			if (old) old.element.replaceWith(element);
			else this.root.append(element);
			this.#blocks[at] = { html, element };
		});
		for (const { element } of this.#blocks.splice(tokens.length)) element.remove();
	}
}

function clean(html) {
	const fragment = globalThis.DOMPurify.sanitize(html, KEPT);
	for (const link of fragment.querySelectorAll("a")) {
		link.target = "_blank";
		link.rel = "noopener noreferrer";
	}
	for (const table of fragment.querySelectorAll("table")) {
		const around = make("div", { class: "wide", tabindex: 0, role: "group", "aria-label": "Table" });
		table.replaceWith(around);
		around.append(table);
	}
	for (const pre of fragment.querySelectorAll("pre")) frame(pre);
	return fragment;
}

/** Puts a head with the language and a button on a block of code. */
function frame(pre) {
	const language = /language-(\S+)/.exec(pre.firstChild.className)?.[1] ?? "code";
	const copy = copyButton(() => pre.textContent.replace(/\n$/, ""));
	const figure = make("div", { class: "code" }, make("div", { class: "head" }, make("span", {}, language), copy));
	pre.replaceWith(figure);
	Object.assign(pre, { tabIndex: 0, role: "group", ariaLabel: `Code: ${language}` });
	figure.append(pre);
}
