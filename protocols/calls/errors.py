"""How a call can end badly: what callers catch, and what handlers raise to refuse."""

from __future__ import annotations


class CallError(Exception):
    """A call brought no answer. The text is fit for a log line."""


class PeerGone(CallError):
    """No stream to the peer could be opened, or it broke during the call."""


class DeadlineExceeded(CallError):
    """The peer is connected, or was being connected, and the time is up."""


class Refused(CallError):
    """The peer answered that it will not: by its handler's own code, or one of

    "unknown-method", "malformed" (it could not read the request), "busy" (over its limits), "internal" (its handler
    failed), "bad-reply" (its answer could not be read here).
    """

    def __init__(self, code: str, text: str) -> None:
        super().__init__(text)
        self.code = code


class Refuse(Exception):
    """Raised by a handler: the caller gets Refused with this code and text."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{code}: {text}")
        self.code = code
        self.text = text
