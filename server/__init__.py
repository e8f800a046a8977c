"""The OpenAI-compatible HTTP server over the Rust engine.

Data goes one way: `routes` → `admission` → `worker` → `streaming`. Each module's first lines say what it owns and what
it must not know; `docs/architecture.md` says who may import whom.
"""
