"""The tables of a run file: their keys, with what each means, its default, its unit and what it may be.

`[rollouts]` is in `training/rl/section.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from swarmnode.training.options import option

LAST_RATE = 0.05  # share of the learning rates at the end of a schedule, and for whoever goes on after it
DECAY_SHARE = 0.2  # of the steps, at the end of wsd (Hägele et al. 2405.18392)
GROWTH = 0.03  # of the steps done: H, where it grows
LOSS_EVERY = 10  # steps, or more: the loss of 32 sequences takes as long as some three steps
FILLED_IN = ("([0-9a-f]{64})?", "64 lower case hex digits; leave it out, it is filled in when the run is created")


@dataclass(frozen=True)
class RunSection:
    name: str = option(
        help="name of the run: lower case letters, digits, '.', '_' and '-'",
        form=(
            "[a-z0-9][a-z0-9._-]{0,63}",
            "1 to 64 lower case letters, digits, '.', '_' or '-', starting with a letter or digit",
        ),
    )
    seed: int = option(0, "seed of the initial parameters and of all sampling", between=(0, 2**53))
    trust: str = option(
        "known",
        "known: all who take part are believed; open: anybody may, and validators check what each one sends",
        choices=("known", "open"),
    )
    members: tuple[str, ...] = option((), "peer ids that may take part; empty admits anyone who holds the run id")
    owner: str = option(
        "",
        "peer id of who may end the run or publish its successor; none: nobody; empty: the first of [trust] "
        "validators, else who creates the run, where its file names no nonce",
    )
    parent: str = option(
        "", "id of the run that this one continues; filled in by swarmnode successor publish", form=FILLED_IN
    )
    parent_state: str = option(
        "", "hash of the parent's state that this run begins from; filled in likewise", form=FILLED_IN
    )
    weights: str = option(
        "",
        "sha-256 of the safetensors file whose tensors this run begins from, in place of the seed's; filled in by "
        "swarmnode run --weights",
        form=FILLED_IN,
    )
    unlisted: bool = option(
        False, "keep the run out of the catalogue: no member lists it, and swarmnode discover does not show it"
    )
    nonce: str = option(
        "",
        "up to 64 lower case hex digits that tell this run from others with the same values; empty: drawn when the run "
        "is created, so that who else runs the file has another run",
        form=("[0-9a-f]{0,64}", "1 to 64 lower case hex digits, or leave it out: one is drawn when the run is created"),
    )


@dataclass(frozen=True)
class TaskSection:
    name: str = option("byte-lm", "what is learned: a built-in task or, with --task, the name of a local one")
    corpus: str = option("python-stdlib", "label of the corpus, for people; the creator's --corpus says where it is")
    heldout_sha256: str = option("", "hash of the held-out text; filled in when the run is created")
    code_sha256: str = option(
        "",
        "hash of the file that defines a local task, the same for all members; filled in when the run is created",
        form=FILLED_IN,
    )


@dataclass(frozen=True)
class DataSection:
    source: str = option(
        "shards",
        "shards: all train on the creator's corpus, which members fetch from one another; local: each node brings its "
        "own text, and only the held-out part is the creator's",
        choices=("shards", "local"),
    )
    index: str = option("", "id of the shard that lists the others; filled in when the run is created", form=FILLED_IN)
    vocabulary: int = option(
        256,
        "tokens: 256 trains on bytes; with more, the run's creator brings a tokenizer (--tokenizer) or trains one of "
        "this size on its corpus, or its corpus is tokens already",
        unit="tokens",
        between=(2, 1 << 20),
    )
    tokenizer: str = option(
        "",
        "id of the shard with the tokenizer; filled in when the run is created; empty where tokens are bytes, or came "
        "without a tokenizer",
        form=FILLED_IN,
    )
    sealed: str = option(
        "",
        "sha-256 of a secret test set: a text that the creator keeps back and publishes at the end, for the loss on "
        "what nobody trained on (swarmnode provenance verify --sealed); empty: none",
        form=("([0-9a-f]{64})?", "64 lower case hex digits, as sha256sum prints them for the file that you keep back"),
    )


@dataclass(frozen=True)
class ModelSection:
    layers: int = option(4, "transformer blocks", between=(1, 128))
    heads: int = option(4, "attention heads", between=(1, 128))
    width: int = option(128, "width of the residual stream", between=(8, 16384))
    context: int = option(128, "length of a training sequence", unit="tokens", between=(8, 65536))
    activation: str = option(
        "relu2",
        "between the matrices of an MLP: relu2 or swiglu, of about as many parameters",
        choices=("relu2", "swiglu"),
    )
    tied: bool = option(
        False, "whether one matrix embeds tokens and predicts them: fewer parameters where the vocabulary is large"
    )
    value_embeddings: bool = option(
        False, "whether tokens also give values to the attention of every other block: more parameters, no more time"
    )
    base: str = option(
        "",
        "of task hf-lm: the causal language model of transformers that training begins from, a folder or a name on the "
        "hub; of the keys above only context then has a meaning",
    )
    base_sha256: str = option(
        "", "hash of its weights and config.json, the same for all; filled in when the run is created", form=FILLED_IN
    )
    lora_rank: int = option(
        0,
        "rank of the adapters (LoRA) beside all linear layers of the base, which alone are trained and exchanged; 0 "
        "trains all of its parameters",
        between=(0, 4096),
    )
    lora_alpha: float = option(
        32.0, "scale of the adapters: they change a layer by lora_alpha / lora_rank B A", between=(1e-6, 1e6)
    )


@lru_cache(maxsize=64)
def _grown(most: int) -> tuple[int, ...]:
    """Where H grows: inner steps before each round, up to the first that has `most`."""
    begun = [0]
    while (steps := max(1, round(GROWTH * begun[-1]))) < most:
        begun.append(begun[-1] + steps)
    return tuple(begun)


@dataclass(frozen=True)
class InnerSection:
    optimizer: str = option(
        "adamw",
        "inner optimizer; muon updates the matrices of hidden layers by Muon and everything else by AdamW; sgd is for "
        "demo, which needs plain gradients and has the momentum itself",
        choices=("adamw", "muon", "sgd"),
    )
    lr: float = option(
        1e-3, "inner learning rate of AdamW, or of sgd: how far demo moves each parameter in a step", between=(1e-8, 10)
    )
    muon_lr: float = option(
        4e-3,
        "inner learning rate of Muon, whose steps are scaled to be as large as AdamW's of the same rate",
        between=(1e-8, 10),
    )
    warmup: int = option(20, "inner steps of linear warm-up at the start of a run", unit="steps", between=(0, 10**6))
    schedule: str = option(
        "constant",
        "learning rates after the warm-up: constant; cosine, which falls to a twentieth over `rounds`; or wsd, "
        "constant until a fifth of them is left, then falling as far in a straight line",
        choices=("constant", "cosine", "wsd"),
    )
    rounds: int = option(
        0, "rounds over which cosine or wsd falls; the run does not end there", unit="rounds", between=(0, 10**7)
    )
    precision: str = option(
        "fp32",
        "what models compute in: fp32, or bf16, by autocast with parameters, gradients and moments in float32",
        choices=("fp32", "bf16"),
    )
    checkpointing: bool = option(
        False, "compute activations anew in the backward pass instead of keeping them: less memory, a third more time"
    )
    weight_decay: float = option(0.1, "decoupled weight decay", between=(0, 10))
    eps: float = option(1e-8, "what AdamW adds to the root of its second moments", between=(1e-12, 1))
    clip: float = option(1.0, "gradient norm above which gradients are scaled down; 0 turns it off", between=(0, 1e6))
    batch: int = option(4, "sequences in an inner step", unit="sequences", between=(1, 65536))
    steps: int = option(80, "inner steps in a round (H), at the most", unit="steps", between=(1, 10**6))
    interval: str = option(
        "auto",
        "fixed: all rounds have `steps` inner steps; growing: each has 3 % of those of all rounds before, one at the "
        "least and `steps` at the most, as training apart costs most while a model learns fastest; "
        "auto is growing for muon, else fixed",
        choices=("auto", "fixed", "growing"),
    )
    population: int = option(
        0,
        "have each member of diloco try learning rates of its own, after so many rounds 0.8 or 1.25 times its last "
        "ones; the worst quarter takes over those of the best. A help where the run's rates are far too small, a harm "
        "where they are right. 0: all train by the run's rates",
        unit="rounds",
        between=(0, 10_000),
    )

    def steps_in(self, round: int) -> int:
        """Inner steps in this round (H); `steps` is what it comes to at the most."""
        return self.steps_before(round + 1) - self.steps_before(round)

    def steps_before(self, round: int) -> int:
        if self.interval != "growing":
            return round * self.steps
        begun = _grown(self.steps)
        return begun[round] if round < len(begun) else begun[-1] + (round - len(begun) + 1) * self.steps

    def measured_after(self, round: int) -> bool:
        """Whether the held-out loss is measured after this round, as measuring takes as long as some short rounds."""
        every = LOSS_EVERY if self.steps == 1 else min(LOSS_EVERY, self.steps)
        if (self.interval != "growing" and self.steps > 1) or not round:
            return True
        return self.steps_before(round + 1) // every > self.steps_before(round) // every

    def rate_at(self, round: int, step: int) -> float:
        """Share of the learning rates in this step: of these two alone, so that restarts and replays agree.

        A round may have more steps than it was meant to have, where others are waited for: they do not count.
        """
        done = self.steps_before(round) + min(step, self.steps_in(round))
        warmth = min(1.0, (done + 1) / max(1, self.warmup))
        if self.schedule == "constant":
            return warmth
        total = self.steps_before(self.rounds)
        left = min(1.0, max(0.0, (total - done) / max(1, total - self.warmup)))  # of the steps after the warm-up
        share = min(1.0, left / DECAY_SHARE) if self.schedule == "wsd" else (1 - math.cos(math.pi * left)) / 2
        return warmth * (LAST_RATE + (1 - LAST_RATE) * share)


@dataclass(frozen=True)
class OuterSection:
    lr: float = option(1.0, "outer learning rate", between=(0, 10))
    momentum: float = option(0.0, "outer Nesterov momentum", between=(0, 0.9999))


@dataclass(frozen=True)
class ExchangeSection:
    method: str = option(
        "auto",
        "how nodes exchange what they learned; auto is sapo where the task is one of rollouts (digits-rl), open where "
        "trust is open, else diloco",
        choices=("auto", "async", "btard", "demo", "diloco", "gossip", "lowrank", "open", "sapo", "seed", "streaming"),
    )
    codec: str = option(
        "auto",
        "encoding of pseudo-gradients on the wire; auto is e3m0 for streaming, int4 for lowrank, topk for demo, int8 "
        "for btard, else sign where the inner optimizer is muon, else topk for open and int8 for diloco",
        choices=("auto", "fp32", "fp16", "bf16", "int8", "int4", "e3m0", "sign", "sign3", "topk"),
    )
    group_size: int = option(
        16,
        "members that exchange parts with one another in a round of diloco; more of them make several groups, drawn "
        "anew for each round, whose sums are added up to one mean",
        unit="nodes",
        between=(1, 256),
    )
    weight_cap: float = option(
        2.0, "weight of a member at the most, as a multiple of the median member's", between=(1, 1000)
    )
    deadline_floor: float = option(5.0, "shortest time given to a phase of the exchange", unit="s", between=(0.1, 3600))
    deadline_ceiling: float = option(
        120.0, "longest time given to a phase of the exchange", unit="s", between=(0.1, 86400)
    )
    fragments: int = option(
        8,
        "parts of the model that streaming exchanges by turns, one in a round, so that each is exchanged every "
        "`fragments` rounds: layers at equal distances, and no more parts than there are layers",
        between=(1, 1024),
    )
    tau: int = option(
        5,
        "inner steps at the end of a round of streaming or lowrank that are taken while its exchange is on the wire: "
        "all but the first at the most; where it lasts longer, a node takes up to `steps` more",
        unit="steps",
        between=(0, 10**6),
    )
    alpha: float = option(
        0.5,
        "share of its own parameters that a node of streaming with eager = false keeps where a result arrives",
        between=(0, 1),
    )
    eager: bool = option(
        True,
        "whether a node of streaming takes its own part of a step at once, and only the others' when it arrives, "
        "instead of mixing by alpha",
    )
    rank: int = option(
        16,
        "columns of the two factors that lowrank sends for a matrix, at the most: fewer where they hold all but a "
        "hundredth; what would have no fewer elements is sent whole",
        between=(1, 4096),
    )


@dataclass(frozen=True)
class TrustSection:
    """Who judges in an open run, and by what measure. What is no option here is fixed by `protocols/chain`."""

    validators: tuple[str, ...] = option(
        (), "peer ids of those who judge from the first round on; empty in the file of a run that begins: its creator"
    )
    identity_bits: int = option(
        0,
        "proof of work that each member's key must have: swarmnode id --mine BITS makes such a key, in 2^BITS tries on "
        "average. 0: none is asked; peers that the run file names need none",
        unit="bits",
        between=(0, 40),
    )
    participants: int = option(
        64,
        "contributions a round is meant to have; of more nodes a sample takes part in each round",
        unit="nodes",
        between=(2, 96),  # commits that a judge's cut has room for
    )
    revert_above: float = option(
        0.05,
        "worsening of the held-out loss by a round from which on the round is undone",
        unit="bits per byte",
        between=(0, 8),
    )
    shortest_window: float = option(1.0, "time for training in a round at the least", unit="s", between=(0.1, 86400))
    longest_window: float = option(86400.0, "time for training in a round at the most", unit="s", between=(0.1, 86400))
    audit_share: float = option(
        0.03,
        "part of a node's training time that it spends on repeating slices of others' work; 0: nobody records theirs, "
        "and nobody is audited",
        between=(0, 0.5),
    )
