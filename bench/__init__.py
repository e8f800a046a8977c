"""Judging numbers and speed against transformers. Results are JSON under `bench/results/`."""
