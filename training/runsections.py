"""The tables of a run file: their keys, with what each means, its default, its unit and what it may be.

    option(0.25, "what one peer may have of a batch", ...)          # a key; `runspec` reads and checks the tables

What holds between the keys is in `runspec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from swarmnode.training.options import option


@dataclass(frozen=True)
class RunSection:
    name: str = option(help="name of the run: lower case letters, digits, '.', '_' and '-'")
    seed: int = option(0, "seed of the initial parameters and of all sampling", minimum=0, maximum=2**53)
    trust: str = option(
        "known",
        "known: all who take part are believed; open: anybody may, and electors check what each one sends",
        choices=("known", "open"),
    )
    members: tuple[str, ...] = option((), "peer ids that may take part; empty admits anyone who holds the run id")
    owner: str = option(
        "",
        "peer id of who may end the run or publish its successor; empty: the first of [trust] electors, else nobody",
        since=2,
    )
    parent: str = option("", "id of the run that this one continues; filled in by swarmnode successor publish", since=2)
    parent_state: str = option("", "hash of the parent's state that this run begins from; filled in likewise", since=2)
    nonce: str = option(
        "",
        "up to 64 lower case hex digits that tell this run from others with the same values; empty: drawn when the run "
        "is created, so that who else runs the file has another run",
        since=2,
    )


@dataclass(frozen=True)
class TaskSection:
    name: str = option("byte-lm", "what is learned: a built-in task or, with --task, the name of a local one")
    corpus: str = option("python-stdlib", "label of the corpus, for people; the creator's --corpus says where it is")
    heldout_sha256: str = option("", "hash of the held-out text; filled in when the run is created")


@dataclass(frozen=True)
class DataSection:
    source: str = option(
        "shards",
        "shards: all train on the creator's corpus, which members fetch from one another; local: each node brings its "
        "own text, and only the held-out part is the creator's",
        choices=("shards", "local"),
    )
    index: str = option("", "id of the shard that lists the others; filled in when the run is created")


@dataclass(frozen=True)
class ModelSection:
    layers: int = option(4, "transformer blocks", minimum=1, maximum=128)
    heads: int = option(4, "attention heads", minimum=1, maximum=128)
    width: int = option(128, "width of the residual stream", minimum=8, maximum=16384)
    context: int = option(128, "length of a training sequence", unit="tokens", minimum=8, maximum=65536)


@dataclass(frozen=True)
class InnerSection:
    optimizer: str = option("adamw", "inner optimizer", choices=("adamw",))
    lr: float = option(1e-3, "inner learning rate", minimum=1e-8, maximum=10)
    warmup: int = option(
        20, "inner steps of linear warm-up at the start of a run", unit="steps", minimum=0, maximum=10**6
    )
    weight_decay: float = option(0.1, "decoupled weight decay", minimum=0, maximum=10)
    clip: float = option(
        1.0, "gradient norm above which gradients are scaled down; 0 turns it off", minimum=0, maximum=1e6
    )
    batch: int = option(4, "sequences in an inner step", unit="sequences", minimum=1, maximum=65536)
    steps: int = option(80, "inner steps in a round (H)", unit="steps", minimum=1, maximum=10**6)


@dataclass(frozen=True)
class OuterSection:
    lr: float = option(1.0, "outer learning rate", minimum=0, maximum=10)
    momentum: float = option(0.0, "outer Nesterov momentum", minimum=0, maximum=0.9999)


@dataclass(frozen=True)
class ExchangeSection:
    method: str = option(
        "auto",
        "how nodes exchange what they learned; auto is sapo where the task is one of rollouts (digits-rl), open where "
        "trust is open, else diloco",
        choices=("auto", "btard", "diloco", "open", "sapo"),
    )
    codec: str = option(
        "auto",
        "encoding of pseudo-gradients on the wire; auto is topk for open, int8 for diloco. In open, sign3 with "
        "outer lr 0.7 and momentum 0.8 comes nearer to synchronous training, where a run goes on from a trained state",
        choices=("auto", "fp32", "fp16", "bf16", "int8", "int4", "e3m0", "sign", "sign3", "topk"),
    )
    group_size: int = option(
        16,
        "members that exchange parts with one another in a round of diloco; more of them make several groups, drawn "
        "anew for each round, whose sums are added up to one mean",
        unit="nodes",
        minimum=1,
        maximum=256,
    )
    weight_cap: float = option(
        2.0, "weight of a member at the most, as a multiple of the median member's", minimum=1, maximum=1000
    )
    deadline_floor: float = option(
        5.0, "shortest time given to a phase of the exchange", unit="s", minimum=0.1, maximum=3600
    )
    deadline_ceiling: float = option(
        120.0, "longest time given to a phase of the exchange", unit="s", minimum=0.1, maximum=86400
    )


@dataclass(frozen=True)
class TrustSection:
    """Who judges in an open run, and by what measure. What is no option here is fixed by `protocols/chain`."""

    electors: tuple[str, ...] = option(
        (),
        "peer ids of those who judge from the first round on; empty in the file of a run that begins: its creator",
        since=2,
    )
    identity_bits: int = option(
        0,
        "work in the key of who takes part: bits at the front of its twice hashed public key that are zero; each "
        "doubles what an identity costs. 0 asks for none; peers that the run names need none (swarmnode id --mine)",
        unit="bits",
        minimum=0,
        maximum=40,
        since=2,
    )
    participants: int = option(
        64,
        "contributions a round is meant to have; of more nodes a sample takes part in each round",
        unit="nodes",
        minimum=2,
        maximum=96,  # commits that a judge's cut has room for
        since=2,
    )
    gain_floor: float = option(
        0.0,
        "held-out loss that an eighth of a contribution must take off, beyond the noise, to count",
        unit="bits per byte",
        minimum=0,
        maximum=8,
        since=2,
    )
    revert_above: float = option(
        0.05,
        "worsening of the held-out loss by a round from which on the round is undone",
        unit="bits per byte",
        minimum=0,
        maximum=8,
        since=2,
    )
    shortest_window: float = option(
        1.0, "time for training in a round at the least", unit="s", minimum=0.1, maximum=86400, since=2
    )
    longest_window: float = option(
        86400.0, "time for training in a round at the most", unit="s", minimum=0.1, maximum=86400, since=2
    )
    audit_share: float = option(
        0.0,
        "part of a node's training time that it spends on repeating slices of others' work; 0: nobody records theirs, "
        "and nobody is audited",
        minimum=0,
        maximum=0.5,
        since=2,
    )


@dataclass(frozen=True)
class RolloutsSection:
    """How policies learn from rollouts (SAPO, 2509.08721). Each node may choose a policy of its own."""

    policy: str = option(
        "gpt:2x48",
        "policy of a node that names no other: gpt or gru, layers x width; or hf:MODEL, a model of transformers that "
        "is on the machine already (hf-full:MODEL trains all of its parameters)",
        since=2,
    )
    answers: int = option(
        8, "answers to a question, which are compared with one another (G)", minimum=2, maximum=64, since=2
    )
    batch: int = option(8, "questions with their answers in an update (I + J)", minimum=1, maximum=256, since=2)
    external: int = option(
        4, "of these, how many are others' rollouts where that is not adaptive (J)", minimum=0, maximum=256, since=2
    )
    adaptive: bool = option(
        True,
        "ask itself a whole batch, and put others' rollouts in the places of own ones that teach nothing; none where "
        "they hurt on held-out questions",
        since=2,
    )
    judge: str = option(
        "none",
        "what rewards are multiplied by: none; or task, what each question's own judge, which is part of this program, "
        "finds of the whole answer, so that text beside a right answer earns nothing",
        choices=("none", "task"),
        since=2,
    )
    share: float = option(0.25, "part of an update that one peer's rollouts may have", minimum=0, maximum=1, since=2)
    sampled: int = option(
        32,
        "groups in an update, at the most, that nodes which only sample wrote for the policy; they come on top",
        minimum=0,
        maximum=1024,
        since=2,
    )
    staleness: int = option(
        4,
        "updates that a policy may be ahead of the weights such groups were written with",
        minimum=0,
        maximum=64,
        since=2,
    )
    audit: float = option(
        0.25, "part of each sampling node's groups that are looked at, one at the least", minimum=0, maximum=1, since=2
    )
    weights: str = option(
        "pull",
        "how sampling nodes come to new weights: pull, they ask after each batch; push, they are told, and fetch them "
        "while they sample with those before",
        choices=("pull", "push"),
        since=2,
    )
    difficulty: int = option(5, "of the questions: the base of the digits", minimum=2, maximum=10, since=2)
    pace: float = option(
        1.0,
        "time of a round at the least: what others share meanwhile is learned from in the same round",
        unit="s",
        minimum=0,
        maximum=3600,
        since=2,
    )
    warm_up: int = option(
        120,
        "supervised steps before, which teach the form of an answer",
        unit="steps",
        minimum=0,
        maximum=10**5,
        since=2,
    )


SECTIONS: dict[str, type[Any]] = {
    "run": RunSection,
    "task": TaskSection,
    "data": DataSection,
    "model": ModelSection,
    "inner": InnerSection,
    "outer": OuterSection,
    "exchange": ExchangeSection,
    "trust": TrustSection,
    "rollouts": RolloutsSection,
}
