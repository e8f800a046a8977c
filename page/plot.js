// A small line plot of the last two minutes.

import { draw, make } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 40;
const ROOM = 120;

/** A plot with a title; the highest value, or `least`, is its height. */
export class Plot {
	#values = [];
	#now = make("b", {});
	#area = draw("polygon", { class: "area" });
	#line = draw("polyline", { class: "line" });
	#svg = draw("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" }, this.#area, this.#line);

	constructor(title, least = 1) {
		this.title = title;
		this.least = least;
		this.element = make("div", { class: "plot" }, make("p", {}, title, this.#now), this.#svg);
		this.#svg.ariaLabel = title;
	}

	/** Adds a value and says it as `text`. */
	push(value, text) {
		this.#values = [...this.#values, value].slice(-ROOM);
		const most = Math.max(this.least, ...this.#values);
		const first = ROOM - this.#values.length;
		const x = (at) => (((first + at) * WIDTH) / (ROOM - 1)).toFixed(1);
		const y = (each) => (HEIGHT - 1 - (each / most) * (HEIGHT - 3)).toFixed(1);
		const points = this.#values.map((each, at) => `${x(at)},${y(each)}`).join(" ");
		this.#line.setAttribute("points", points);
		this.#area.setAttribute("points", `${x(0)},${HEIGHT} ${points} ${WIDTH},${HEIGHT}`);
		this.#now.textContent = text;
		this.#svg.ariaLabel = `${this.title}: ${text}`;
	}
}
