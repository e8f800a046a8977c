"""Judging numbers and speed against transformers. Results are JSON under `bench/results/`."""

import os

# With torch_tpu installed, `import torch` would look for a TPU by itself, for minutes where there is none.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
