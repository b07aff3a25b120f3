"""python tests/attacks [--nodes N] [GROUP ...]: all attacks in full; prints the lines and writes docs/attacks.md.

Each group takes the place of its earlier lines when it is through, and the page keeps the others: groups may be run one
at a time. `--nodes N`: the swarms of the groups offers and round have so many nodes; these lines have tables of their
own. Sixteen take some ten times as long as five. `--rounds` and `--lies` are for the group gradient, which is written
line by line, as is byte-lm. The exit status is 1 where a promise of what was run is missed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.append(str(Path(__file__).parents[1] / "support"))  # as pyproject.toml does for pytest

import butterfly
import bytelm
import dht
import gradient
import host
import identity
import offers
import reputation
import rollouts
import rounds
import state
import transport
import trio
from gradient import Line
from harness import Outcome
from openswarm import NODES


class Chosen(NamedTuple):
    """What of a group is run."""

    nodes: int = NODES  # of simulated swarms
    rounds: Sequence[int] = gradient.HORIZONS  # of the group gradient …
    lies: Sequence[str] = ()  # … and words, of which one is in the names of its attacks; none: all


GROUPS: dict[str, Callable[[Chosen], AsyncIterator[Outcome | Line]]] = {
    "transport": lambda chosen: transport.outcomes(),
    "dht": lambda chosen: dht.outcomes(),
    "state": lambda chosen: state.outcomes(),
    "offers": lambda chosen: offers.outcomes(chosen.nodes),
    "round": lambda chosen: rounds.outcomes(chosen.nodes),
    "rollout": lambda chosen: rollouts.outcomes(),
    "butterfly": lambda chosen: butterfly.outcomes(),
    "reputation": lambda chosen: reputation.outcomes(),
    "host": lambda chosen: host.outcomes(),
    "identity": lambda chosen: identity.outcomes(),
    "gradient": lambda chosen: gradient.outcomes(chosen.rounds, chosen.lies),
    "byte-lm": lambda chosen: bytelm.outcomes(),
}
SIZED = ["offers", "round"]  # groups whose swarms can have another size
PAGE = Path(__file__).parents[2] / "docs" / "attacks.md"
INTRODUCTION = """# Attacks

What this node was put through, and what it cost, beside the same attack on a node without the defence. Written by `make
attacks`; the adversaries are in `tests/attacks/adversaries/`, and a short form of each runs with the tests. To add one,
write a class with a `name` and an `attack` in the file of its group, name it in that file's `everyone()`, and say with
`lacks` which defence the undefended nodes go without, where they are this node with one part replaced; some thirty
lines (`harness.py`). `python tests/attacks GROUP` runs one group and keeps the lines of the others.

A line passes where what its group promises was kept; what is missed is said with its figure. Where the undefended bear
an attack as well, the line says so, and what it shows instead.

| group | attacks | missed |
|---|---|---|
"""
COLUMNS = "| attack | this node | undefended | |"
EXPLAINED = {
    "Transport": """
On real loopback sockets, two cores shared by the victim, the adversary and an honest peer that makes 100 calls a
second. A line passes where the victim's memory grows by at most 64 MiB, the honest p99 at most doubles or stays below
10 ms, no turn of the victim's loop takes more than 20 ms of CPU, nothing of the peer's is executed, and a new peer is
still answered afterwards. A p99 that breaks this is measured up to three times, as the machine has other work; the
first line shows what it does by itself. With the tests the p99 may be 250 ms, on whatever machine; one of them shows
that a node which answers one call after another breaks that. To the victim all are strangers. The undefended node is
py-libp2p as installed, with a handler that believes lengths, decodes without bounds and answers one call after
another. In the last line the victim judges its peers about fifty times as fast as it does by default. The lines are
of one run on a slow machine.
""",
    "DHT": """
Real hosts in one process. A line passes where no node keeps a value for others, and at least 99 % of lookups find who
announced a key. Lying routers search 2^15 key pairs for the identities nearest to each key, in advance: those that
they name share nine bits and more with it, the nearest honest node some four. The undefended node is py-libp2p's
KadDHT as installed.
""",
    "State": """
16 simulated nodes with one replicated state, two of them malicious. A line passes where honest nodes hold no element
that the law forbids and lack none of one another's, all have one state hash, what attackers and strangers signed
takes no more than the slots of two authors (6 MiB), repairs go on, and each attacked node comes to
refuse the attackers. The undefended node keeps what it is sent with the latest date, and passes it on.
""",
    "Offers": """
What authors offer, through the network: one changed node of five on simnet, all validators. A line passes where
nothing of the liar's is accepted that is not in order, what it copied is, honest nodes have one state in every round,
and no round takes more than twice the usual time. Undefended are the same nodes without the one defence that the line
names (`undefended.py`); all others they have. They get 300 s, which is 25 usual rounds.
""",
    "Round": """
Five nodes on simnet in virtual time, all validators. A line passes where honest nodes have one state in every round
(after a cut or two rosters: within 3 rounds), and no round takes more than twice the usual time, but for nodes that
are cut off or away, where it is four times. Where a leader lied or was silent, the next one must have taken over in
the same round; who was cut off, or comes back from a backup, must have work in rosters afterwards. Undefended as
under [Offers](#offers). What SIGKILL and SIGSTOP cost real processes is in
[allreduce.md](allreduce.md#when-a-member-fails) (four members, by the part of a round in which it strikes) and
[strain.md](strain.md) (six to eight nodes, up to two hours; also the open exchange).
""",
    "Rollout": """
Eight nodes learn digit tasks for 50 rounds from their own and one another's answers, two of them lie ("Hail to the
Thief", 2511.09780); the product's learning half in one process. Rejected are liars' groups from which nothing was
learned because of what they are, not because of a cap. A line passes with 99 % of them, with at most 1 % of honest
answers refused, where at most 2 % more of the honest nodes' answers carry what was smuggled in than without liars,
and these are at most 1.1 times as long. Undefended is SAPO as published, in nodes that believe claimed rewards.
Samplers write for another's policy: a hundred batches of eight signed groups, each beside one of an honest sampler,
to a trainer that looks at a quarter of them; a batch is rejected where nothing of it is learned from. In the lines of
a false working, answers show a sum before the answer, which the checkpoint was taught and a judge reads; lines
without a seed are of seed 1. Who floods joins six honest nodes on simnet that have learned from one another for six
rounds of 10 s, and stays for nine; sessions, policies, gate and ledgers are the product's, and nobody is told who is
new: a ledger counts at the end of each 30 s what a node's own trainer made of the groups. Shares are those at the
node, in the batch and at the moment where they are greatest. A peer may have a quarter; the new identities of one
attacker an eighth together.
""",
    "Butterfly": """
Seven known members, two of whom lie inside the all-reduce of `btard` from the first round on, four rounds on simnet.
A line passes where honest members have one state in every round, none of them is banned, liars whose lie leaves a
proof are, by every honest member and by the records of most, and the held-out loss is at most 1.25 times that without
liars. Undefended is the plain mean of `diloco`, or the same members without what finds that lie
(`undefended_btard.py`), who get 300 s for each round.
""",
    "Reputation": """
A swarm in numbers, 16 peers unless the line says otherwise: each has a true gain, judges measure it with a noise of
0.3 of an honest gain, one honest node keeps a ledger. What a name gains that has a part of one peer's work is
measured, with numpy training of the clusters of the group [gradient](#gradient). The worst of 10 seeds. Undefended is
the mean of what everybody says, with newcomers trusted like anybody and absence counted as no gain.
docs/reputation.md says where this ends: with noisier judges, and on unusual data.
""",
    "Host": """
Real processes. Code that took over the trainer is a program that enters the trainer's sandbox as the trainer does and
then tries what the line says, each attempt once; the undefended one is the same program without the sandbox. The
daemon listens for peers on one port (TCP and UDP), for its user on a socket that no browser reaches, and for the
user's browser on loopback, where its [page](page.md) wants a token and refuses other origins. A line passes where no
attempt succeeds. Of a fork bomb the threads are counted as well, which a trainer may have: at most 40 in this test.
docs/volunteers.md says what is promised, and what is not.
""",
    "Identity": """
A line passes where no honest peer is lost sight of, fewer than a tenth of the repairs go to attackers, and of
identities made for nothing no more are admitted than twice what chance gives. Connections are real ones, the
addresses that they come from are told to the victim.
""",
    "First strikes": """
Of identities that are trusted and fool every judge, among the 16 peers of the group [gradient](#gradient): a line
passes where a strike takes the parameters no further than twice the honest norm, and is undone if it harms. Then what
somebody gains who claims samples that nobody saw, among known members.
""",
    "Gradient": """
16 peers learn to tell ten clusters apart, on IID data or on shares of the classes drawn by Dirichlet(0.3), all of
them validators but those who join later. Training is numpy, the rounds are the open chain's own functions without a
network; liars also lie as judges (`openrounds.py`). Judges measure as in `open/judge.py`, with 64 samples for a
sequence. Every attack is tried at five seeds and two horizons, and the worst seed decides. A line holds with 95 % of
the accuracy without liars at IID 5/16 and Dirichlet 4/16 and 85 % at IID 7/16 and Dirichlet 5/16, where no run ends
below the plain mean with the same liars by more than a standard deviation of runs without, liars never are half of
the validators, and no honest validator is removed as silent. From sixteen rounds of lying on the liars' weight is at
most 1.1 times their share of verified work: of the stretches that are their authors' own steps on the data drawn for
them, counted by the weight that the same author has where nobody lies; or 2 %. One peer under many names has at most
1.05 times the weight of an honest name. Without liars 95 % of the work counts and no validator is lost. The five
worst attacks of each horizon are also tried with `topk`, with `sign3` and outer momentum, and on a task with ten
times as many parameters. Where a committee judges, 48 peers are validators, as many as a run comes to by default; a
committee of 33 of them is drawn for each round, and a quarter lie. Each day CI runs a short form at a seed of that
day. Who claims 1e9 samples flips the sign as well; there undefended is the mean by samples. Judges draw from 4,000
held-out samples; those who train on them are three of sixteen, and the loss that would be reported is on other
samples, and must be within 1 % of that on samples that nobody saw.

Audits are on, as by default. Real are the draw of author and stretch, what a node may spend on audits, and how long a
proven lie counts; modelled is the verdict: an audit finds a lie if the stretch that it draws is false, and then all
honest nodes find it, each at the cost of one replay. Which stretches are false each lie says itself: all of them for
whatever is not an author's own steps on the data drawn for it (copies, old work, noise, other labels), or which
cannot follow from the states that it shows. An audit is taken to cost 2.2 times the steps that it repeats; measured
were 1.05 times ([reputation.md](reputation.md#audits)). That replays tell so is shown with real trainers in
`tests/e2e` and by `python bench/audit.py`. Judges say of an author that it has full standing, or none as a proven
liar; what the ledger makes of gains is left out, and so is that liars accuse the honest, which costs each node one
replay for each name.

Each figure has one value for each setting. All five: IID 5/16, IID 7/16, Dirichlet 4/16, Dirichlet 5/16, and for
information, without a promise, Dirichlet 7/16. Worst: of all seeds, the accuracy as a share of the plain mean's
without liars at the same seed; undefended: the plain mean's with the liars, at that seed; liars left out: the plain
mean's of honest peers alone, at that seed, which no rule that refuses all liars betters but by luck, as their data
are missing. Weight (in brackets: their share of verified work), from sixteen rounds of lying on: at the seed at which
it is furthest from what is permitted; refused: mean over seeds; lost: honest validators, at the worst seed; captured:
liars came to be half of the validators.
""",
    bytelm.HEADING: bytelm.EXPLAINED,
}
MEASURED = ("Gradient", bytelm.HEADING)  # whose lines are of several seeds and settings
LARGER = """
The same with more nodes, each once and without the undefended nodes.
"""


async def main(groups: list[str], chosen: Chosen) -> int:
    """Attack with these groups, or all; the page keeps what it says of the others."""
    passed = True
    for group in groups or (list(GROUPS) if chosen.nodes == NODES else SIZED):
        of_group: list[Outcome] = []
        async for found in GROUPS[group](chosen):
            print(row(found), flush=True)
            if isinstance(found, Line):
                write_line(found)
            else:
                of_group.append(found)
            passed = passed and found.passed
        if of_group:
            write_outcomes(of_group, chosen.nodes)
    return 0 if passed else 1


def row(found: Outcome | Line) -> str:
    """One line of the page."""
    if isinstance(found, Line):
        return found.row()
    verdict = "passes" if found.passed else "MISSED: " + "; ".join(found.failures)
    verdict += f"; no harm undefended: what is shown is {found.shows}" if found.shows else ""
    return f"| {found.attack} | {found.defended} | {found.undefended} | {verdict} |"


def write_outcomes(outcomes: Sequence[Outcome], nodes: int = NODES) -> None:
    """Put the lines of one group, with so many nodes, in the place of its earlier ones."""
    heading = outcomes[0].group[0].upper() + outcomes[0].group[1:]
    heading += f" with {nodes} nodes" if nodes != NODES else ""
    write_page(read_page() | {heading: [row(outcome) for outcome in outcomes]})


def write_line(line: Line) -> None:
    """Put one line of the groups gradient and byte-lm in the place of its earlier one, or below the others."""
    heading = bytelm.HEADING if isinstance(line.found[0].setting, bytelm.ByteSetting) else "Gradient"
    tables = read_page()
    rows = tables.get(heading, [])
    place = next((place for place, old in enumerate(rows) if old.startswith(line.key)), len(rows))
    write_page(tables | {heading: [*rows[:place], line.row(), *rows[place + 1 :]]})


def read_page() -> dict[str, list[str]]:
    """The lines of each table of the page, by its heading."""
    sections = PAGE.read_text().split("\n## ")[1:] if PAGE.exists() else []
    lines = {section.splitlines()[0]: section.splitlines() for section in sections}
    return {heading: [line for line in each if line.startswith("| ")][1:] for heading, each in lines.items()}


def write_page(tables: dict[str, list[str]]) -> None:
    order = sorted(tables, key=lambda heading: (list(EXPLAINED).index(base(heading)), heading))
    counts, sections = [], []
    for heading in order:
        rows, columns = tables[heading], gradient.HEADER if heading in MEASURED else COLUMNS
        missed = sum("| MISSED: " in row for row in rows)
        anchor = heading.lower().replace(" ", "-").replace(",", "").replace("'", "")
        counts.append(f"| [{heading}](#{anchor}) | {len(rows)} | {missed} |")
        lines = [columns, "|---" * (columns.count("|") - 1) + "|", *rows]
        sections.append(f"## {heading}\n{EXPLAINED.get(heading, LARGER)}\n" + "\n".join(lines) + "\n")
    PAGE.write_text("\n".join([INTRODUCTION + "\n".join(counts) + "\n", *sections]))


def base(heading: str) -> str:
    """The group's heading without the number of nodes."""
    return heading.split(" with ")[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="all attacks in full; writes docs/attacks.md")
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(GROUPS)}; all without one")
    parser.add_argument("--nodes", type=int, default=NODES, metavar="N", help=f"of simulated swarms, {NODES} to 26")
    parser.add_argument("--rounds", type=int, nargs="+", default=gradient.HORIZONS, help="of the group gradient")
    parser.add_argument(
        "--lies", nargs="+", default=(), metavar="WORD", help="attacks of that group with it in the name"
    )
    given = parser.parse_args()
    sys.exit(trio.run(main, given.groups, Chosen(given.nodes, given.rounds, given.lies)))
