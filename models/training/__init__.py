"""Makes the embedded model: its corpus, its tokenizer, its training and its score.

Nothing here runs at serving time. Everything is made from seeds; no data is read from outside this folder.
"""
