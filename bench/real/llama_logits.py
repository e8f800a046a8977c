"""llama.cpp's logits of given tokens, in the environment of `llama-cpp-python`: `python llama_logits.py FILE OUT < ids.json`.

Imports nothing of this project. OUT gets float32 `[tokens, vocab]` of all texts, one behind the other, as numpy's file.
"""

import json
import sys

import numpy
from llama_cpp import Llama

file, out = sys.argv[1:]
texts = json.load(sys.stdin)
longest = max(map(len, texts))
model = Llama(file, n_ctx=longest, n_batch=longest, logits_all=True, verbose=False)
found = []
for ids in texts:
    model.reset()
    model.eval(ids)
    found.append(numpy.array(model.scores[: len(ids)], dtype=numpy.float32))
numpy.save(out, numpy.concatenate(found))
