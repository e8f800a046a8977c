"""The process in which vllm-router runs, with what its command line has no words for: the servers' key, and who may call it.

Started by rig/router.py, which writes the key to its standard input: arguments and environment of a process can be read by others.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from vllm_router.launch_router import (  # type: ignore[import-untyped]
    launch_router,
    parse_router_args,
)

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Run the router until SIGTERM: PARENT_PID KEY_CHECK_URL, then arguments as vllm-router has them."""
    parent, key_check, *arguments = sys.argv[1:]
    end_with(int(parent))
    settings = parse_router_args(arguments)
    # Sent to servers on the paths that the router knows nothing of; on the others it sends what callers send.
    settings.api_key = sys.stdin.readline().strip()
    # Without it anyone on this machine, and any web page open on it, could add a server of his own, which would get the key.
    settings.api_key_validation_urls = [key_check]
    # Its command line takes `warning`, its logger only `warn`; at `info` there is a line for each request.
    settings.log_level = "warn"
    launch_router(settings)


def end_with(parent: int) -> None:
    """Die when the thread of `parent` that started this process does, however it does; only Linux can."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        # It was faster.
        sys.exit(1)


if __name__ == "__main__":
    main()
