"""What mistral.rs makes of a prompt, in its environment: `python -m bench.real.mistralrs_text CHECKPOINT FORM TOKENIZER TOKENS < ids.json`.

Prints the text as JSON on the last line.
"""

import contextlib
import json
import os
import sys

from bench.cpu.mistralrs_engine import MistralRs

checkpoint, form, tokenizer, tokens = sys.argv[1:]
with contextlib.redirect_stdout(sys.stderr):
    engine = MistralRs(checkpoint, form, tokenizer)
    text = engine.answer(json.load(sys.stdin), int(tokens)).choices[0].text
print(json.dumps(text), flush=True)
# As in `bench.measures`: its threads and exit hooks may never return.
os._exit(0)
