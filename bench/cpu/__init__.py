"""Speed on a CPU at E2B's size against other engines, in turn on one machine: `python -m bench.cpu`, `make bench-cpu`."""
