"""What a running daemon answers to `swarmnode successor …`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from swarmnode.node.control import Declined, absolute_path
from swarmnode.node.exitcodes import CONFIG
from swarmnode.node.provenance import KEY, Succession, follow, keep_parent, read
from swarmnode.node.storage.datadir import DataDirError
from swarmnode.protocols.runner import in_thread
from swarmnode.protocols.state.backend import StateError
from swarmnode.training.options import SettingError
from swarmnode.training.runspec import RunSpec, load_runspec

if TYPE_CHECKING:
    from swarmnode.node.daemon import Daemon


class SuccessorApi:
    """The control methods. Each raises Declined with a text for a person."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon

    def methods(self) -> dict[str, Callable[[Mapping[str, Any]], Any]]:
        """By the names under which the control socket serves them."""
        return {
            "successor_show": self.successor_show,
            "successor_publish": self.successor_publish,
            "successor_end": self.successor_end,
        }

    async def successor_show(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What the owner of this node's run said."""
        spec, state = self._run()
        said = read(await state.get(spec.owner, KEY), spec) if spec.owner else None
        return {"run_id": spec.run_id, "owner": spec.owner or None, **_told(said)}

    async def successor_publish(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Publish the run in a file as the successor, from the state that this node stands on now."""
        spec, _ = self._owned()
        path, daemon = absolute_path(params.get("path")), self._daemon
        session, trainer = daemon.session, daemon.trainer
        if session is None or trainer is None or session.place is None:
            raise Declined("this node does not stand in its run yet, so there is no state to go on from")
        hash, saved = session.place.state_hash, session.method.saved()
        try:
            new = follow(await in_thread(lambda: load_runspec(path)), spec, state_hash=hash, me=daemon.network.me)
            await in_thread(lambda: keep_parent(daemon.store, new, trainer.layout, saved))
        except SettingError as error:
            raise Declined(str(error), exit_code=CONFIG) from error
        except DataDirError as error:
            raise Declined(str(error), exit_code=error.exit_code) from error
        return await self._say(Succession(new.run_id, saved.round, str(params.get("reason") or "")))

    async def successor_end(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Say that the run has ended."""
        self._owned()
        return await self._say(Succession("", self._daemon.rounds_done(), str(params.get("reason") or "")))

    async def _say(self, what: Succession) -> dict[str, Any]:
        spec, state = self._owned()
        try:
            await state.write(KEY, what.value())
        except StateError as error:
            raise Declined(str(error)) from error
        return {"run_id": spec.run_id, "owner": spec.owner, **_told(what)}

    def _owned(self) -> tuple[RunSpec, Any]:
        spec, state = self._run()
        me = self._daemon.network.me
        if spec.owner != me:
            whose = (
                f"its owner is {spec.owner}" if spec.owner else "it has no owner ([run] owner, or [trust] validators)"
            )
            raise Declined(f"only a run's owner can say how it goes on: {whose}, and this node is {me}")
        return spec, state

    def _run(self) -> tuple[RunSpec, Any]:
        chosen, state = self._daemon.chosen, self._daemon.state
        if chosen is None or state is None:
            raise Declined("this node is in no run yet; swarmnode status says what it waits for")
        return chosen.spec, state


def _told(said: Succession | None) -> dict[str, Any]:
    if said is None:
        return {"successor": None, "ended": False, "round": None, "reason": ""}
    return {
        "successor": said.run_id or None,
        "ended": not said.run_id,
        "round": said.round,
        "reason": said.reason,
    }
