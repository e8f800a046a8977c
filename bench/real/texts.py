"""A fixed English text that comes with Python: the language reference, as `help()` shows it."""

import hashlib
from collections.abc import Callable
from pydoc_data.topics import topics

TOPICS = ("compound", "objects", "typesmapping", "formatstrings", "execmodel", "import")


def texts(tokenize: Callable[[str], list[int]], count: int, tokens: int) -> list[list[int]]:
    """Token ids of the beginning of some topics, a list each."""
    return [tokenize(topics[name])[:tokens] for name in TOPICS[:count]]


def digest() -> str:
    """Which text it is: other versions of Python have others."""
    whole = "".join(topics[name] for name in TOPICS)
    return hashlib.sha256(whole.encode()).hexdigest()[:12]
