"""What a local swarm reached: its rounds as records, and the figures of the summary that follow from them.

Everything here is arithmetic over `RoundReport`s, one for each round that one node ended. Nothing starts a process or
prints; `local_swarm.py` collects the records, `local.py` and `report.py` show the figures.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any


@dataclass(frozen=True)
class RoundReport:
    """One round as one node ended it.

    `loss` is held-out bits per byte of the shared parameters, None if not finite; `reward`, of a node's own policy on
    its own answers, takes its place in a run by rollouts.
    """

    round: int
    loss: float | None
    state_hash: str | None
    outcome: str
    seconds: float
    bytes_in: int
    bytes_out: int
    compute_seconds: float  # wall time of the trainer inside inner steps
    tokens: int
    ended_at: float  # this process's monotonic clock when the report was read; comparable between nodes
    reward: float | None = None  # 0 to 1
    learned_from: int = 0  # peers


def round_report(event: Mapping[str, Any], *, ended_at: float) -> RoundReport:
    """The record of a node's `round` event. Raises ValueError when the event names no round."""
    number = event.get("round")
    if not isinstance(number, int) or isinstance(number, bool):
        raise ValueError(f"round event without a round number: {event!r}")
    loss = event.get("loss")
    state_hash, learned = event.get("state_hash"), event.get("learned")
    return RoundReport(
        round=number,
        loss=float(loss) if isinstance(loss, (int, float)) and math.isfinite(loss) else None,
        state_hash=state_hash if isinstance(state_hash, str) and state_hash else None,
        outcome=str(event.get("outcome", "")),
        seconds=_amount(event.get("seconds")),
        bytes_in=int(_amount(event.get("bytes_in"))),
        bytes_out=int(_amount(event.get("bytes_out"))),
        compute_seconds=_amount(event.get("compute_seconds")),
        tokens=int(_amount(event.get("tokens"))),
        ended_at=ended_at,
        reward=_amount(learned.get("reward")) if isinstance(learned, Mapping) else None,
        learned_from=int(_amount(learned.get("authors"))) if isinstance(learned, Mapping) else 0,
    )


def _amount(value: Any) -> float:
    """A count or duration; what is missing or not finite counts as nothing."""
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else 0.0


@dataclass(frozen=True)
class Summary:
    """The last line of `swarmnode local --json`, field by field."""

    nodes: int
    rounds: int  # rounds that at least one node ended
    parameters: int
    heldout_bits_per_byte: float | None
    solo_bits_per_byte: float | None
    hashes_agree: bool | None  # None where nobody is to agree: each node has a policy of its own
    bytes_per_parameter_round: float | None  # sent at the sockets, all traffic; mean over nodes
    compute_share: float | None  # 0 to 1; mean over the nodes that ended the last round
    seconds: float  # from the start of the first process to the end of the last, the solo run included
    reward: float | None = None  # on fresh questions, 0 to 1; mean over nodes; of a run by rollouts
    solo_reward: float | None = None

    def event(self) -> dict[str, Any]:
        """The JSON object; rewards are in those of runs by rollouts only."""
        told = {"event": "summary", **dataclasses.asdict(self)}
        if self.hashes_agree is not None:
            del told["reward"], told["solo_reward"]
        return told

    @property
    def gain(self) -> float | None:
        """Bits per byte by which the swarm is better than the node alone; negative when it is worse."""
        if self.heldout_bits_per_byte is None or self.solo_bits_per_byte is None:
            return None
        return self.solo_bits_per_byte - self.heldout_bits_per_byte


def summarize(
    reports: Sequence[Sequence[RoundReport]],
    *,
    parameters: int,
    heldout: float | None,
    solo: float | None,
    seconds: float,
    by_rollouts: bool = False,
) -> Summary:
    """The figures of one swarm; `reports` holds each node's rounds in the order in which they ended.

    `heldout` and `solo` are losses, or rewards in a run `by_rollouts`.
    """
    last = last_round(reports)
    finishers = [node for node in reports if node and node[-1].round == last]
    return Summary(
        nodes=len(reports),
        rounds=len({report.round for node in reports for report in node}),
        parameters=parameters,
        heldout_bits_per_byte=None if by_rollouts else heldout,
        solo_bits_per_byte=None if by_rollouts else solo,
        hashes_agree=None if by_rollouts else hashes_agree(reports),
        bytes_per_parameter_round=_mean(_bytes_per_parameter_round(node, parameters) for node in reports if node),
        compute_share=_mean(_compute_share(node) for node in finishers),
        seconds=round(seconds, 3),
        reward=heldout if by_rollouts else None,
        solo_reward=solo if by_rollouts else None,
    )


def hashes_agree(reports: Sequence[Sequence[RoundReport]]) -> bool:
    """Whether, in each round, all nodes that reported a state hash reported the same; False when nobody did."""
    by_round = hashes_by_round(reports)
    return bool(by_round) and all(len(hashes) == 1 for hashes in by_round.values())


def hashes_by_round(reports: Sequence[Sequence[RoundReport]]) -> dict[int, set[str]]:
    """The different state hashes reported for each round."""
    found: dict[int, set[str]] = defaultdict(set)
    for node in reports:
        for report in node:
            if report.state_hash is not None:
                found[report.round].add(report.state_hash)
    return dict(found)


def last_round(reports: Sequence[Sequence[RoundReport]]) -> int | None:
    """The highest round that any node ended."""
    return max((report.round for node in reports for report in node), default=None)


def loss_curve(reports: Sequence[Sequence[RoundReport]]) -> tuple[tuple[int, float], ...]:
    """(round, held-out bits per byte), mean over the nodes that reported one; equal parameters give equal losses."""
    losses: dict[int, list[float]] = defaultdict(list)
    for node in reports:
        for report in node:
            if report.loss is not None:
                losses[report.round].append(report.loss)
    return tuple((number, fmean(losses[number])) for number in sorted(losses))


def reward_curve(reports: Sequence[Sequence[RoundReport]]) -> tuple[tuple[int, float], ...]:
    """(round, reward of own answers), mean over the nodes that reported one; each has a policy of its own."""
    rewards: dict[int, list[float]] = defaultdict(list)
    for node in reports:
        for report in node:
            if report.reward is not None:
                rewards[report.round].append(report.reward)
    return tuple((number, fmean(rewards[number])) for number in sorted(rewards))


def by_rollouts(reports: Sequence[Sequence[RoundReport]]) -> bool:
    """Whether these are rounds of a run by rollouts."""
    return any(report.reward is not None for node in reports for report in node)


def _bytes_per_parameter_round(node: Sequence[RoundReport], parameters: int) -> float | None:
    return sum(report.bytes_out for report in node) / (parameters * len(node)) if parameters else None


def _compute_share(node: Sequence[RoundReport]) -> float | None:
    """Share of the time from the start of the node's first round to the end of its last spent in inner steps."""
    wall = node[-1].ended_at - (node[0].ended_at - node[0].seconds)
    return sum(report.compute_seconds for report in node) / wall if wall > 0 else None


def _mean(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def strict_json(value: Any) -> Any:
    """`value` with null in place of NaN and infinities, which strict JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): strict_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict_json(item) for item in value]
    return value
