"""Who samples for another's policy and lies: what a trainer refuses of it, with its own quotas, questions and audits.

A batch is eight groups of eight answers of one sampler, signed, and given to a trainer that has the defaults of a run
file: it looks at a quarter of the groups. A batch is rejected where none of its groups is learned from. Beside each
liar an honest sampler gives a batch. The undefended trainer learns from whatever is signed and well-formed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache

import torch
from adversaries.samplers import Batch, Honest, SamplerLie
from rolloutnodes import RUN
from sentweights import as_sent

from swarmnode.protocols.methods.rollouts.messages import seal
from swarmnode.protocols.methods.rollouts.samplers import Samplers
from swarmnode.testing.simnet import SimNetwork, SimWorld
from swarmnode.training.rl.groups import RefusedGroup, RolloutGroup, score
from swarmnode.training.rl.learner import Learner, Settings
from swarmnode.training.rl.policies import PolicySpec, build, parameter_hash
from swarmnode.training.rl.proofs import RolloutAudit
from swarmnode.training.rl.section import RolloutsSection
from swarmnode.training.rl.tasks import TaskRef, assigned_task, tasks_of_run, well_formed

BATCHES = 100
GROUPS = 8  # of a batch
UPDATES = 24  # of the policy before the lie
REJECTED, HONEST_LOST = 0.99, 0.01
DEFAULTS = RolloutsSection()


@dataclass(frozen=True)
class Damage:
    """Of batches: how many of the liar's were rejected, and of the honest sampler's beside it."""

    batches: int
    rejected: int
    learned: int  # groups of the liar's that were learned from
    honest_lost: int  # groups
    naive: float  # share of the liar's groups that an undefended trainer learns from

    def __str__(self) -> str:
        lost = self.honest_lost / (self.batches * GROUPS)
        return f"{self.rejected / self.batches:.1%} rejected, {lost:.1%} of honest"

    def failures(self) -> tuple[str, ...]:
        broken = []
        if self.rejected < REJECTED * self.batches:
            broken.append(f"{self.rejected} of {self.batches} batches rejected, at least {REJECTED:.0%} promised")
        if self.honest_lost > HONEST_LOST * self.batches * GROUPS:
            broken.append(f"{self.honest_lost} honest groups refused, at most {HONEST_LOST:.0%} promised")
        return tuple(broken)


@cache
def versions() -> list[torch.nn.Module]:
    """The policy before each update that taught it something, and after the last."""
    learner = Learner("trainer", build(PolicySpec(layers=1, width=48, heads=4), seed=1), Settings(), seed=1)
    learner.warm_up(well_formed)
    seen = [as_sent(copy.deepcopy(learner.policy))]
    while len(seen) <= UPDATES:
        if learner.learn(learner.sample(), []).informative:
            seen.append(as_sent(copy.deepcopy(learner.policy)))
    return seen


def damage(lie: SamplerLie, batches: int = BATCHES) -> Damage:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = [_batch(lie, seed) for seed in range(batches)]
    finally:
        torch.set_num_threads(threads)
    return Damage(
        batches,
        sum(learned == 0 for learned, _, _ in found),
        sum(learned for learned, _, _ in found),
        sum(lost for _, lost, _ in found),
        sum(naive for _, _, naive in found) / batches / GROUPS,
    )


def _batch(lie: SamplerLie, seed: int) -> tuple[int, int, int]:
    """Groups of the liar's learned from, honest ones refused, and what an undefended trainer takes of the liar's."""
    world = SimWorld()
    trainer, liar, honest = (world.node(name) for name in ("trainer", f"liar {seed}", f"honest {seed}"))
    newest, policy = len(versions()) - 1, copy.deepcopy(versions()[-1])
    samplers = Samplers(trainer.me, run_id=RUN, settings=DEFAULTS)
    audit = RolloutAudit(policy, share=DEFAULTS.audit, seed=seed)
    for version in range(newest - DEFAULTS.staleness, newest + 1):
        policy.load_state_dict(versions()[version].state_dict())
        name = parameter_hash(policy)
        audit.remember(name)
        samplers.know(name, version)
    first = 1000 * (seed + 1)
    others = Honest().groups(Batch(versions(), name, honest.me, _tasks(honest, first, name, newest), []))
    lies = lie.groups(Batch(versions(), name, liar.me, _tasks(liar, first, name, newest), others))
    for by, groups in ((honest, others), (liar, lies)):
        for number, group in enumerate(groups):
            signed = seal(
                group, run_id=RUN, author=by.me, counter=first + number, made_at=1, sign=by.sign, trainer=trainer.me
            )
            samplers.insert(signed)
    drawn = samplers.drawn(DEFAULTS.sampled, version=newest)
    verdict = audit.check([score(signed.author, signed.group) for signed in drawn])
    samplers.settle(drawn, caught=verdict.caught, checked={})
    learned = [scored.author for scored in verdict.passed]
    return learned.count(liar.me), len(others) - learned.count(honest.me), sum(map(_is_well_formed, lies))


def _tasks(sampler: SimNetwork, first: int, policy: str, version: int) -> list[TaskRef]:
    counters = range(first, first + GROUPS)
    return [
        assigned_task(RUN, sampler.me, each, version=version, policy=policy, tasks=tasks_of_run(RolloutsSection()))
        for each in counters
    ]


def _is_well_formed(group: RolloutGroup) -> bool:
    try:
        score("", group)
    except RefusedGroup:
        return False
    return True
