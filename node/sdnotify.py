"""Tells systemd how a service is doing: one datagram to the socket that it names in NOTIFY_SOCKET (sd_notify(3)).

Outside systemd the variable is not set and `notify` does nothing.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Mapping

READY = "READY=1"
STOPPING = "STOPPING=1"

log = logging.getLogger(__name__)


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
