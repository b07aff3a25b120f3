"""What a node's owner should know now, gathered from the parts of its daemon: in `swarmnode status` behind a `!`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from swarmnode.node.process import AS_ROOT, runs_as_root
from swarmnode.node.trainer.confinement import exposed
from swarmnode.node.trainer.supervisor import TrainerProcess
from swarmnode.protocols.peers.scoring import Conduct
from swarmnode.protocols.state.membership import Membership
from swarmnode.protocols.state.sync import StateSync

if TYPE_CHECKING:
    from swarmnode.node.daemon import Daemon


def warnings_of(daemon: Daemon) -> list[str]:
    """All of it, a sentence each, what concerns the run first."""
    told = list(daemon.session.warnings.values()) if daemon.session is not None else []
    told += list(daemon.data.warnings.values()) if daemon.data is not None else []
    told += [daemon.state.warning] if daemon.state is not None and daemon.state.warning else []
    told += [daemon.successors.warning] if daemon.successors is not None and daemon.successors.warning else []
    told += _of_state(daemon.sync, daemon.membership)
    if daemon.trainer is not None:
        told += _of_sampling(daemon.trainer) + _of_sandbox(daemon.trainer)
        within = exposed(daemon.trainer.rules, daemon.config.directory)
        if within:
            told.append(f"the trainer may read {within}, which contains this node's key; name a smaller folder")
    told += [AS_ROOT] if runs_as_root() else []
    told += _of_conduct(daemon.network.conduct)
    if not daemon.network.peers():
        told += [f"{why} (join address {address})" for address, why in daemon.join_failures().items()]
    return told


def _of_state(sync: StateSync | None, membership: Membership | None) -> list[str]:
    """Why this node does not write to the state; what keeps it from its lease is told once where both say it."""
    told = list(sync.complaints) if sync is not None else []
    lease = membership.complaint if membership is not None else ""
    return told + ([f"this node cannot renew its lease: {lease}"] if lease and lease not in told else [])


def _of_sampling(trainer: TrainerProcess) -> list[str]:
    told = trainer.sampling
    return [told["why"]] if told is not None and told["why"] else []


def _of_sandbox(trainer: TrainerProcess) -> list[str]:
    told = trainer.sandbox
    lacking = [f"{missing['part']} ({missing['why']})" for missing in told["missing"]] if told is not None else []
    return [f"the trainer's sandbox is not whole; it lacks: {'; '.join(lacking)}"] if lacking else []


def _of_conduct(conduct: Conduct) -> list[str]:
    """Peers that are treated worse than others: their owners may have something to mend, or be strangers."""
    worse = Counter(standing.word for _, standing in conduct.below_good())
    told = ", ".join(f"{count} {word}" for word, count in sorted(worse.items()))
    return [f"peers that broke rules or ask too much: {told} (swarmnode peers)"] if told else []
