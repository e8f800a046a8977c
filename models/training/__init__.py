"""Makes the embedded model: its corpus, its tokenizer, its training and its score.

Nothing here runs at serving time. Everything is made from seeds; no data is read from outside this folder.
"""

import os

# With torch_tpu installed, `import torch` would look for a TPU by itself, for minutes where there is none.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
