"""How fast an OpenAI endpoint answers, as its clients see it: `torchtpu-rs bench` and the rig's `run_rust_benchmark`.

Imports neither torch nor matplotlib until something is drawn; the rig runs where neither is installed.
"""
