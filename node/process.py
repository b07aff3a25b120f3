"""The daemon as a process among others: its garbage collector, what it tells systemd, and why it ended.

`rest_what_stays`: a node's modules make some 100 000 objects. A full collection visits them all, 30 ms during which
nothing else goes on, and comes whenever many small objects were made, for instance by connections that come and go. So
what was imported and started is not looked through again.

`notify`: one datagram to the socket that systemd names in NOTIFY_SOCKET (sd_notify(3)). Outside systemd the variable is
not set and nothing happens.

`harden`: what the daemon gives up as it starts: rights, core dumps, files that others can read. It needs no rights of
root.

`reason_of`: one error with its exit code for a person, out of nested nurseries' groups.
"""

from __future__ import annotations

import gc
import logging
import os
import resource
import socket
import sys
from collections.abc import Iterator, Mapping

from swarmnode.node.exitcodes import CONFIG, ERROR, KEY_IN_USE, PORT_TAKEN, ExpectedError
from swarmnode.node.host.network import PortTaken
from swarmnode.node.trainer.child import TrainerFailed
from swarmnode.protocols.state.membership import KeyInUse
from swarmnode.training.corpus import CorpusError
from swarmnode.training.golden import GoldenMismatch
from swarmnode.training.sandbox import system

READY = "READY=1"
STOPPING = "STOPPING=1"
AS_ROOT = (
    "this node runs as root, and needs no right of root: a mistake in it, or in a library, would give a stranger the "
    "whole machine. Stop it and start it as an ordinary user (docs/volunteers.md); the data directory then has to "
    "belong to that user"
)

log = logging.getLogger(__name__)


def rest_what_stays() -> None:
    """Call when everything is started: what exists now is never collected."""
    gc.collect()
    gc.freeze()


def notify(state: str, *, status: str = "", environ: Mapping[str, str] | None = None) -> bool:
    """Send `state` and a line of `status` for `systemctl status`; says whether there was anybody to tell."""
    address = (os.environ if environ is None else environ).get("NOTIFY_SOCKET", "")
    if not address:
        return False
    if address.startswith("@"):  # Linux's abstract namespace, written so because a variable cannot hold a zero byte
        address = "\0" + address[1:]
    message = f"{state}\nSTATUS={status.replace(chr(10), ' ')}" if status else state
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | getattr(socket, "SOCK_CLOEXEC", 0)) as channel:
            channel.sendto(message.encode(), address)
    except OSError as error:
        log.warning("systemd was not told %s: %s", state, error)
        return False
    return True


def harden() -> None:
    """Give up what no part of a node needs, for this process and those that it starts; for good."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold the node's key
    if sys.platform == "linux":
        system.prctl(system.PR_SET_NO_NEW_PRIVS, 1)
    if runs_as_root():
        log.warning("%s", AS_ROOT)


def runs_as_root() -> bool:
    return os.geteuid() == 0


class DaemonError(ExpectedError):
    """A part of the daemon ended it; the text says why and what to do."""


# Errors of parts that know no exit codes.
EXIT_CODES: dict[type[Exception], int] = {
    KeyInUse: KEY_IN_USE,
    PortTaken: PORT_TAKEN,
    TrainerFailed: ERROR,
    GoldenMismatch: ERROR,
    CorpusError: CONFIG,
}


def reason_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception in nested nurseries' groups that tells a person what happened."""
    leaves = list(_leaves(group))
    kinds: tuple[type[Exception], ...] = (ExpectedError, *EXIT_CODES, ValueError, OSError)
    for kind in kinds:
        for leaf in leaves:
            if isinstance(leaf, kind):
                return DaemonError(str(leaf), exit_code=EXIT_CODES[kind]) if kind in EXIT_CODES else leaf
    return leaves[0]


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
