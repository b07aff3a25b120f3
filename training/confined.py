"""Where the trainer process begins: in its sandbox, before anything is imported that could read a peer's bytes.

    python -m swarmnode.training.confined SOCKET_FD MEMORY_FD PARENT_PID RULES      (by node/trainer/supervisor.py)

RULES are a `sandbox.Rules` as JSON. numpy and torch start threads as they are imported, and a thread that runs already
stays outside a sandbox; so `worker.py` is imported last. Where the trainer has several ranks (`ranks.py`), they are
forked here, into a network of their own.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys

from swarmnode.training import sandbox
from swarmnode.training.ranks import Ranks
from swarmnode.training.sandbox import system

OOM_SCORE = "500"  # out of memory, the kernel ends the trainer before the daemon


def _die_with(parent: int) -> None:
    """End when the daemon ends, however it ends, and leave to it what Ctrl-C means."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        system.prctl(system.PR_SET_PDEATHSIG, signal.SIGKILL)
        with open("/proc/self/oom_score_adj", "w") as score:
            score.write(OOM_SCORE)
    if os.getppid() != parent:  # it ended before the request above was made
        raise SystemExit(0)


def main() -> None:
    socket_fd, memory_fd, parent = (int(argument) for argument in sys.argv[1:4])
    rules = sandbox.Rules(**json.loads(sys.argv[4]))
    sandbox.leave_network(rules)
    _die_with(parent)
    ranks, socket_fd = _fork(rules.ranks, socket_fd)
    report = sandbox.enter(rules)

    from swarmnode.training.worker import serve

    serve(socket_fd, memory_fd, report, ranks)


def _fork(count: int, socket_fd: int) -> tuple[Ranks, int]:
    """Become `count` processes: of each its view of them, and the socket that its commands come by."""
    pairs = [socket.socketpair() for _ in range(count - 1)]
    first = os.getpid()
    for rank, (_, commands) in enumerate(pairs, 1):
        if not os.fork():
            _die_with(first)
            os.close(socket_fd)  # or the daemon would not see that rank 0 has ended
            own = commands.detach()
            for pair in pairs:
                for end in pair:
                    end.close()
            return Ranks(rank, count), own
    for _, theirs in pairs:
        theirs.close()
    return Ranks(0, count, [ours for ours, _ in pairs]), socket_fd


if __name__ == "__main__":
    main()
