"""Checkpoints shared by many tests, each made once a run."""

from pathlib import Path

import checkpoints
import pytest
import torch


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny matrices gain nothing from threads, and on a busy machine their barriers cost much."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny bfloat16 checkpoint of E2B's kind."""
    return checkpoints.make(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def e2b_slice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers of E2B's true widths in bfloat16."""
    return checkpoints.make(tmp_path_factory.mktemp("e2b_slice"), checkpoints.E2B_SLICE)
