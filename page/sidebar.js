// The list of chats, and chats as files.

import * as chats from "./chats.js";
import { find, make } from "./dom.js";

/** Draws the list; `shown` is the chat on the page, `runs` has those that are being answered. */
export function list(shown, runs, open) {
	const items = chats.all().map((chat) => {
		const look = { type: "button", onclick: () => open(chat), "aria-current": chat === shown && "page" };
		const isRunning = runs.has(chat) && make("i", { class: "dot busy", role: "img", "aria-label": "being answered" });
		return make("li", {}, make("button", look, make("span", { class: "cut" }, chat.title), isRunning));
	});
	// The focus is not to be lost when an answer ends meanwhile.
	const at = [...find("chats").children].indexOf(document.activeElement.parentElement);
	find("chats").replaceChildren(...items);
	items[at]?.firstChild.focus();
	find("no-chats").hidden = items.length > 0;
}

export const isDrawerOpen = () => document.body.classList.contains("with-chats");

/** Opens or closes the list where the page is too narrow to always show it. */
export function drawer(isOpen) {
	if (isOpen === isDrawerOpen()) return;
	document.body.classList.toggle("with-chats", isOpen);
	find("menu").ariaExpanded = isOpen;
	find("main").inert = isOpen;
	find(isOpen ? "menu-close" : "menu").focus();
}

/** Gives chats to the person as a file. */
export function download(some, name) {
	const href = URL.createObjectURL(new Blob([chats.exported(some)], { type: "application/json" }));
	make("a", { href, download: `${name}.json` }).click();
	setTimeout(() => URL.revokeObjectURL(href), 10_000);
}

/** Keeps and returns the chats of a file. Throws an Error with a sentence. */
export async function upload(file) {
	const found = chats.imported(await file.text());
	const told = found.map(chats.save).find(Boolean);
	if (told) throw new Error(told);
	return found;
}
