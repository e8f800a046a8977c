"""Around the processes of benchmarks: jobs and figures that cross, memory, failures, llama.cpp's report, the plot."""

import os
import sys
from pathlib import Path

import pytest

from bench import process
from bench.cpu.llama import figures_of
from bench.cpu.plan import Plan
from bench.cpu.plot import draw
from bench.measures import Job, measure

STATUS = """Name:\tllama-bench
VmPeak:\t 5000000 kB
VmHWM:\t 3000000 kB
VmRSS:\t 2900000 kB
RssAnon:\t  400000 kB
RssFile:\t 2500000 kB
Threads:\t2
"""
# Two tests of a real report, shortened to the keys that are read and some that are not.
REPORT = """[
  {"model_type": "gemma4 E2B Q4_0", "n_prompt": 512, "n_gen": 0, "n_depth": 0,
   "avg_ns": 4000000000, "avg_ts": 128.0, "samples_ts": [ 128.0 ]},
  {"model_type": "gemma4 E2B Q4_0", "n_prompt": 0, "n_gen": 24, "n_depth": 4096,
   "avg_ns": 2000000000, "avg_ts": 12.0, "samples_ts": [ 12.0 ]}
]"""


class Counting:
    """An engine that knows what was asked of it."""

    def __init__(self) -> None:
        self.prompts: list[int] = []

    def prefill(self, ids: list[int]) -> None:
        self.prompts.append(len(ids))

    def decode_seconds(self, ids: list[int], tokens: int) -> float:
        self.prompts.append(len(ids))
        return tokens / 20


def test_llama_benchs_report_becomes_rates_by_our_names() -> None:
    assert figures_of(REPORT) == {"prefill_512": 128.0, "decode_4096": 12.0}


def test_sizes_are_read_from_a_processs_status() -> None:
    sizes = process.parse_status(STATUS)
    assert (sizes["VmHWM"], sizes["RssAnon"]) == (3_000_000, 400_000)
    assert "Threads" not in sizes


def test_a_job_measures_the_first_token_then_each_prompt() -> None:
    engine = Counting()
    job = Plan(prefills=(5,), depths=(0, 7), tokens=4).job(Path("nowhere"))
    figures = measure(lambda _: engine, job)
    assert engine.prompts == [64, 5, 5, 5, 1, 7]
    assert figures["decode_0"] == figures["decode_7"] == pytest.approx(20)
    assert set(figures) >= {"prefill_5", "load_seconds", "load_to_first_seconds"}


def test_a_plan_leaves_room_for_the_tokens_it_makes() -> None:
    job = Plan(prefills=(), depths=(512,), tokens=24).job(Path("nowhere"))
    assert job.context == 512 + 24 + 1
    assert Plan(prefills=(), depths=()).job(Path("nowhere")).prefill == {}


def test_a_job_crosses_to_a_process_and_its_figures_come_back() -> None:
    body = (
        "from bench.measures import main\n"
        "class Engine:\n"
        "    def prefill(self, ids): print('an engine may print')\n"
        "    def decode_seconds(self, ids, tokens): return tokens / len(ids)\n"
        "main(lambda job: Engine())"
    )
    job = Job("nowhere", [2], {}, {"decode_3": [2, 3, 4]}, decode_tokens=6, context=16)
    figures = process.run_job([sys.executable, "-c", body], job, log=Path(os.devnull))
    assert figures["decode_3"] == pytest.approx(3)
    assert figures["start_to_first_seconds"] > figures["load_to_first_seconds"]


def test_the_most_memory_of_a_process_is_seen() -> None:
    body = "import time; held = b'x' * (300 << 20); time.sleep(1)"
    done = process.run([sys.executable, "-c", body])
    assert 0.29 < done.anonymous_gib <= done.peak_gib < 0.6


def test_a_process_that_fails_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with pytest.raises(process.ProcessError, match="status 1: no such model"):
        process.run(command, log=tmp_path / "log.txt")


def test_results_are_drawn_the_same_each_time(tmp_path: Path) -> None:
    runs = [
        {"round": 0, "side": "ours_bf16", "decode_0": 8.0, "peak_gib": 5.0},
        {"round": 0, "side": "llama_bf16", "decode_0": 7.0},
    ]
    labels = {"ours_bf16": "ours", "llama_bf16": "theirs", "vllm_bf16": "not run"}
    for name in ("one.svg", "two.svg"):
        draw(runs, labels, tmp_path / name)
    drawn = (tmp_path / "one.svg").read_text()
    assert "theirs" in drawn
    assert "not run" not in drawn
    assert drawn == (tmp_path / "two.svg").read_text()
