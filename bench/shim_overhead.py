"""What the shim adds: milliseconds a request, milliseconds a streamed chunk, and what 200 streams at once cost.

    python -m bench.shim_overhead [--rounds 10] [--out bench/results/shim.json]

In front of an endpoint that costs next to nothing, and of the real server on the embedded model. Direct, through the shim and through
a relay that only copies bytes are asked in turn by the same client, on connections that stay open. The relay shows what any process
in between costs on this machine; figures are medians, so that a busy machine shows in all of them.
"""

import argparse
import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from bench.server_overhead import free_port

REQUESTS, CHUNKS, GAP_MS, BURST = 100, 100, 2.0, 5000
STREAMS, STREAM_CHUNKS, STREAM_GAP_MS = 200, 40, 100.0
TOKENS = 200
GOALS = {"request_ms": 1.0, "chunk_ms": 0.1}
AT_PORT, SHIM = r"^at .*:(\d+)$", r":(\d+) is the chat page"
AT = re.compile(rb'"at":(\d{20})')
CHAT = json.dumps(
    {
        "messages": [{"role": "user", "content": "Write a short paragraph about the ocean."}],
        "stream": True,
        "ignore_eos": True,
        "max_tokens": TOKENS,
    }
).encode()


class Client:
    """One connection that stays open: blocking, so that nothing of its own is measured."""

    def __init__(self, port: int) -> None:
        self._connection = socket.create_connection(("127.0.0.1", port))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def request_ms(self) -> float:
        """A short answer."""
        begun = time.perf_counter()
        self._connection.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        received = b""
        while not received.endswith(b"}"):
            received += self._received()
        return (time.perf_counter() - begun) * 1e3

    def stream(self, request: bytes) -> tuple[list[float], float]:
        """Milliseconds from sending to receiving of each chunk that says when it was sent; seconds from first to last byte of it all."""
        self._connection.sendall(request)
        late: list[float] = []
        tail, first = b"", 0.0
        while not tail.endswith(b"0\r\n\r\n"):
            data = self._received()
            now = time.monotonic_ns()
            first = first or time.perf_counter()
            late += [(now - int(sent)) / 1e6 for sent in AT.findall(data)]
            tail = (tail + data)[-8:]
        return late, time.perf_counter() - first

    def _received(self) -> bytes:
        data = self._connection.recv(65536)
        if not data:
            raise RuntimeError("the connection was closed before the answer's end")
        return data


def streaming(chunks: int, gap_ms: float = 0, together: int = 1) -> bytes:
    """A request for the fast endpoint."""
    query = f"pieces={chunks}&gap_ms={gap_ms}&together={together}"
    return f"GET /stream?{query} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


def chatting() -> bytes:
    """A request for the server."""
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(CHAT)}\r\n\r\n"
    return head.encode() + CHAT


async def many(port: int) -> tuple[list[float], int]:
    """All streams at once: how late each chunk was, and how many streams came whole."""

    async def one() -> tuple[list[float], bool]:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(streaming(STREAM_CHUNKS, STREAM_GAP_MS, STREAMS))
        late: list[float] = []
        tail = b""
        while not tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n"):
            data = await reader.read(65536)
            if not data:
                return late, False
            late += [(time.monotonic_ns() - int(sent)) / 1e6 for sent in AT.findall(data)]
            tail = (tail + data)[-40:]
        writer.close()
        return late, len(late) == STREAM_CHUNKS

    found = await asyncio.gather(*(one() for _ in range(STREAMS)))
    return [ms for late, _ in found for ms in late], sum(whole for _, whole in found)


def cpu_ms(pid: int) -> float:
    """What a process has used of a CPU; 0 where the system does not tell."""
    file = Path(f"/proc/{pid}/schedstat")
    return int(file.read_text().split()[0]) / 1e6 if file.exists() else 0.0


@contextmanager
def started(says: str, *command: str) -> Iterator[tuple[int, int]]:
    """A process of this project that `says` where it listens, with its port in brackets: its id and port."""
    with subprocess.Popen([sys.executable, "-m", *command], stderr=subprocess.PIPE) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if found := re.search(says, line.decode().strip()):
                    yield process.pid, int(found[1])
                    return
            raise RuntimeError(f"{' '.join(command)} ended with status {process.wait()}")
        finally:
            process.kill()


def requests_of(ports: dict[str, int], shim: int, rounds: int) -> dict[str, float]:
    """Short requests, direct and through the shim in turn."""
    assert ports["direct"] != ports["through"]
    clients = {name: Client(port) for name, port in ports.items()}
    times: dict[str, list[float]] = {name: [] for name in ports}
    for client in clients.values():
        for _ in range(REQUESTS):
            client.request_ms()
    used = cpu_ms(shim)
    for _ in range(rounds * REQUESTS):
        for name, client in clients.items():
            times[name].append(client.request_ms())
    used = cpu_ms(shim) - used
    return _added(times) | {"shim_cpu_ms": used / (rounds * REQUESTS)}


def chunks_of(ports: dict[str, int], shim: int, rounds: int) -> dict[str, float]:
    """Chunks one by one, as a model makes them."""
    clients = {name: Client(port) for name, port in ports.items()}
    late: dict[str, list[float]] = {name: [] for name in ports}
    used = cpu_ms(shim)
    for _ in range(rounds):
        for name, client in clients.items():
            late[name] += client.stream(streaming(CHUNKS, GAP_MS))[0]
    used = cpu_ms(shim) - used
    return _added(late) | {"shim_cpu_ms": used / (rounds * CHUNKS)}


def bursts_of(ports: dict[str, int], rounds: int) -> dict[str, float]:
    """Chunks as fast as they go: milliseconds of each."""
    clients = {name: Client(port) for name, port in ports.items()}
    times: dict[str, list[float]] = {name: [] for name in ports}
    for _ in range(rounds):
        for name, client in clients.items():
            times[name].append(client.stream(streaming(BURST))[1] / BURST * 1e3)
    return _added(times)


def tokens_of(ports: dict[str, int], rounds: int) -> dict[str, float]:
    """Tokens of the real server: milliseconds from one to the next."""
    clients = {name: Client(port) for name, port in ports.items()}
    times: dict[str, list[float]] = {name: [] for name in ports}
    for _ in range(rounds):
        for name, client in clients.items():
            times[name].append(client.stream(chatting())[1] / TOKENS * 1e3)
    return _added(times)


def _added(times: dict[str, list[float]]) -> dict[str, float]:
    medians = {f"{name}_ms": statistics.median(found) for name, found in times.items()}
    added = {"added_ms": medians["through_ms"] - medians["direct_ms"]}
    if "relay_ms" in medians:
        added["relay_added_ms"] = medians["relay_ms"] - medians["direct_ms"]
    return medians | added


def at_once(ports: dict[str, int], shim: int) -> dict[str, float]:
    """All streams at once, direct and through the shim."""
    found: dict[str, float] = {"streams": STREAMS, "chunks": STREAM_CHUNKS, "gap_ms": STREAM_GAP_MS}
    used = cpu_ms(shim)
    for name in ("direct", "through"):
        late, whole = asyncio.run(many(ports[name]))
        found[f"{name}_whole"] = whole
        found[f"{name}_ms"] = statistics.median(late)
        found[f"{name}_p99_ms"] = statistics.quantiles(late, n=100)[-1]
    found["shim_cpu_ms"] = (cpu_ms(shim) - used) / (STREAMS * STREAM_CHUNKS)
    return found | {"added_ms": found["through_ms"] - found["direct_ms"]}


def measure(rounds: int) -> dict[str, Any]:
    """Everything."""
    with ExitStack() as open_:
        _, fast = open_.enter_context(started(AT_PORT, "bench.fast_endpoint"))
        shim, port = open_.enter_context(
            started(SHIM, "demo", "--port", "0", "--url", f"http://127.0.0.1:{fast}")
        )
        _, relay = open_.enter_context(
            started(AT_PORT, "bench.fast_endpoint", "--relay", str(fast))
        )
        ports = {"direct": fast, "through": port, "relay": relay}
        found: dict[str, Any] = {
            "request": requests_of(ports, shim, rounds),
            "chunk": chunks_of(ports, shim, rounds),
            "burst": bursts_of(ports, rounds),
            "at_once": at_once(ports, shim),
        }
    with ExitStack() as open_:
        chosen = str(free_port())
        _, served = open_.enter_context(
            started(r"ready in .*:(\d+)/v1", "server", "serve", "--port", chosen)
        )
        shim, port = open_.enter_context(
            started(SHIM, "demo", "--port", "0", "--url", f"http://127.0.0.1:{served}")
        )
        ports = {"direct": served, "through": port}
        found["server_request"] = requests_of(ports, shim, rounds)
        found["server_token"] = tokens_of(ports, rounds)
    return found


ROWS = {
    "request": "a request, fast endpoint",
    "server_request": "a request, real server",
    "chunk": "a chunk, fast endpoint",
    "burst": "a chunk, as fast as they go",
    "server_token": "a token, real server",
    "at_once": f"a chunk, {STREAMS} streams at once",
}


COLUMNS = {
    "direct_ms": "direct",
    "through_ms": "through shim",
    "added_ms": "shim adds",
    "relay_added_ms": "relay adds",
    "shim_cpu_ms": "shim's CPU",
}


def main() -> None:
    """Reads the command line, measures, prints, writes."""
    parser = argparse.ArgumentParser(description="Measure what the shim adds.")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, default=Path("bench/results/shim.json"))
    arguments = parser.parse_args()
    before = os.getloadavg()[0]
    found = measure(arguments.rounds)
    found["load_average"] = [before, os.getloadavg()[0]]
    found["cpus"] = os.cpu_count()
    found["goals"] = GOALS
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{'ms':32}" + "".join(f"{title:>14}" for title in COLUMNS.values()))
    for key, name in ROWS.items():
        cells = [f"{found[key][it]:14.3f}" if it in found[key] else " " * 14 for it in COLUMNS]
        print(f"{name:32}" + "".join(cells))
    once = found["at_once"]
    print(
        f"{once['through_whole']} of {STREAMS} streams whole, {STREAM_CHUNKS} chunks each, {STREAM_GAP_MS:g} ms apart; "
        f"99 % of chunks within {once['through_p99_ms']:.1f} ms (direct {once['direct_p99_ms']:.1f})"
    )
    for goal, key in (("request_ms", "request"), ("chunk_ms", "chunk")):
        added = found[key]["added_ms"]
        verdict = "reached" if added <= GOALS[goal] else "not reached"
        print(f"goal of {GOALS[goal]:g} ms {key}: {added:.3f} ms, {verdict}")
    print(f"load average {before:.1f} before, {found['load_average'][1]:.1f} after")


if __name__ == "__main__":
    main()
