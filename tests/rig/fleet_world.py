"""Two real servers on the embedded model and a front that is a process of its own, with the real vllm-router in it."""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx

from rig.endpoint import Counters, counters
from tests.fakes import PATIENCE_SECONDS
from tests.server.live_server import eventually

ROOT = Path(__file__).parents[2]
CALLER, SERVERS_KEY = "the-callers-key", "the-servers-key-Zm9v"
HI = [{"role": "user", "content": "Write a short paragraph about the ocean."}]
# Runs for half a minute, unless it is stopped.
LONG = {"messages": HI, "max_tokens": 3000, "ignore_eos": True, "stream": True}
FRONT = """
import json, sys
from pathlib import Path
from rig.errors import RigError
from rig.fleet import serve_fleet
folder, (port, router_port, metrics_port) = Path(sys.argv[1]), json.loads(sys.argv[2])
def find():
    found = (folder / "workers").read_text().split()
    if "!" in found:
        raise RigError("Google does not say")
    return found
keys = [(folder / name).read_text() for name in ("key", "caller-key")]
serve_fleet(
    find, *keys, "127.0.0.1", port, router_port, lambda text: print(text, flush=True),
    metrics_port=metrics_port, look_seconds=0.3, log=folder / "router.log",
)
"""


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        made = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [one.getsockname()[1] for one in made]


class Child:
    """A process and the lines it writes."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", *command],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[str] = []
        self._new: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, part: str) -> str:
        """The next line with `part` in it."""
        while True:
            try:
                line = self._new.get(timeout=PATIENCE_SECONDS)
            except queue.Empty:
                raise AssertionError(f"no line with {part!r} after {self.lines}") from None
            if part in line:
                return line

    def ended(self) -> int:
        """Its status, once it has ended."""
        status = self.process.wait(PATIENCE_SECONDS)
        self._reader.join(PATIENCE_SECONDS)
        return status

    def close(self) -> None:
        self.process.kill()
        self.ended()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            self._new.put(line)


class Server:
    """A replica: `torchtpu-rs serve` with the embedded model, always on the same port."""

    def __init__(self, port: int, key_file: Path) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port, self._key_file = port, key_file
        self._http = httpx.Client(
            base_url=self.url,
            headers={"x-api-key": SERVERS_KEY},
            timeout=PATIENCE_SECONDS,
            verify=False,
        )
        self.start()

    def start(self) -> None:
        """Begin to load; `wait_for("ready in")` sees it done."""
        self.child = Child(
            *("-m", "server", "serve", "--port", str(self._port), "--threads", "1"),
            *("--api-key-file", str(self._key_file)),
        )

    def counts(self) -> Counters:
        return counters(self._http.get("/metrics").text)

    def close(self) -> None:
        self._http.close()
        self.child.close()


class World:
    """All of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name, key in (("key", SERVERS_KEY), ("caller-key", CALLER)):
            (folder / name).write_text(key)
        ports = free_ports(5)
        self.servers = [Server(port, folder / "key") for port in ports[:2]]
        for server in self.servers:
            server.child.wait_for("ready in")
        self.port, self.router_port, self.metrics_port = ports[2:]
        self.url = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(
            base_url=self.url,
            headers={"authorization": f"Bearer {CALLER}"},
            timeout=PATIENCE_SECONDS,
            verify=False,
        )
        self.names(*self.servers)
        self.front = self.started()

    def started(self) -> Child:
        """The front, once it serves."""
        ports = [self.port, self.router_port, self.metrics_port]
        child = Child("-c", FRONT, str(self.folder), json.dumps(ports))
        child.wait_for("the router gives requests to")
        return child

    def names(self, *servers: Server | str) -> None:
        """What `find_workers` finds from now on; `!` is an error."""
        new = self.folder / "workers.new"
        new.write_text(" ".join(one if isinstance(one, str) else one.url for one in servers))
        new.replace(self.folder / "workers")

    def chat(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/chat/completions", json={"messages": HI, **fields})

    def answered(self) -> list[int]:
        """Requests that each replica has ended."""
        return [server.counts().requests for server in self.servers]

    def takes_connections(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def busy(self) -> Server:
        """The one replica that makes tokens."""
        found: list[Server] = []

        def is_there() -> bool:
            found[:] = [server for server in self.servers if server.counts().running]
            return bool(found)

        eventually(is_there, "a replica runs")
        (one,) = found
        return one

    def retries(self) -> int:
        """How often the router has tried a request again."""
        text = httpx.get(f"http://127.0.0.1:{self.metrics_port}/metrics", verify=False).text
        lines = [line for line in text.splitlines() if line.startswith("vllm_router_retries_total")]
        return int(sum(float(line.split()[-1]) for line in lines))

    def close(self) -> None:
        self.http.close()
        self.front.close()
        for server in self.servers:
            server.close()


def children_of(process: subprocess.Popen[str]) -> list[int]:
    task = Path(f"/proc/{process.pid}/task")
    return [int(pid) for one in task.iterdir() for pid in (one / "children").read_text().split()]


def is_alive(pid: int) -> bool:
    try:
        # A zombie has ended.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
