"""Real weights, Gemma 3 270M from a package: how good each form of them is, and how fast, against other engines."""
