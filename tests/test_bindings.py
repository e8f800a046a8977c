"""Each crossing of rust/PYO3.md, seen from Python."""

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import torchtpu_rs
from tests import checkpoints

PYO3_MD = Path(__file__).parents[1] / "rust" / "PYO3.md"
LIKE = torch.zeros(1)
PROMPT = checkpoints.prompt(12)


@pytest.fixture
def engine(dense: Path) -> Iterator[torchtpu_rs.Engine]:
    yield torchtpu_rs.Engine(dense, LIKE, 64)
    # Tracebacks of expected errors hold the engine in cycles; it must be dropped by this thread, its owner.
    gc.collect()


def answer(engine: torchtpu_rs.Engine, new: int = 16) -> list[int]:
    return engine.decode(PROMPT, new, stop=[]).ids


def test_module_surface() -> None:
    assert set(torchtpu_rs.BUILD) == {"torch", "rustc", "python", "crate"}
    assert torchtpu_rs.BUILD["torch"] == torch.__version__
    table = PYO3_MD.read_text()
    for name in [*torchtpu_rs.__all__, *(n for n in dir(torchtpu_rs.Engine) if n[0] != "_")]:
        assert name in table, f"{name} has no row in PYO3.md"


def test_tensor_functions() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        total = torchtpu_rs.matmul_sum(torch.zeros(1, dtype=dtype))
        assert (total.item(), str(total.device), total.dtype) == (512.0, "cpu", dtype)


def test_decode_stops_and_streams(engine: torchtpu_rs.Engine) -> None:
    free = answer(engine)
    batches: list[list[int]] = []
    done = engine.decode(
        PROMPT, 16, stop=[free[5]], read_every=2, on_tokens=lambda b: batches.append(b) or True
    )
    cut = free.index(free[5])
    assert (done.finish, done.stop_id, done.ids) == ("stop", free[5], free[:cut])
    assert [id_ for batch in batches for id_ in batch] == done.ids
    assert all(len(batch) == 2 for batch in batches[:-1])
    assert done.prompt_tokens == len(PROMPT)
    assert done.prefill_seconds > 0
    assert done.decode_seconds > 0


def test_stop_ids_default_to_the_checkpoints_list(engine: torchtpu_rs.Engine) -> None:
    assert engine.info()["eos_token_ids"] == [1, 106, 50]


@pytest.mark.parametrize("enough", [1, 3, 16])
def test_cancel_and_length(engine: torchtpu_rs.Engine, enough: int) -> None:
    seen: list[int] = []

    def until_enough(batch: list[int]) -> bool:
        seen.extend(batch)
        return len(seen) < enough

    done = engine.decode(PROMPT, 16, stop=[], on_tokens=until_enough)
    assert (done.finish, done.ids) == ("cancelled", seen)
    assert len(seen) == enough
    assert engine.decode(PROMPT, 3, stop=[]).finish == "length"
    assert len(answer(engine, 3)) == 3


def test_a_callback_that_returns_nothing_cancels(engine: torchtpu_rs.Engine) -> None:
    assert engine.decode(PROMPT, 9, stop=[], on_tokens=lambda _: None).finish == "cancelled"


def test_a_full_cache_ends_the_answer(engine: torchtpu_rs.Engine) -> None:
    done = engine.decode(checkpoints.prompt(60), 100, stop=[])
    assert (done.finish, len(done.ids)) == ("length", 5)
    assert len(engine.decode(checkpoints.prompt(64), 100, stop=[]).ids) == 1


def test_callback_exception_propagates(engine: torchtpu_rs.Engine) -> None:
    before = answer(engine)

    def fail(_: list[int]) -> bool:
        raise LookupError("from the callback")

    with pytest.raises(LookupError, match="from the callback"):
        engine.decode(PROMPT, 5, on_tokens=fail)
    assert answer(engine) == before


BAD_INPUT = {
    "no prompt": (([], 5), {}, "at least one prompt id"),
    "max_new 0": ((PROMPT, 0), {}, "max_new at least 1, found 0"),
    "max_new negative": ((PROMPT, -3), {}, "max_new at least 1, found -3"),
    "max_new huge": ((PROMPT, 2**70), {}, "max_new within 64 bits"),
    "id too large": (([2, 512], 5), {}, "from 0 to 511, found 512 at index 1"),
    "id negative": (([-1], 5), {}, "found -1"),
    "id huge": (([2**64], 5), {}, "within 64 bits"),
    "stop id": ((PROMPT, 5, [9999]), {}, "stop ids from 0 to 511, found 9999"),
    "read_every 0": ((PROMPT, 5), {"read_every": 0}, "read_every at least 1"),
    "too long": ((checkpoints.prompt(65), 5), {}, "65 tokens, but the cache holds 64"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_value_error(engine: torchtpu_rs.Engine, case: str) -> None:
    args, kwargs, text = BAD_INPUT[case]
    before = answer(engine)
    with pytest.raises(ValueError, match=text):
        engine.decode(*args, **kwargs)
    assert answer(engine) == before


def test_a_prompt_beyond_the_cache_has_a_class_of_its_own(engine: torchtpu_rs.Engine) -> None:
    with pytest.raises(torchtpu_rs.ContextFullError):
        engine.decode(checkpoints.prompt(65), 1)
    with pytest.raises(torchtpu_rs.ContextFullError):
        engine.logits(PROMPT, PROMPT * 5)


@pytest.mark.parametrize(
    ("like", "text"),
    [
        (torch.zeros(2), r"shape \[2\]"),
        (torch.zeros(1, dtype=torch.int64), "int64"),
        (torch.zeros(1, dtype=torch.float64), "Double"),
        ("cpu", "expected a torch.Tensor, found str"),
    ],
    ids=str,
)
def test_like_must_name_a_device(dense: Path, like: object, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        torchtpu_rs.matmul_sum(like)
    with pytest.raises(ValueError, match=text):
        torchtpu_rs.Engine(dense, like)


def test_bad_options_are_value_errors(dense: Path) -> None:
    for options in (
        {"context": 0},
        {"context": 2**40},
        {"dtype": "int3"},
        {"prefill_chunk": 1},
        {"arithmetic": "int4"},
        {"arithmetic": "fast", "instructions": "sse"},
        {"arithmetic": "exact", "instructions": "portable"},
        {"arithmetic": "fast", "dtype": "float32", "instructions": "portable"},
    ):
        with pytest.raises(ValueError, match="expected"):
            torchtpu_rs.Engine(dense, LIKE, **options)


def test_gil_released_during_decode(engine: torchtpu_rs.Engine) -> None:
    """Another Python thread runs between two steps that call no Python."""
    turns, stop = [], threading.Event()

    def count() -> None:
        while not stop.is_set():
            turns.append(1)
            time.sleep(0)  # gives the GIL back

    counter = threading.Thread(target=count)
    switch = sys.getswitchinterval()
    # Nothing but a released GIL lets the other thread run: Python itself would switch after an hour.
    sys.setswitchinterval(3600)
    try:
        counter.start()
        before = len(turns)
        engine.decode(PROMPT, 40, stop=[], read_every=40)
        assert len(turns) > before
    finally:
        stop.set()
        sys.setswitchinterval(switch)
        counter.join(timeout=5)


def test_unsendable(engine: torchtpu_rs.Engine) -> None:
    caught: list[str] = []

    def call() -> None:
        try:
            engine.info()
        except BaseException as error:  # noqa: BLE001 (PanicException is no Exception)
            caught.append(type(error).__name__)  # the error itself would keep the engine alive

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(timeout=5)
    assert caught == ["PanicException"]
    assert len(answer(engine, 2)) == 2


def test_a_callback_cannot_use_the_engine_again(engine: torchtpu_rs.Engine) -> None:
    before = answer(engine)
    with pytest.raises(RuntimeError, match="borrowed"):
        engine.decode(PROMPT, 4, on_tokens=lambda _: engine.decode(PROMPT, 1))
    assert answer(engine) == before


def test_on_load_counts_layers_and_can_end_the_load(dense: Path) -> None:
    calls: list[tuple[int, int]] = []
    torchtpu_rs.Engine(dense, LIKE, on_load=lambda done, total: calls.append((done, total)))
    assert calls == [(layer, 9) for layer in range(1, 10)]

    def give_up(done: int, total: int) -> None:
        raise TimeoutError(f"{done} of {total}")

    with pytest.raises(TimeoutError, match="1 of 9"):
        torchtpu_rs.Engine(dense, LIKE, on_load=give_up)


def test_info_says_what_is_loaded(dense: Path) -> None:
    info = torchtpu_rs.Engine(str(dense), LIKE, 128).info()
    assert info["layout"] == {
        "full_rings": 1,
        "sliding_rings": 3,
        "shared_layers": 5,
        "context": 128,
    }
    assert (info["device"], info["dtype"], info["vocab_size"]) == ("cpu", "bfloat16", 512)
    # Keys and values, two bytes each: 3 layers of 16 rows of 2 heads of 16; 1 of 128 rows of 2 heads of 32.
    assert info["cache_bytes"] == 2 * 2 * (3 * 16 * 2 * 16 + 128 * 2 * 32)
    assert info["checkpoint"] == [str(dense)]


def test_the_context_is_at_most_what_the_model_was_trained_for(dense: Path) -> None:
    assert torchtpu_rs.Engine(dense, LIKE).info()["layout"]["context"] == 4096


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_another_torch_is_refused_with_both_versions_and_the_remedy() -> None:
    done = run_python("import torch; torch.__version__ = '9.9.9'; import torchtpu_rs")
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    for part in (torch.__version__, "9.9.9", "pip install --no-build-isolation"):
        assert part in done.stderr


def test_an_unbuilt_module_says_how_to_build_it(tmp_path: Path) -> None:
    source = Path(torchtpu_rs.__file__)
    (tmp_path / "torchtpu_rs").mkdir()
    (tmp_path / "torchtpu_rs" / "__init__.py").write_text(source.read_text())
    done = run_python(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import torchtpu_rs")
    assert "ImportError: torchtpu_rs is not built" in done.stderr
    assert "make build" in done.stderr
