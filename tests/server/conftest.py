"""Fixtures of every test of the server; `text_fixtures` makes the text side's."""

from text_fixtures import template, text_folder, tokenizer

__all__ = ["template", "text_folder", "tokenizer"]
