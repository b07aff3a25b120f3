"""Where the trainer process begins: in its sandbox, before anything is imported that could read a peer's bytes.

    python -m swarmnode.training.confined SOCKET_FD MEMORY_FD PARENT_PID RULES      (by node/trainer/supervisor.py)

RULES are a `sandbox.Rules` as JSON. numpy and torch start threads as they are imported, and a thread that runs already
stays outside a sandbox; so `worker.py` is imported last.
"""

from __future__ import annotations

import json
import os
import signal
import sys

from swarmnode.training import sandbox
from swarmnode.training.sandbox import system

_PR_SET_PDEATHSIG = 1
OOM_SCORE = "500"  # out of memory, the kernel ends the trainer before the daemon


def _die_with(parent: int) -> None:
    """End when the daemon ends, however it ends, and leave to it what Ctrl-C means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        system.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write(OOM_SCORE)
    if os.getppid() != parent:  # it ended before the request above was made
        raise SystemExit(0)


def main() -> None:
    socket_fd, memory_fd, parent = (int(argument) for argument in sys.argv[1:4])
    _die_with(parent)
    report = sandbox.enter(sandbox.Rules(**json.loads(sys.argv[4])))

    from swarmnode.training.worker import serve

    serve(socket_fd, memory_fd, report)


if __name__ == "__main__":
    main()
