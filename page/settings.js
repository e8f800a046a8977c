// The settings of a chat: a form of what the server honours.

import * as chats from "./chats.js";
import { find } from "./dom.js";

const MOST_STOPS = 4;

/** Opens the form; `onsave(settings)` gets what was entered. */
export function edit({ settings }, onsave) {
	const form = find("settings-form");
	const { system, maxTokens, stop, always } = form.elements;
	system.value = settings.system;
	maxTokens.value = settings.maxTokens ?? "";
	stop.value = settings.stop.map((text) => text.replaceAll("\n", "\\n")).join("\n");
	always.checked = false;
	stop.oninput = () => {
		const isMany = stopsIn(stop.value).length > MOST_STOPS;
		stop.setCustomValidity(isMany ? `At most ${MOST_STOPS} lines.` : "");
	};
	stop.oninput();
	form.onsubmit = () => {
		const entered = {
			system: system.value,
			maxTokens: maxTokens.value ? Number(maxTokens.value) : null,
			stop: stopsIn(stop.value),
		};
		if (always.checked) chats.setDefaults(entered);
		onsave(entered);
	};
	find("settings").showModal();
}

/** One text a line; `\n` in it is a line break. */
const stopsIn = (text) =>
	text
		.split("\n")
		.filter(Boolean)
		.map((line) => line.replaceAll("\\n", "\n"));
