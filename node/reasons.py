"""Why a daemon ended, for a person: one error with its exit code, out of nested nurseries' groups."""

from __future__ import annotations

from collections.abc import Iterator

from swarmnode.node.exitcodes import CONFIG, ERROR, KEY_IN_USE, PORT_TAKEN, ExpectedError
from swarmnode.node.host.network import PortTaken
from swarmnode.node.trainer.child import TrainerFailed
from swarmnode.protocols.state.twins import KeyInUse
from swarmnode.training.corpus import CorpusError
from swarmnode.training.golden import GoldenMismatch


class DaemonError(ExpectedError):
    """A part of the daemon ended it; the text says why and what to do."""

    def __init__(self, text: str, *, exit_code: int = ERROR) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def reason_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one exception in nested nurseries' groups that tells a person what happened."""
    leaves = list(_leaves(group))
    for kind in (ExpectedError, KeyInUse, PortTaken, TrainerFailed, GoldenMismatch, CorpusError, ValueError, OSError):
        for leaf in leaves:
            if isinstance(leaf, KeyInUse):
                return DaemonError(str(leaf), exit_code=KEY_IN_USE)
            if isinstance(leaf, PortTaken):
                return DaemonError(str(leaf), exit_code=PORT_TAKEN)
            if isinstance(leaf, CorpusError):
                return DaemonError(str(leaf), exit_code=CONFIG)
            if isinstance(leaf, (TrainerFailed, GoldenMismatch)):
                return DaemonError(str(leaf))
            if isinstance(leaf, kind):
                return leaf
    return leaves[0]


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
