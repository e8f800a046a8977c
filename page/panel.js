// The status panel: stages of the VM, slots, counters, what is loaded. It asks only while it is open.

import { connection } from "./connection.js";
import { find, make } from "./dom.js";
import { samples, sum } from "./metrics.js";
import { Plot } from "./plot.js";
import { read } from "./server.js";

const EVERY = 1000;
/** The engine's facts change seldom, and each question is a line in the server's log. */
const FACTS_EVERY = 10;
const WAYS = { vm: "a VM of the rig", url: "a given address", router: "a router" };

let timer;
let turns;
let plots;
let before;
let slots = 1;

/** Opens or closes the panel. */
export function toggle(isOpen = find("panel").hidden) {
	find("panel").hidden = !isOpen;
	find("status").ariaExpanded = isOpen;
	clearTimeout(timer);
	if (!isOpen) return find("status").focus();
	turns = 0;
	before = null;
	plots = {
		made: new Plot("Tokens made per second"),
		read: new Plot("Prompt tokens read per second"),
		load: new Plot("Requests running + waiting"),
		cache: new Plot("Cache in use", 0.05),
	};
	find("plots").replaceChildren(...Object.values(plots).map((plot) => plot.element));
	find("panel-close").focus();
	return turn();
}

async function turn() {
	if (!document.hidden) {
		const shim = await connection.askShim();
		find("vm").hidden = !shim;
		if (shim) showShim(shim);
		let problem = "";
		try {
			if (turns % FACTS_EVERY === 0) showEngine(await read("v1/engine"));
			showCounters(await samples());
			turns += 1;
		} catch ({ message }) {
			problem = message;
			turns = 0;
			before = null;
		}
		find("panel-problem").textContent = problem;
		find("served").hidden = Boolean(problem);
	}
	if (!find("panel").hidden) timer = setTimeout(turn, EVERY);
}

function showEngine(facts) {
	const { layout = {}, versions = {}, weight_bytes, cache_bytes } = facts;
	slots = facts.slots ?? 1;
	rows("loaded", {
		Model: facts.model,
		Device: facts.device,
		Weights: `${facts.weight_format}, ${megabytes(weight_bytes)}`,
		"Computes in": facts.dtype,
		Instructions: facts.instructions,
		Context: `${layout.context} tokens`,
		Cache: megabytes(cache_bytes),
		Decoding: facts.decoding,
		Load: `${facts.load_seconds} s`,
		Warmup: `${facts.warmup_seconds} s`,
		PyTorch: versions.torch,
		"torchtpu-rs": versions.torchtpu_rs,
	});
}

function showCounters(found) {
	const count = (name, labels) => sum(found, name, labels) ?? 0;
	const now = { at: performance.now(), made: count("generation_tokens_total"), read: count("prompt_tokens_total") };
	for (const name of ["made", "read"]) {
		// A server that was started again counts from 0.
		const grown = before ? Math.max(0, now[name] - before[name]) : 0;
		const rate = before ? (grown * 1000) / (now.at - before.at) : 0;
		plots[name].push(rate, rate.toFixed());
	}
	before = now;
	const running = count("requests_running");
	const waiting = count("requests_waiting");
	const usage = count("kv_cache_usage_ratio");
	plots.load.push(running + waiting, `${running} + ${waiting}`);
	plots.cache.push(usage, `${(usage * 100).toFixed(1)} %`);
	const boxes = Array.from({ length: slots }, (_, at) => make("i", { class: at < running ? "slot busy" : "slot" }));
	find("slots").replaceChildren(...boxes);
	find("slots-text").textContent = `${running} of ${slots} in use, ${waiting} waiting`;
	const ended = (finish_reason) => count("requests_total", { finish_reason });
	const mean = (name) => {
		const times = count(`${name}_seconds_count`);
		return times ? `${((count(`${name}_seconds_sum`) / times) * 1000).toFixed(1)} ms` : null;
	};
	rows("counts", {
		"Answers to their end": ended("stop") + ended("tool_calls"),
		"Ended at a limit": ended("length"),
		Cancelled: ended("cancelled"),
		Refused: ended("error"),
		"Tokens made": now.made,
		"Prompt tokens read": now.read,
		"First token, mean": mean("time_to_first_token"),
		"Between tokens, mean": mean("inter_token_latency"),
	});
}

function showShim({ kind, upstream, queued_resource, zone, project, health, stages = [], stage, error }) {
	rows("vm-facts", {
		Through: WAYS[kind] ?? kind,
		Server: upstream,
		"Last answer": health && `HTTP ${health}`,
		"Queued resource": queued_resource,
		Zone: zone,
		Project: project,
		Problem: error,
	});
	const at = stages.findIndex(([name]) => name === stage);
	const items = stages.map(([name, text], index) => {
		const when = index === at ? "now" : index < at || at < 0 ? "past" : "later";
		return make("li", { class: when, "aria-current": when === "now" && "step" }, make("b", {}, name), ` ${text}`);
	});
	find("stages").replaceChildren(...items);
}

function rows(id, facts) {
	const isKnown = ([, value]) => value || value === 0;
	const pairs = Object.entries(facts).filter(isKnown);
	find(id).replaceChildren(...pairs.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

const megabytes = (bytes) => (bytes ? `${(bytes / 1e6).toFixed(1)} MB` : "");
