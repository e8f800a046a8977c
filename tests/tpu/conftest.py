"""The simulated TPU, started once for these tests: TorchTPU renames torch's spare backend for the whole process, so they run
in a pytest of their own (`make test-tpu`)."""

from pathlib import Path
from typing import Any

import pytest

from tests import checkpoints
from tpu import device

device.start(simulate=True)

import torch  # noqa: E402

import torchtpu_rs  # noqa: E402
from torchtpu_rs.capture import Programs  # noqa: E402
from torchtpu_rs.recording import Plan  # noqa: E402

CONTEXT = 160
PLAN = Plan(slots=2, chunks=(16, 32), steps=(4, 8))


@pytest.fixture(scope="session")
def k_eq_v(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make(tmp_path_factory.mktemp("k_eq_v"), checkpoints.K_EQ_V)


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make(tmp_path_factory.mktemp("gemma3"), checkpoints.GEMMA3)


def exact(checkpoint: Path, dtype: str = "float32") -> torchtpu_rs.Engine:
    """The engine that gives transformers' own numbers."""
    return torchtpu_rs.Engine(checkpoint, torch.zeros(1), CONTEXT, dtype=dtype)  # type: ignore[arg-type]


def compiled(
    checkpoint: Path, dtype: str = "float32", **more: Any
) -> tuple[torchtpu_rs.Engine, Programs]:
    """An engine of compiled programs, all of them there."""
    programs = Programs([str(checkpoint)], **{"plan": PLAN} | more)
    like = torch.zeros(1, device="tpu")
    engine = torchtpu_rs.Engine(checkpoint, like, CONTEXT, dtype=dtype, programs=programs)  # type: ignore[arg-type]
    assert programs.wait()
    return engine, programs


def prompt(length: int, seed: int = 3) -> list[int]:
    """Ids of the tiny checkpoints' vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, checkpoints.VOCAB, (length,), generator=generator).tolist()
