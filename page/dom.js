// Makes elements. Text becomes text nodes: nothing here parses markup.

export const find = (id) => document.getElementById(id);

/** An element with attributes (`onclick` is a listener; false and null leave one out) and children. */
export const make = (tag, attributes, ...children) =>
	fill(document.createElement(tag), attributes, children);

/** The same for SVG. */
export const draw = (tag, attributes, ...children) =>
	fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);

function fill(element, attributes, children) {
	for (const [name, value] of Object.entries(attributes)) {
		if (name === "onclick") element.addEventListener("click", value);
		else if (value !== false && value != null) element.setAttribute(name, value);
	}
	element.append(...children.filter((child) => child != null && child !== false));
	return element;
}

/** One of the icons at the end of index.html. */
export const icon = (name) =>
	draw("svg", { class: "icon", "aria-hidden": "true" }, draw("use", { href: `#i-${name}` }));

/** A button with a label and, where one is named, an icon. */
export const button = (label, name, onclick, look = "quiet") =>
	make("button", { type: "button", class: look, onclick }, name && icon(name), label);

/** Says a sentence to screen readers, after what they are saying. */
export function announce(text) {
	find("said").textContent = text;
}

/** A button that puts what `text()` gives on the clipboard, and says so. */
export const copyButton = (text) =>
	button("Copy", "copy", async ({ currentTarget: { lastChild: label } }) => {
		label.textContent = (await toClipboard(text())) ? "Copied" : "Not copied";
		announce(label.textContent);
		setTimeout(() => (label.textContent = "Copy"), 1500);
	});

async function toClipboard(text) {
	// Browsers hide the clipboard from pages that come over http from another machine; the old way works there.
	if (navigator.clipboard) {
		return navigator.clipboard.writeText(text).then(
			() => true,
			() => false,
		);
	}
	const field = make("textarea", { class: "sr" });
	field.value = text;
	document.body.append(field);
	field.select();
	const isCopied = document.execCommand("copy");
	field.remove();
	return isCopied;
}
