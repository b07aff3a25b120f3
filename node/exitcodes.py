"""What the exit code of `swarmnode` says (docs/cli.md has the table), and the errors that end it in an orderly way.

An `ExpectedError` is something that happens to careful people too: a port is taken, a disk is full. Its text says what
happened, what it means and what to do; the program prints it without a traceback and ends with its `exit_code`.
"""

from __future__ import annotations

OK = 0  # done, or stopped in order after the first Ctrl-C
ERROR = 1  # failed; the message says why
USAGE = 2  # the command line is not understood
CONFIG = 3  # a setting, a run file or a key file cannot be used
DATADIR_BUSY = 4  # another daemon holds the data directory
DATADIR_VERSION = 5  # the data directory was written by another version of swarmnode
PORT_TAKEN = 6  # another program listens on the port
NO_SPACE = 7  # the disk is full or a quota is used up; after a stop: the newest state is not saved
RUN_UNAVAILABLE = 8  # nobody answers at the join addresses or has the data, or it was refused
NOT_RUNNING = 9  # the command needs a running daemon and there is none
KEY_IN_USE = 10  # an older daemon runs with the same key; the younger one stops
DEGRADED = 11  # of `swarmnode health`: the node runs, and something keeps it from its work
FORCED = 130  # a node ended at once by a second Ctrl-C, another command by the first, or a question answered with no


class ExpectedError(Exception):
    """An error that a person is told about in plain words. `exit_code` is what the process then returns."""

    exit_code = ERROR

    def __init__(self, text: str, *, exit_code: int | None = None) -> None:
        """`exit_code`: another one than that of the class."""
        super().__init__(text)
        if exit_code is not None:
            self.exit_code = exit_code


class UsageMistake(ExpectedError):
    """What was typed, pasted or sent has no meaning here. The message says what has."""

    exit_code = USAGE
