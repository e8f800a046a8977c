"""Checkpoints shared by many tests, each made once a run.

torch and transformers are imported where they are used: half of the tests need neither, and they are slow
to import.
"""

import os
from pathlib import Path

import pytest

# Tiny matrices gain nothing from threads, and on a busy machine their barriers cost much. Read by torch when it
# is imported, here and in every server a test starts.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With torch_tpu installed, `import torch` would look for a TPU by itself, for minutes where there is none.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


@pytest.fixture(scope="session")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny bfloat16 checkpoint of E2B's kind."""
    from tests import checkpoints

    return checkpoints.make(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="session")
def e2b_slice(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers of E2B's true widths in bfloat16."""
    from tests import checkpoints

    return checkpoints.make(tmp_path_factory.mktemp("e2b_slice"), checkpoints.E2B_SLICE)
