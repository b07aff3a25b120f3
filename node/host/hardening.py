"""What the daemon gives up as it starts: rights, core dumps, files that others can read. It needs no rights of root."""

from __future__ import annotations

import logging
import os
import resource
import sys

from swarmnode.training.sandbox import system

logger = logging.getLogger(__name__)

AS_ROOT = (
    "this node runs as root, and needs no right of root: a mistake in it, or in a library, would give a stranger the "
    "whole machine. Stop it and start it as an ordinary user (docs/volunteers.md); the data directory then has to "
    "belong to that user"
)


def harden() -> None:
    """Give up what no part of a node needs, for this process and those that it starts; for good."""
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold the node's key
    if sys.platform == "linux":
        system.prctl(system.PR_SET_NO_NEW_PRIVS, 1)
    if runs_as_root():
        logger.warning("%s", AS_ROOT)


def runs_as_root() -> bool:
    return os.geteuid() == 0
