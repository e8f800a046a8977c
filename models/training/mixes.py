"""Which chats are drawn how often: one mix for each stage of the training, and one for the score.

Pure data. What a plan contains is drawn in `corpus`.
"""

from typing import NamedTuple


class Mix(NamedTuple):
    """What chats are drawn: how often each plan, how many think, how often an offered tool is needed, how long made-up words are."""

    plans: dict[str, int]
    thinking: float = 0.07
    needed: float = 0.7
    longest: int = 3


BROAD = Mix({"plain": 46, "tools": 34, "memory": 20})
DRILLED = Mix(
    {"plain": 16, "tools": 34, "memory": 14, "drill": 12, "sums": 10, "facts": 10, "copies": 4},
    thinking=0.12,
    needed=0.6,
)
LAST = Mix(
    {"plain": 9, "tools": 38, "memory": 18, "drill": 8, "sums": 9, "facts": 8, "copies": 10},
    thinking=0.12,
    needed=0.5,
    longest=2,
)
SCORED = BROAD._replace(longest=2)
DRILLS = {
    "drill": {
        "add": 11,
        "compare": 9,
        "count": 3,
        "echo": 2,
        "tell": 1,
        "recall": 2,
        "anything": 3,
    },
    "sums": {"add": 6, "compare": 5},
    "copies": {"echo": 4, "tell": 3, "recall": 4},
    "facts": {"topic": 6, "talk": 2, "unknown": 2, "greeting": 1, "no_tool": 1},
}
"""Plans of many short questions, for what needs the most examples, and how often each is drawn."""
