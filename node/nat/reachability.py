"""Whether this node can be dialled from outside: a small state machine fed with verdicts of peers.

    unknown --(most of those who tried got through)--> public
    unknown --(most did not)-------------------------> private
    public <--(two thirds of the verdicts say so)----> private

One peer never decides while others can be asked: `ENOUGH` verdicts are wanted, fewer count only once nobody else is
left to ask. Peers of the local network prove nothing about the internet: they count only while there are no others.
Verdicts age; a change of the network forgets them all. Pure: time is an argument, in seconds.
"""

from __future__ import annotations

import enum
import ipaddress
from dataclasses import dataclass

ENOUGH = 3  # verdicts from different hosts before the state is believed
AGE = 900.0  # s after which a verdict no longer counts
MAX_VERDICTS = 16  # the newest

LOCAL = tuple(  # RFC 1918, 6598, 3927, 4193, 4291: where a peer at the other side of a NAT is not
    ipaddress.ip_network(text)
    for text in (
        *("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "169.254.0.0/16", "127.0.0.0/8"),
        *("fc00::/7", "fe80::/10", "::1/128"),
    )
)


class Reach(enum.Enum):
    """What `swarmnode status` shows as reachability."""

    UNKNOWN = "unknown"
    PUBLIC = "public"
    PRIVATE = "private"


@dataclass(frozen=True)
class Verdict:
    """One peer's try to dial this node."""

    host: str  # where the peer is; verdicts of one host count once
    reached: bool
    at: float  # s


class Reachability:
    """The state and the verdicts behind it."""

    def __init__(self) -> None:
        self.state = Reach.UNKNOWN
        self._verdicts: dict[str, Verdict] = {}  # by host

    def heard(self, verdict: Verdict) -> None:
        """Take a verdict into account for the next decision."""
        self._verdicts.pop(verdict.host, None)
        self._verdicts[verdict.host] = verdict
        while len(self._verdicts) > MAX_VERDICTS:
            del self._verdicts[next(iter(self._verdicts))]

    def decide(self, now: float, *, others: int) -> Reach:
        """The state by the verdicts that are not too old; `others` is how many more hosts could be asked."""
        self._verdicts = {v.host: v for v in self._verdicts.values() if v.at > now - AGE}
        verdicts = list(self._verdicts.values())
        if verdicts and (len(verdicts) >= ENOUGH or not others):
            self.state = self._by_majority(verdicts)
        return self.state

    def disregard_local(self) -> None:
        """Peers outside the local network can be asked now: what those inside it found says nothing."""
        kept = {host: verdict for host, verdict in self._verdicts.items() if not is_local(host)}
        if self._verdicts and not kept:
            self.state = Reach.UNKNOWN
        self._verdicts = kept

    @property
    def only_local(self) -> bool:
        """Whether all that is known comes from the local network."""
        return bool(self._verdicts) and all(map(is_local, self._verdicts))

    def forget(self) -> None:
        """The network changed: nothing is known."""
        self._verdicts.clear()
        self.state = Reach.UNKNOWN

    def counts(self) -> tuple[int, int]:
        """How many hosts got through to this node, and how many did not."""
        reached = sum(v.reached for v in self._verdicts.values())
        return reached, len(self._verdicts) - reached

    def _by_majority(self, verdicts: list[Verdict]) -> Reach:
        reached = sum(v.reached for v in verdicts)
        failed = len(verdicts) - reached
        if self.state is Reach.PUBLIC:
            return Reach.PRIVATE if failed >= 2 * reached else Reach.PUBLIC
        if self.state is Reach.PRIVATE:
            return Reach.PUBLIC if reached >= 2 * failed else Reach.PRIVATE
        return Reach.PUBLIC if reached > failed else Reach.PRIVATE if failed > reached else Reach.UNKNOWN


def is_local(host: str) -> bool:
    """Whether an IP address has a meaning only within a network that a NAT or a carrier's NAT stands in front of."""
    ip = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return any(ip in network for network in LOCAL)
