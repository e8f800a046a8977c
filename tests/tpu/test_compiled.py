"""The Rust step compiled on TorchTPU: same tokens as exact mode, few launches, nothing compiled twice."""

import gc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

import torchtpu_rs
from models import EMBEDDED
from tests import checkpoints, pack
from tests.pack import Packing
from tests.tpu.conftest import CONTEXT, PLAN, compiled, exact, prompt
from torchtpu_rs import capture
from torchtpu_rs.capture import Programs
from torchtpu_rs.recording import Plan, Program, Recording
from tpu import device

NEW = 64
LENGTHS = (1, 3, 16, 17, 40, 70)
"""Shorter and longer than a chunk, than the window of 8, and of every remainder."""


@pytest.fixture(autouse=True)
def _engines_end_on_their_own_thread() -> Iterator[None]:
    yield
    gc.collect()


@pytest.fixture(scope="module")
def shared(dense: Path) -> tuple[torchtpu_rs.Engine, Programs]:
    return compiled(dense)


def test_the_smoke_test_runs_on_the_device() -> None:
    total = torchtpu_rs.matmul_sum(torch.zeros(1, device="tpu"))
    assert (str(total.device), total.item()) == ("tpu:0", 512.0)


@pytest.mark.parametrize("length", LENGTHS)
def test_compiled_tokens_are_those_of_exact_mode(
    dense: Path, shared: tuple[torchtpu_rs.Engine, Programs], length: int
) -> None:
    wanted = exact(dense).decode(prompt(length), NEW, [])
    assert shared[0].decode(prompt(length), NEW, [], 8).ids == wanted.ids


@pytest.mark.parametrize("mode", ["eager", "fused"])
def test_single_operations_give_the_tokens_of_exact_mode(dense: Path, mode: str) -> None:
    device.start(simulate=True, mode=mode)
    try:
        engine = torchtpu_rs.Engine(
            dense, torch.zeros(1, device="tpu"), CONTEXT, dtype="float32", prefill_chunk=16
        )
        wanted = exact(dense).decode(prompt(19), NEW, [])
        assert engine.decode(prompt(19), NEW, []).ids == wanted.ids
    finally:
        device.start(simulate=True)


def test_values_that_are_raw_keys_and_kv_heads_of_their_own_compile_too(k_eq_v: Path) -> None:
    engine, _ = compiled(k_eq_v, plan=Plan(slots=2, chunks=(16,), steps=(8,)))
    for length in (3, 40):
        wanted = exact(k_eq_v).decode(prompt(length), NEW, [])
        assert engine.decode(prompt(length), NEW, [], 8).ids == wanted.ids


def test_gemma_3_compiles_too(gemma3: Path) -> None:
    engine, _ = compiled(gemma3, plan=Plan(slots=2, chunks=(16,), steps=(8,)))
    for length in (3, 40):
        wanted = exact(gemma3).decode(prompt(length), NEW, [])
        assert engine.decode(prompt(length), NEW, [], 8).ids == wanted.ids


@pytest.mark.parametrize("experts", [4, 8], ids=["all_at_once", "one_by_one"])
def test_experts_compile_whether_all_are_multiplied_or_the_chosen_ones_alone(
    tmp_path: Path, experts: int
) -> None:
    """Two rows of two experts each: of four all are multiplied, of eight the four; a chunk takes all of both."""
    settings = checkpoints.EXPERTS | {
        "num_experts": experts,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    folder = checkpoints.make(tmp_path, settings)
    plan = Plan(slots=2, chunks=(16,), steps=(8,))
    engine, _ = compiled(folder, plan=plan)
    for length in (3, 40):
        wanted = exact(folder).decode(prompt(length), NEW, [])
        assert engine.decode(prompt(length), NEW, [], 8).ids == wanted.ids
    judge = torchtpu_rs.Engine(
        folder, torch.zeros(1), CONTEXT, dtype="float32", prefill_chunk=16, arithmetic="int8"
    )
    engine, _ = compiled(folder, plan=replace(plan, int8=True))
    assert engine.decode(prompt(19), NEW, [], 8).ids == judge.decode(prompt(19), NEW, []).ids


def test_packed_weights_are_unpacked_for_programs_and_made_int8_from_there(
    dense: Path, tmp_path: Path
) -> None:
    packed = pack.make(tmp_path, dense, Packing(tables=True))
    plan = Plan(slots=2, chunks=(16,), steps=(8,))
    wanted = exact(packed).decode(prompt(19), NEW, [])
    assert compiled(packed, plan=plan)[0].decode(prompt(19), NEW, [], 8).ids == wanted.ids
    judge = torchtpu_rs.Engine(
        packed, torch.zeros(1), CONTEXT, dtype="float32", prefill_chunk=16, arithmetic="int8"
    )
    engine, _ = compiled(packed, plan=replace(plan, int8=True))
    assert engine.info()["weight_format"] == "int8"
    assert engine.decode(prompt(19), NEW, [], 8).ids == judge.decode(prompt(19), NEW, []).ids


def test_the_embedded_model_answers_in_bfloat16_as_exact_mode_does() -> None:
    """Teacher forcing: where the two part, exact mode's own margin there must be within bfloat16's rounding."""
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    engine, _ = compiled(EMBEDDED, "bfloat16", plan=Plan(chunks=(32,), steps=(8,)))
    judge = exact(EMBEDDED, "bfloat16")
    for question in (
        "Hello!",
        "What is a ring cache?",
        "What is 12 plus 30?",
        "Tell me about Rust.",
    ):
        text = f"<bos><|turn>user\n{question}<turn|>\n<|turn>model\n"
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        wanted = judge.decode(ids, 40).ids
        forced = judge.logits(ids, wanted)
        given: list[int] = []
        while len(given) < len(wanted):
            given += engine.decode(ids + wanted[: len(given)], len(wanted) - len(given), [], 8).ids
            at = next(
                (i for i, (a, b) in enumerate(zip(given, wanted, strict=False)) if a != b), None
            )
            if at is not None:
                row = forced[at].float()
                assert row[wanted[at]] - row[given[at]] <= 0.125
                given = wanted[: at + 1]
        assert given == wanted


def test_a_launch_makes_many_tokens(
    dense: Path, shared: tuple[torchtpu_rs.Engine, Programs]
) -> None:
    engine = shared[0]
    before = engine.info()
    engine.decode(prompt(40), 33, [], 8)
    after = engine.info()
    # 32 and 16 tokens of prompt; the first new token comes with them, then 32 in launches of 8.
    assert after["launches"] - before["launches"] == 2 + 4
    assert after["host_reads"] - before["host_reads"] == 1 + 4
    assert after["decoded_tokens"] - before["decoded_tokens"] == 32


def test_tokens_are_handed_out_launch_by_launch(
    shared: tuple[torchtpu_rs.Engine, Programs],
) -> None:
    batches: list[list[int]] = []
    answer = shared[0].decode(prompt(5), 30, [], 8, lambda ids: batches.append(ids) or True)
    assert [len(ids) for ids in batches] == [1, 8, 8, 8, 4, 1]
    assert [i for ids in batches for i in ids] == answer.ids


def test_a_stop_id_in_the_middle_of_a_launch_ends_the_answer(
    dense: Path, shared: tuple[torchtpu_rs.Engine, Programs]
) -> None:
    whole = shared[0].decode(prompt(5), 30, [], 8).ids
    stop = next(i for n, i in enumerate(whole) if n >= 3 and i not in whole[:n])
    cut = shared[0].decode(prompt(5), 30, [stop], 8)
    assert (cut.finish, cut.stop_id, cut.ids) == ("stop", stop, whole[: whole.index(stop)])
    # What the launch made beyond the stop is in nobody's way.
    assert shared[0].decode(prompt(5), 30, [], 8).ids == whole


def test_a_full_cache_ends_the_answer(
    dense: Path, shared: tuple[torchtpu_rs.Engine, Programs]
) -> None:
    wanted = exact(dense).decode(prompt(CONTEXT - 5), 50, [])
    given = shared[0].decode(prompt(CONTEXT - 5), 50, [], 8)
    assert (given.ids, given.finish) == (wanted.ids, "length")


def test_no_request_compiles_anything_after_the_programs_are_there(
    shared: tuple[torchtpu_rs.Engine, Programs],
) -> None:
    engine, programs = shared
    engine.decode(prompt(4), 9, [], 8)  # transfers to and from the device, once each
    before = (programs.compilations, _compiled_by_torchtpu())
    for length in (1, 2, 15, 16, 17, 31, 32, 33, 50, 100, CONTEXT):
        engine.decode(prompt(length), 20, [], 8)
    assert (programs.compilations, _compiled_by_torchtpu()) == before


def test_a_client_that_leaves_frees_the_engine_before_the_next_launch(
    dense: Path, shared: tuple[torchtpu_rs.Engine, Programs]
) -> None:
    engine = shared[0]
    before = engine.info()["launches"]
    answer = engine.decode(prompt(5), 60, [], 8, lambda ids: len(ids) == 1)
    assert answer.finish == "cancelled"
    assert engine.info()["launches"] - before == 2
    assert engine.decode(prompt(40), NEW, [], 8).ids == exact(dense).decode(prompt(40), NEW, []).ids


def test_a_launch_that_fails_is_an_error_and_the_next_request_is_served(
    dense: Path, monkeypatch: pytest.MonkeyPatch, shared: tuple[torchtpu_rs.Engine, Programs]
) -> None:
    engine, programs = shared
    real, calls = programs.launch, []

    def failing(number: int, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        calls.append(number)
        results = real(number, inputs)
        if len(calls) == 3:
            raise RuntimeError("the chip is gone")
        return results

    with monkeypatch.context() as patch:
        patch.setattr(programs, "launch", failing)
        with pytest.raises(torchtpu_rs.DeviceError, match="the chip is gone"):
            engine.decode(prompt(5), 60, [], 8)
    assert engine.decode(prompt(40), NEW, [], 8).ids == exact(dense).decode(prompt(40), NEW, []).ids


def test_a_warm_start_compiles_nothing(dense: Path, tmp_path: Path) -> None:
    plan = Plan(slots=2, chunks=(16,), steps=(4,))
    cold, programs = compiled(dense, plan=plan, cache_dir=tmp_path)
    assert programs.compilations == len(plan.programs(CONTEXT)) == 3
    warm, programs = compiled(dense, plan=plan, cache_dir=tmp_path)
    assert programs.compilations == 0
    assert all(program["from_disk"] for program in programs.info()["programs"])
    assert warm.decode(prompt(9), 20, [], 4).ids == cold.decode(prompt(9), 20, [], 4).ids


def test_a_broken_file_in_the_cache_is_compiled_anew(dense: Path, tmp_path: Path) -> None:
    plan = Plan(slots=2, chunks=(16,), steps=(4,))
    compiled(dense, plan=plan, cache_dir=tmp_path)
    files = sorted(tmp_path.iterdir())
    files[0].write_bytes(b"not an executable")
    _, programs = compiled(dense, plan=plan, cache_dir=tmp_path)
    assert programs.compilations == 1
    assert sorted(tmp_path.iterdir()) == files


def test_a_context_beyond_the_checkpoints_positions_is_cut_for_programs_too(tmp_path: Path) -> None:
    folder = checkpoints.make(tmp_path, checkpoints.DENSE | {"max_position_embeddings": 96})
    engine, _ = compiled(folder, plan=Plan(slots=2, chunks=(16,), steps=(4,)))
    assert engine.info()["layout"]["context"] == 96 < CONTEXT
    wanted = exact(folder).decode(prompt(40), 30, [])
    assert engine.decode(prompt(40), 30, [], 4).ids == wanted.ids


def test_a_program_that_cannot_be_compiled_is_named_and_the_others_serve(
    dense: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = capture.compile_recording

    def refusing(recorded: Recording) -> object:
        if recorded.program.read == 0:
            raise RuntimeError("no room for it")
        return real(recorded)

    monkeypatch.setattr(capture, "compile_recording", refusing)
    programs = Programs([str(dense)], Plan(slots=2, chunks=(16,), steps=(4,)))
    like = torch.zeros(1, device="tpu")
    engine = torchtpu_rs.Engine(dense, like, CONTEXT, dtype="float32", programs=programs)
    with pytest.raises(capture.CompilationError, match="no room for it"):
        programs.wait()
    assert "no room for it" in engine.info()["failure"]
    wanted = exact(dense).decode(prompt(20), 20, [])
    assert engine.decode(prompt(20), 20, [], 4).ids == wanted.ids


def test_logits_are_for_engines_that_run_single_operations(
    shared: tuple[torchtpu_rs.Engine, Programs],
) -> None:
    with pytest.raises(ValueError, match="expected an engine whose steps run eagerly"):
        shared[0].logits([2, 3])


def test_int8_weights_keep_most_choices(dense: Path) -> None:
    """Random weights are the hard case: margins are small. The log has the embedded model's numbers."""
    plan = Plan(slots=2, chunks=(32,), steps=(4,), int8=True)
    engine, _ = compiled(EMBEDDED, "bfloat16", plan=plan)
    assert engine.info()["weight_format"] == "int8"
    judge = exact(EMBEDDED, "bfloat16")
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    ids = tokenizer.encode(
        "<bos><|turn>user\nWhat is a TPU?<turn|>\n<|turn>model\n", add_special_tokens=False
    ).ids
    assert engine.decode(ids, 40, None, 4).ids == judge.decode(ids, 40).ids


@pytest.mark.parametrize("context", [64, 1000, 1025, 8192, 131072])
def test_there_are_at_most_twelve_programs_and_the_first_two_serve_any_length(context: int) -> None:
    plan = Plan()
    programs = plan.programs(context)
    assert len(programs) == len(set(programs)) <= 12
    prefill, decode = programs[:2]
    rows = context + plan.largest
    assert prefill == Program(64, 0, rows)
    assert decode == Program(0, 8, rows)
    assert PLAN.largest == 32


def _compiled_by_torchtpu() -> int:
    stats = torch.tpu._get_cache_stats()  # type: ignore[attr-defined]
    return int(
        getattr(
            stats, "num_compilations", stats["num_compilations"] if isinstance(stats, dict) else 0
        )
    )
