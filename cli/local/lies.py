"""The lies that a local swarm can show, by name. Nothing is imported here, so that a command line can list them."""

from __future__ import annotations

from dataclasses import dataclass

THROWAWAY = r"[a-z0-9._-]*-attacked-[0-9a-f]{8}"  # names of runs that are made for one local swarm
EXCHANGING = ("open", "diloco", "btard")  # methods in which pseudo-gradients are exchanged


@dataclass(frozen=True)
class Named:
    """One lie."""

    name: str
    told: str  # what it does, for a person
    methods: tuple[str, ...]  # exchange methods in whose runs it has a meaning


LIES = {
    lie.name: lie
    for lie in (
        Named("sign-flip", "offers the opposite of what it learned", EXCHANGING),
        Named("sign-flip-1000", "the same, a thousand times as large", EXCHANGING),
        Named("label-flip", "learns to predict the byte 255 - b where b follows", EXCHANGING),
        Named("noise", "offers noise as large as what it learned", EXCHANGING),
        Named("free-ride", "offers what the swarm did in the round before, as its own work", EXCHANGING),
        Named("slow-drift", "adds a quarter of a step in one direction, in every round the same", EXCHANGING),
        Named("nan", "offers bytes that decode to NaN", ("open",)),
        Named("copy", "offers what another has just revealed", ("open",)),
        Named("withhold", "commits to its work and never reveals it", ("open",)),
        Named("slander", "offers the opposite; as a judge it praises that and calls others' work missing", ("open",)),
        Named("inserted-text", "shares answers with something smuggled in, half of them gibberish", ("sapo",)),
        Named("forged-reward", "shares wrong answers and says that they are right", ("sapo",)),
        Named("overlong", "shares answers that are far too long, half of them gibberish", ("sapo",)),
    )
}
