"""Every kind of router against every other, with QUIC on: how often two nodes come to be direct, and how soon.

Each kind stands twice in the laboratory, once for A and once for B, who dials. In each of as many rounds as there are
kinds every A meets another B; all have fresh identities and ports, and all routers have forgotten everything. The pairs
of a round settle together, and then dial one after another, so that they do not wait for one another's work.

`weighted` says what that comes to among peers as they were found: Halkes and Pouwelse, "UDP NAT and Firewall Puncturing
in the Wild" (IFIP Networking 2011), saw 21 % of BitTorrent's peers without a NAT or firewall in the way, 64 % behind
mappings that do not depend on the endpoint, 11 % behind such as do, and 4 % behind something else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from agents import Agent, Relay
from lab import Host, Lab, Link, Nat
from topologies import GIVE_UP, HOME_LINK, Attempt, connect, firewalled, settle

Build = Callable[[Lab, str, Link], Host]


def behind(kind: str) -> Build:
    return lambda lab, name, link: lab.private(name, lab.nat(f"router{name}", kind, link=link))


def upnp(lab: Lab, name: str, link: Link) -> Host:
    router = lab.nat(f"router{name}", "cone", link=link)
    lab.upnp(router)
    return lab.private(name, router)


def carrier(lab: Lab, name: str, link: Link) -> Host:
    """A home router behind one of the provider."""
    outer = lab.nat(f"carrier{name}", "cone", link=link)
    return lab.private(name, lab.nat(f"router{name}", "cone", behind=outer))


PUBLIC, CONE, SYMMETRIC, OTHER = "public", "cone", "symmetric", "other"


@dataclass(frozen=True)
class Kind:
    """One way to be connected to the internet, and the group in which `weighted` counts it, if in any."""

    name: str
    build: Build
    group: str | None = None


KINDS = (
    Kind("public", lambda lab, name, link: lab.public(name, link), PUBLIC),
    Kind("full cone", behind("fullcone"), CONE),
    Kind("address-restricted", behind("address-restricted"), CONE),
    Kind("port-restricted", behind("cone"), CONE),
    Kind("carrier + home", carrier, CONE),
    Kind("symmetric, in sequence", behind("sequential"), SYMMETRIC),
    Kind("symmetric, random", behind("symmetric"), SYMMETRIC),
    Kind("IPv6 firewall", firewalled),
    Kind("UPnP", upnp),
)
SHARES = {PUBLIC: 0.21, CONE: 0.64, SYMMETRIC: 0.11, OTHER: 0.04}  # of peers (see above)
NEXT_AFTER = 3.0  # s for which the next pair waits for one to be direct
WANTED = {(CONE, CONE): 0.97, (CONE, SYMMETRIC): 0.90}  # share that must be direct
WANTED_OVERALL, WANTED_WITHIN = 0.90, 2.0  # weighted share; s to direct in the median

Cell = tuple[str, str]  # the kinds of A and B, by name
Table = dict[Cell, list[Attempt]]


def rounds(lab: Lab, folder: Path, known: Sequence[Relay], shifts: Iterable[int]) -> Iterator[Table]:
    """A round for each of `shifts`, in which A of kind i meets B of kind i + shift; one attempt a pair."""
    before = set(lab.machines())
    with ExitStack() as stack:
        sides = [
            [
                stack.enter_context(Agent(kind.build(lab, f"{side}{n}", HOME_LINK), folder / f"{side}{n}.log"))
                for n, kind in enumerate(KINDS)
            ]
            for side in "AB"
        ]
        routers = [each for name in lab.machines() if name not in before and isinstance(each := lab[name], Nat)]
        for shift in shifts:
            for router in routers:
                lab.forget(router)
            turned = [*sides[1][shift:], *sides[1][:shift]]
            others = [*KINDS[shift:], *KINDS[:shift]]
            attempts = meet(list(zip(sides[0], turned, strict=True)), known)
            yield {(a.name, b.name): [one] for a, b, one in zip(KINDS, others, attempts, strict=True)}
    lab.take_down(*(name for name in lab.machines() if name not in before))


def collect(found: Iterable[Table]) -> Table:
    """All attempts of several rounds, by kinds."""
    whole: Table = {}
    for table in found:
        for cell, attempts in table.items():
            whole.setdefault(cell, []).extend(attempts)
    return whole


def meet(pairs: Sequence[tuple[Agent, Agent]], known: Sequence[Relay]) -> list[Attempt]:
    """All settle together; then each B dials its A."""
    states = settle(pairs, known, ipv6=True)
    with ThreadPoolExecutor(len(pairs)) as pool:
        under_way = []
        for pair, state in zip(pairs, states, strict=True):
            under_way.append(pool.submit(connect, pair, state, GIVE_UP))
            wait(under_way[-1:], timeout=NEXT_AFTER)
        return [each.result() for each in under_way]


def share(attempts: Sequence[Attempt]) -> float:
    """The part of them that came to be direct."""
    return sum(attempt.path == "direct" for attempt in attempts) / len(attempts)


def of_groups(table: Table, one: str, other: str) -> list[Attempt]:
    """All attempts between two groups, whoever dials."""
    group = {kind.name: kind.group for kind in KINDS}
    wanted = sorted((one, other))
    return [each for cell, found in table.items() if sorted(str(group[k]) for k in cell) == wanted for each in found]


def weighted(table: Table) -> float:
    """The share of direct pairs among two peers drawn by SHARES; of OTHER only those with a public one count."""
    total = 0.0
    for one, of_one in SHARES.items():
        for other, of_other in SHARES.items():
            known = OTHER not in (one, other)
            direct = share(of_groups(table, one, other)) if known else float(PUBLIC in (one, other))
            total += of_one * of_other * direct
    return total


def page(table: Table) -> str:
    """The tables of docs/nat.md."""
    names = [kind.name for kind in KINDS]
    text = f"| A, down; B, who dials | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}\n"
    for a in names:
        text += f"| {a} | {' | '.join(_cell(table.get((a, b), [])) for b in names)} |\n"
    everything = [each for found in table.values() for each in found]
    text += "\n| of all | measured | |\n|---|---|---|\n"
    for (one, other), least in WANTED.items():
        found = of_groups(table, one, other)
        text += _row(f"{one}–{other}, direct", f"{_counted(found)}: {100 * share(found):.1f} %", share(found) >= least)
    overall = weighted(table)
    text += _row("weighted by a published mix, direct", f"{100 * overall:.1f} %", overall >= WANTED_OVERALL)
    for name, found in (("all", everything), ("cone–symmetric", of_groups(table, CONE, SYMMETRIC))):
        soon = median([each.direct for each in found if each.direct is not None] or [float("inf")])
        worst = max((each.direct for each in found if each.direct is not None), default=float("inf"))
        text += _row(f"s to direct, {name}", f"{soon:.2f}, at most {worst:.2f}", soon <= WANTED_WITHIN)
    found = of_groups(table, SYMMETRIC, SYMMETRIC)
    most = max(each.packets for each in found)
    text += f"| symmetric–symmetric, direct | {_counted(found)}, with at most {most} packets a pair | |\n"
    connected = sum(each.connected is not None for each in everything)
    return text + _row("connected at all", f"{connected} of {len(everything)}", connected == len(everything))


def holds(table: Table) -> bool:
    return "missed" not in page(table)


def _cell(found: Sequence[Attempt]) -> str:
    soon = [each.direct for each in found if each.direct is not None]
    return _counted(found, " of ") + (f", {median(soon):.1f} s" if soon else "") if found else "–"


def _counted(found: Sequence[Attempt], of: str = " of ") -> str:
    return f"{sum(each.path == 'direct' for each in found)}{of}{len(found)}"


def _row(what: str, measured: str, reached: bool) -> str:
    return f"| {what} | {measured} | {'reached' if reached else '**missed**'} |\n"
