"""`bench.cpu`'s arithmetic: ratios of like with like, states of memory, goals, and what becomes of sides that did not run."""

from typing import Any

import pytest

from bench.cpu.sides import SIDES
from bench.cpu.table import (
    FIGURES,
    GOALS,
    Goal,
    found_for,
    is_reached,
    ratios,
    table,
    with_states,
)

LABELS = {name: side.label for name, side in SIDES.items()}
FAST, SLOW = 80.0, 50.0


def run(side: str, number: int = 0, gbs: float = FAST, **figures: float) -> dict[str, Any]:
    beside = {"before_gbs": gbs, "after_gbs": gbs, "bandwidth_gbs": gbs}
    state = "fast" if gbs == FAST else "slow"
    return {"round": number, "side": side, "state": state, **beside, **figures}


def goal_of(ours: str, theirs: str | None, state: str | None = None) -> Goal:
    (goal,) = [g for g in GOALS if (g.ours, g.theirs, g.state) == (ours, theirs, state)]
    return goal


def judged(goal: Goal, *runs: dict[str, Any]) -> tuple[list[float], bool]:
    found = found_for(goal, runs)
    return list(found.values()), is_reached(goal, found)


def test_a_ratio_compares_medians_of_rounds_with_equally_fast_memory() -> None:
    runs = [
        run("ours_bf16", 0, decode_0=8.0),
        run("ours_bf16", 1, decode_0=9.0),
        run("ours_bf16", 2, decode_0=50.0),
        run("llama_bf16", 0, decode_0=4.5),
        run("ours_bf16", 3, SLOW, decode_0=3.0),
        run("llama_bf16", 1, SLOW, decode_0=2.0),
    ]
    found = ratios(runs, "decode_0", "ours_bf16", "llama_bf16")
    assert found == {"fast": 2.0, "slow": 1.5}


def test_a_ratio_of_sides_that_never_had_equally_fast_memory_says_so() -> None:
    runs = [run("ours_bf16", decode_0=8.0), run("llama_bf16", gbs=SLOW, decode_0=4.0)]
    assert ratios(runs, "decode_0", "ours_bf16", "llama_bf16") == {"states differ": 2.0}


def test_a_ratio_of_seconds_is_above_one_when_ours_are_fewer() -> None:
    runs = [run("ours_bf16", load_seconds=2.0), run("llama_bf16", load_seconds=6.0)]
    assert ratios(runs, "load_seconds", "ours_bf16", "llama_bf16") == {"fast": 3.0}


def test_memory_that_changes_its_state_during_a_run_is_mixed() -> None:
    changed = {**run("ours_bf16"), "after_gbs": SLOW}
    runs = with_states([run("ours_bf16"), run("ours_bf16", gbs=SLOW), changed])
    assert [one["state"] for one in runs] == ["fast", "slow", "mixed"]


def test_memory_that_hardly_changes_has_one_state() -> None:
    runs = with_states([run("ours_bf16", gbs=50.0), run("ours_bf16", gbs=45.0)])
    assert {one["state"] for one in runs} == {"fast"}
    assert with_states([]) == []


def test_a_goal_for_fast_memory_leaves_slow_rounds_out() -> None:
    runs = [
        run("ours_w4a16", 0, decode_0=34.0),
        run("llama_q4_0", 0, decode_0=20.0),
        run("ours_w4a16", 1, SLOW, decode_0=22.0),
        run("llama_q4_0", 1, SLOW, decode_0=20.0),
    ]
    fast, slow = (goal_of("ours_w4a16", "llama_q4_0", state) for state in ("fast", "slow"))
    assert judged(fast, *runs) == ([pytest.approx(1.7)], True)
    assert judged(slow, *runs) == ([pytest.approx(1.1)], False)


def test_a_goal_for_any_memory_is_missed_in_either() -> None:
    goal = goal_of("ours_bf16", "llama_bf16")
    fast = (run("ours_bf16", decode_0=12.0), run("llama_bf16", decode_0=10.0))
    slow = (run("ours_bf16", 1, SLOW, decode_0=6.0), run("llama_bf16", 1, SLOW, decode_0=6.0))
    assert judged(goal, *fast) == ([pytest.approx(1.2)], True)
    assert judged(goal, *fast, *slow) == ([pytest.approx(1.2), pytest.approx(1.0)], False)


def test_less_memory_than_the_peer_reaches_the_goal_and_more_misses_it() -> None:
    (goal,) = [goal for goal in GOALS if goal.figure == "peak_gib"]
    peer = run("llama_q4_0", peak_gib=4.0)
    assert judged(goal, run("ours_w4a16", peak_gib=3.0), peer) == ([pytest.approx(0.75)], True)
    assert judged(goal, run("ours_w4a16", peak_gib=5.0), peer) == ([pytest.approx(1.25)], False)


def test_a_long_context_may_slow_decoding_by_a_quarter() -> None:
    (goal,) = [goal for goal in GOALS if goal.behind]
    enough = run("ours_w4a16", decode_0=30.0, decode_4096=25.0)
    too_slow = run("ours_w4a16", decode_0=30.0, decode_4096=20.0)
    assert judged(goal, enough) == ([pytest.approx(1.2)], True)
    assert judged(goal, too_slow) == ([pytest.approx(1.5)], False)


def test_a_side_that_did_not_run_is_in_the_table_with_its_reason() -> None:
    text = table([run("ours_bf16", decode_0=8.0)], LABELS, {"vllm_bf16": "no such package"})
    assert "not run: vLLM, bf16, fast prefill: no such package" in text
    assert "| torchtpu_rs, bf16 | 8 / - / - | 80 | fast |" in text
    assert text.count("not measured") == len(GOALS)


def test_goals_name_sides_and_figures_that_exist() -> None:
    for goal in GOALS:
        assert {goal.ours, goal.theirs or goal.ours} <= set(SIDES)
        assert {goal.figure, goal.behind or goal.figure} <= set(FIGURES)
