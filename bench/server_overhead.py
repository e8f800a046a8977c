"""What the server adds to the engine: tokens/s at the client against the engine's own clock, on the embedded model.

    python -m bench.server_overhead [--requests 40] [--out bench/results/server_overhead.json]

Starts a server on a free port, streams chats one at a time over loopback HTTP, and compares each answer's
`timings` with what the client saw: time to the first piece of text, and tokens per second after it.
"""

import argparse
import json
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx

PROMPTS = (
    "Write a short paragraph about the ocean.",
    "What is a TPU?",
    "Why is the model written in Rust?",
    "What is a ring cache?",
)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def wait_until_ready(client: httpx.Client, server: subprocess.Popen[bytes]) -> None:
    """Polls /health; raises RuntimeError if the server ends or is not ready in a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"the server ended with status {server.returncode}")
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.ConnectError:
            pass
        time.sleep(0.1)
    raise RuntimeError("the server was not ready within 60 s")


def stream_once(client: httpx.Client, text: str) -> dict[str, float]:
    """Milliseconds and rates of one streamed chat, as the client and as the engine saw them."""
    body = {
        "messages": [{"role": "user", "content": text}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first = last = None
    timings: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    begun = time.perf_counter()
    with client.stream("POST", "/v1/chat/completions", json=body) as response:
        response.raise_for_status()
        for line in response.iter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            timings = chunk.get("timings") or timings
            usage = chunk.get("usage") or usage
            if chunk["choices"] and chunk["choices"][0]["delta"].get("content"):
                last = time.perf_counter()
                first = first or last
    if first is None or last is None:
        raise RuntimeError(f"no text came for {text!r}")
    # The first token's text may be held back until its character is whole; these prompts are ASCII.
    return {
        "client_first_ms": (first - begun) * 1e3,
        "engine_first_ms": timings["prompt_ms"],
        "client_rate": (usage["completion_tokens"] - 2) / (last - first),
        "engine_rate": timings["predicted_per_second"],
        "tokens": usage["completion_tokens"],
    }


def main() -> None:
    """Reads the command line, measures, prints, writes."""
    parser = argparse.ArgumentParser(description="Measure what the server adds.")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("bench/results/server_overhead.json"))
    arguments = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "server", "serve", "--port", str(port)]
    with (
        subprocess.Popen(command) as server,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client,
    ):
        try:
            wait_until_ready(client, server)
            for text in PROMPTS:
                stream_once(client, text)
            runs = [
                stream_once(client, PROMPTS[i % len(PROMPTS)]) for i in range(arguments.requests)
            ]
        finally:
            server.terminate()
    medians = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    medians["added_first_ms"] = statistics.median(
        run["client_first_ms"] - run["engine_first_ms"] for run in runs
    )
    medians["rate_ratio"] = statistics.median(
        run["client_rate"] / run["engine_rate"] for run in runs
    )
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps({"medians": medians, "runs": runs}, indent=1) + "\n")
    print(json.dumps(medians, indent=1))


if __name__ == "__main__":
    main()
