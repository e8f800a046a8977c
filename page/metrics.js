// Reads the server's counters out of Prometheus' text.

import { call } from "./server.js";

const SAMPLE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;

/** All samples: [{name, labels, value}]. */
export async function samples() {
	const text = await (await call("metrics")).text();
	const found = [];
	for (const line of text.split("\n")) {
		const [, name, labels = "", value] = SAMPLE.exec(line) ?? [];
		if (name) found.push({ name, labels: labelsOf(labels), value: Number(value) });
	}
	return found;
}

/** The sum of the samples with a name and these labels; undefined where there is none. */
export function sum(found, name, wanted = {}) {
	const fits = ({ labels }) => Object.entries(wanted).every(([key, value]) => labels[key] === value);
	const values = found.filter((sample) => sample.name === `torchtpu_${name}` && fits(sample));
	return values.length ? values.reduce((total, { value }) => total + value, 0) : undefined;
}

/** Requests in the engine and in the queue. */
export async function gauges() {
	const found = await samples();
	return { running: sum(found, "requests_running"), waiting: sum(found, "requests_waiting") };
}

function labelsOf(text) {
	const pairs = text.matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g);
	return Object.fromEntries([...pairs].map(([, key, value]) => [key, value]));
}
