"""Fixtures of every test of the server; `text_fixtures` makes the text side's, `gguf_fixtures` that of a GGUF file."""

from gguf_fixtures import gguf_file
from text_fixtures import template, text_folder, tokenizer

__all__ = ["gguf_file", "template", "text_folder", "tokenizer"]
