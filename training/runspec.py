"""The RunSpec: what a run trains and how, and the run id that follows from it.

    swarmnode config check examples/byte-lm.toml

A run is a TOML file with the tables below; every key has a default except the name. The run id is the sha-256 of the
canonical encoding of the *resolved* values, so a spec that came from a peer is checked by hashing it. Who creates a run
draws its nonce: two creators have two runs, and two files that mean the same are the same run only where they name the
same nonce. A new key, or another default, raises SCHEMA.

No RunSpec contains "auto": it is replaced, when one is made, by what it means beside the other values.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, get_type_hints

import msgpack

from swarmnode.training.options import SettingError, as_toml, describe, option, parse_section, read_toml
from swarmnode.training.rl.section import USUAL, RolloutsSection, wrong_in

SCHEMA = 4  # 2: [trust] validators, which were electors; 3: models of other shapes, and tokens; 4: all keys till then
MAX_ENCODED_SPEC = 64 << 10  # bytes; a spec from a peer is refused above this
CHECKABLE_CODECS = ("fp32", "fp16", "bf16", "int8")  # of btard
LAST_RATE = 0.05  # share of the learning rates at the end of a schedule, and for whoever goes on after it
DECAY_SHARE = 0.2  # of the steps, at the end of wsd (Hägele et al. 2405.18392)
GROWTH = 0.03  # of the steps done: H, where it grows
REACH = 5e-4  # of a step of `seed`, at the most: some times what trains well, so that mistakes are told
LOSS_EVERY = 10  # steps, or more: the loss of 32 sequences takes as long as some three steps
NOBODY = "none"  # as a run's owner
FILLED_IN = ("([0-9a-f]{64})?", "64 lower case hex digits; leave it out, it is filled in when the run is created")
BASE_TASK = "hf-lm"  # the built-in task that begins from a base model
ROLLOUT_TASKS = ("digits-rl", "rollouts")  # built-in tasks that are learned from rollouts
BYTES_UNIT = "bits per byte"
LOSS_UNITS = {"byte-lm": BYTES_UNIT, "gpt": BYTES_UNIT, "hf-lm": BYTES_UNIT, "image": "bits per picture"}
BUILT_IN_TASKS = (*LOSS_UNITS, *ROLLOUT_TASKS)


# -- the tables of a run file: their keys, with what each means, its default, its unit and what it may be


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
        False, "keep the run out of the catalogue (swarmnode discover): members then do not list it"
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
        "sha-256 of a text that the creator keeps back and publishes at the end, so that all can measure the loss on "
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
    rounds: int = option(0, "length of the run, over which cosine or wsd are laid", unit="rounds", between=(0, 10**7))
    precision: str = option(
        "fp32",
        "what models compute in: fp32, or bf16, by autocast with parameters, gradients and moments in float32",
        choices=("fp32", "bf16"),
    )
    checkpointing: bool = option(
        False, "compute activations anew in the backward pass instead of keeping them: less memory, a third more time"
    )
    weight_decay: float = option(0.1, "decoupled weight decay", between=(0, 10))
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

    def longer_after(self, round: int) -> float:
        """How many times as many steps as this round the next one has."""
        return self.steps_in(round + 1) / self.steps_in(round)

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
        "work in the key of who takes part: bits at the front of its twice hashed public key that are zero; each "
        "doubles what an identity costs. 0 asks for none; peers that the run names need none (swarmnode id --mine)",
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


# -- the run


@dataclass(frozen=True)
class RunSpec:
    """One training job. Immutable; two specs with equal `run_id` are the same run on every machine."""

    run: RunSection
    task: TaskSection = TaskSection()
    data: DataSection = DataSection()
    model: ModelSection = ModelSection()
    inner: InnerSection = InnerSection()
    outer: OuterSection = OuterSection()
    exchange: ExchangeSection = ExchangeSection()
    trust: TrustSection = TrustSection()
    rollouts: RolloutsSection = USUAL

    def __post_init__(self) -> None:
        method, codec = self.exchange.method, self.exchange.codec
        if method == "auto":
            method = "open" if self.run.trust == "open" else "diloco"
            method = "sapo" if self.task.name in ROLLOUT_TASKS else method
        muon = self.inner.optimizer == "muon"
        if codec == "auto" and method in ("async", "diloco", "gossip", "open"):
            codec = "sign" if muon else "topk" if method == "open" else "int8"
        elif codec == "auto":
            codec = {"demo": "topk", "lowrank": "int4", "streaming": "e3m0"}.get(method, "int8")
        if self.inner.interval == "auto":
            interval = "growing" if muon else "fixed"
            object.__setattr__(self, "inner", dataclasses.replace(self.inner, interval=interval))
        object.__setattr__(self, "exchange", dataclasses.replace(self.exchange, method=method, codec=codec))

    @property
    def run_id(self) -> str:
        """sha-256 of `encode(self)`, 64 hex digits."""
        return hashlib.sha256(encode(self)).hexdigest()

    @property
    def loss_unit(self) -> str:
        """What is measured: the reward, or what a held-out loss is counted in, as far as the task is a built-in one."""
        return LOSS_UNITS.get(self.task.name, "in the task's unit") if self.needs_data else "reward"

    @property
    def needs_data(self) -> bool:
        """Whether it trains on data, by gradients that are exchanged, and not on rollouts."""
        return self.exchange.method != "sapo"

    @property
    def one_state(self) -> bool:
        """Whether its members come to the same parameters, so that other state hashes of one round are a fault."""
        return self.exchange.method not in ("gossip", "sapo", "seed")

    @property
    def audited(self) -> bool:
        """Whether nodes repeat slices of one another's work (training/verify)."""
        return self.exchange.method == "open" and self.trust.audit_share > 0

    @property
    def owner(self) -> str:
        """The peer who may end the run or publish its successor; empty where nobody may."""
        named = self.run.owner or (self.trust.validators[0] if self.trust.validators else "")
        return "" if named == NOBODY else named

    def updated(self, **tables: Mapping[str, Any]) -> RunSpec:
        """The spec with other values in some tables, as in `spec.updated(run={"nonce": "07"}, inner={"lr": 0.5})`."""
        changed = {name: dataclasses.replace(getattr(self, name), **values) for name, values in tables.items()}
        return dataclasses.replace(self, **changed)

    def resolved(self, *, heldout_sha256: str, index: str, tokenizer: str = "") -> RunSpec:
        """The spec with what follows from its creator's corpus filled in."""
        return self.updated(task={"heldout_sha256": heldout_sha256}, data={"index": index, "tokenizer": tokenizer})

    def begun_by(self, creator: str) -> RunSpec:
        """The spec with its creator as the one validator, where its method has validators and it lists none."""
        if self.exchange.method != "open" or self.trust.validators:
            return self
        return self.updated(trust={"validators": (creator,)})


SECTIONS: dict[str, type[Any]] = get_type_hints(RunSpec)  # by the name of the table


def load_runspec(path: Path | str) -> RunSpec:
    """Read a RunSpec from a TOML file. Raises SettingError with the file, key, value and permitted range."""
    tables = read_toml(Path(path), hint="name a run file that exists; swarmnode init writes one")
    return parse_runspec(tables, source=str(path))


def parse_runspec(tables: Mapping[str, Any], *, source: str) -> RunSpec:
    """Build a RunSpec from parsed tables; `source` names their origin in messages.

    Raises one SettingError, a line for each thing that is wrong; what no single key can tell comes after the rest.
    """
    wrong = []
    sections: dict[str, Any] = {}
    for name, table in tables.items():
        if name not in SECTIONS:
            wrong.append(f"{source}: unknown table [{name}]; known tables: {', '.join(SECTIONS)}")
        elif not isinstance(table, Mapping):
            wrong.append(f"{source}: {name} = {table!r} is not a table; write [{name}] and its keys below it")
            sections[name] = None
    for name in [name for name in SECTIONS if name not in sections]:
        try:
            sections[name] = parse_section(SECTIONS[name], tables.get(name, {}), where=f"{source} [{name}]")
        except SettingError as error:
            wrong.append(str(error))
    if not wrong:
        spec = RunSpec(**sections)
        wrong = [f"{source} {each}" for each in _check_together(spec)]
    if wrong:
        raise SettingError("\n".join(wrong))
    return spec


def _check_together(spec: RunSpec) -> Iterator[str]:
    """What no single key can tell, a text for each mistake, which begins with the name of the table."""
    if bool(spec.run.parent) != bool(spec.run.parent_state):
        yield (
            f"[run]: parent = {spec.run.parent!r} and parent_state = {spec.run.parent_state!r} belong "
            "together; swarmnode successor publish fills them in"
        )
    if spec.run.weights and (spec.run.parent or not spec.needs_data):
        yield (
            "[run]: weights has no meaning in a run that continues another one, or that is learned from "
            "rollouts; leave it out"
        )
    if spec.model.width % (2 * spec.model.heads):
        yield (
            f"[model]: width = {spec.model.width} is not a multiple of twice heads = {spec.model.heads}; "
            "each head takes an equal part of the width, in pairs of channels that turn with the position"
        )
    if spec.exchange.deadline_floor > spec.exchange.deadline_ceiling:
        yield (
            f"[exchange]: deadline_floor = {spec.exchange.deadline_floor:g} s is above "
            f"deadline_ceiling = {spec.exchange.deadline_ceiling:g} s; lower the floor or raise the ceiling"
        )
    yield from _check_inner(spec)
    yield from _check_base(spec)
    yield from _check_rollouts(spec)
    if spec.exchange.method == "btard" and spec.exchange.codec not in CHECKABLE_CODECS:
        yield (
            f"[exchange]: codec = {spec.exchange.codec!r} is too coarse for method = 'btard', whose members "
            f"check what others rounded; use {', '.join(CHECKABLE_CODECS)}, or leave codec out"
        )
    if spec.exchange.codec == "sign3" and spec.exchange.method != "open":
        yield (
            "[exchange]: codec = 'sign3' sends another third of the model in each round, which only method = "
            f"'open' does, not {spec.exchange.method!r}: two thirds would never be sent; use sign, or leave codec out"
        )
    if spec.run.trust == "open" and spec.exchange.method not in ("open", "sapo"):
        yield (
            f"[exchange]: method = {spec.exchange.method!r} checks nobody's work, and [run] trust = 'open' "
            "lets anybody take part; leave method out, or write trust = 'known' and list [run] members"
        )
    if (spec.exchange.method == "demo") != (spec.inner.optimizer == "sgd"):
        yield (
            f"[inner]: optimizer = {spec.inner.optimizer!r} does not fit [exchange] method = "
            f"{spec.exchange.method!r}: demo is for sgd, as a rule with steps = 1, and sgd for demo"
        )
    yield from _check_overlap(spec)
    yield from _check_trust(spec)


def _check_overlap(spec: RunSpec) -> Iterator[str]:
    exchange, usual = spec.exchange, ExchangeSection()
    meant: dict[str, tuple[str, ...]] = dict.fromkeys(("fragments", "alpha", "eager"), ("streaming",))
    meant |= {"tau": ("streaming", "lowrank"), "rank": ("lowrank",)}
    meant |= {"alpha": ("streaming with eager = false",)} if exchange.eager else {}
    for key, methods in meant.items():
        if exchange.method not in methods and getattr(exchange, key) != getattr(usual, key):
            yield (
                f"[exchange]: {key} = {as_toml(getattr(exchange, key))} has no meaning with method = "
                f"{exchange.method!r}, only with {' and '.join(methods)}; leave it out"
            )


def _check_inner(spec: RunSpec) -> Iterator[str]:
    inner = spec.inner
    if (inner.schedule != "constant") != bool(inner.rounds):
        yield (
            f"[inner]: schedule = {inner.schedule!r} does not fit rounds = {inner.rounds}: cosine and wsd are "
            "laid over the rounds of the run, and constant over none; write both or neither"
        )
    if inner.rounds and inner.warmup >= inner.steps_before(inner.rounds):
        yield f"[inner]: warmup = {inner.warmup} steps is as long as all {inner.rounds} rounds; shorten it"
    if inner.population and (inner.population == 1 or spec.exchange.method != "diloco"):
        yield (
            f"[inner]: population = {inner.population} does not fit method = {spec.exchange.method!r}: "
            "members try rates of their own for 2 rounds or more, and only by diloco, where nobody repeats others' "
            "steps; leave it out, or write 2 or more"
        )
    if spec.exchange.method == "seed" and not 0 < inner.lr * inner.clip <= REACH:
        yield (
            f"[inner]: lr = {inner.lr:g} and clip = {inner.clip:g} do not suit method = 'seed': a step moves "
            f"parameters by up to lr * clip, which must be above 0 and at most {REACH:g}; try lr = 1e-4 and clip = 2"
        )
    if inner.precision == "bf16" and spec.audited:
        yield (
            "[inner]: precision = 'bf16' rounds so much that honest machines end too far apart for audits to "
            "tell a lie; write fp32, or [trust] audit_share = 0"
        )


def _check_base(spec: RunSpec) -> Iterator[str]:
    """A model is of its own shape or begins from a base, and then other keys of [model] have a meaning."""
    model, usual = spec.model, ModelSection()
    if bool(model.base) != (spec.task.name == BASE_TASK):
        yield (
            f"[model]: base = {model.base!r} does not fit [task] name = {spec.task.name!r}: the task "
            f"{BASE_TASK} begins from a base, and no other does"
        )
    keys = {"base", "base_sha256", "lora_rank"} | ({"lora_alpha"} if model.lora_rank or not model.base else set())
    meant = keys | {"context"} if model.base else set(describe(ModelSection)) - keys
    for key in describe(ModelSection):
        if key not in meant and getattr(model, key) != getattr(usual, key):
            yield (
                f"[model]: {key} = {getattr(model, key)!r} has no meaning beside base = {model.base!r} and "
                f"lora_rank = {model.lora_rank}; leave it out"
            )


def _check_rollouts(spec: RunSpec) -> Iterator[str]:
    rollouts, method = spec.rollouts, spec.exchange.method
    if (method == "sapo") != (spec.task.name in ROLLOUT_TASKS):
        yield (
            f"[exchange]: method = {method!r} does not fit [task] name = {spec.task.name!r}; sapo is for "
            f"tasks of rollouts ({', '.join(ROLLOUT_TASKS)}), and they for it; leave method out. A task of your own is "
            "none of these: it is learned from batches (docs/tasks.md)"
        )
    if spec.task.name == "digits-rl" and rollouts.task != "digits":
        yield f"[rollouts]: task = {rollouts.task!r} is not digits; write [task] name = 'rollouts'"
    if rollouts != USUAL and method != "sapo":
        yield f"[rollouts]: has no meaning with [exchange] method = {method!r}; leave it out"
    yield from wrong_in(rollouts, "[rollouts]")


def _check_trust(spec: RunSpec) -> Iterator[str]:
    trust = spec.trust
    twice = sorted(peer for peer, count in Counter(trust.validators).items() if count > 1)
    if twice:
        yield f"[trust]: validators names {', '.join(twice)} more than once; name each peer once"
    strangers = sorted(set(trust.validators).difference(spec.run.members)) if spec.run.members else []
    if strangers:
        yield (
            f"[trust]: validators names {', '.join(strangers)}, not among [run] members; who judges must be "
            "admitted, so add them there or leave them out here"
        )
    if trust.shortest_window > trust.longest_window:
        yield (
            f"[trust]: shortest_window = {trust.shortest_window:g} s is above longest_window = "
            f"{trust.longest_window:g} s; lower the first or raise the second"
        )
    if trust.identity_bits and spec.run.members:
        yield (
            f"[trust]: identity_bits = {trust.identity_bits} has no meaning beside [run] members, who need no "
            "work, while nobody else is admitted; leave one of the two out"
        )
    by_rollouts = spec.exchange.method == "sapo" and trust == TrustSection(identity_bits=trust.identity_bits)
    if trust != TrustSection() and spec.exchange.method != "open" and not by_rollouts:
        yield (
            f"[trust]: has no meaning with [exchange] method = {spec.exchange.method!r}; leave the table out, "
            "or write [run] trust = 'open'"
        )


def encode(spec: RunSpec) -> bytes:
    """Canonical encoding: msgpack with sorted keys, floats as float64, `{schema: SCHEMA, table: {key: value}}`."""
    tables: dict[str, Any] = {"schema": SCHEMA}
    for name, section in SECTIONS.items():
        values = getattr(spec, name)
        tables[name] = {key: getattr(values, key) for key in sorted(describe(section))}
    packed: bytes = msgpack.packb(dict(sorted(tables.items())), use_single_float=False)
    return packed


def decode(packed: bytes, *, expected_run_id: str | None = None) -> RunSpec:
    """A RunSpec that came from a peer or a file of ours.

    Raises SettingError where it is too large, malformed, of a newer schema, or does not hash to `expected_run_id`.
    """
    if len(packed) > MAX_ENCODED_SPEC:
        raise SettingError(f"run specification of {len(packed)} bytes refused; at most {MAX_ENCODED_SPEC}")
    if expected_run_id is not None and hashlib.sha256(packed).hexdigest() != expected_run_id:
        raise SettingError(
            f"run specification does not hash to {expected_run_id[:12]}…: it is another run's, or damaged"
        )
    try:
        tables = msgpack.unpackb(packed, strict_map_key=True, max_array_len=4096, max_map_len=64, max_ext_len=0)
    except (ValueError, msgpack.UnpackException) as error:
        raise SettingError(f"run specification is malformed: {error}") from error
    schema = tables.pop("schema", None) if isinstance(tables, dict) else None
    if schema in range(SCHEMA):
        raise SettingError(
            f"run specification has schema {schema}, of an older swarmnode; this one reads schema {SCHEMA}: begin a "
            "new run from the run file, or stay with the older version"
        )
    if schema != SCHEMA:
        raise SettingError(f"run specification has another schema than {SCHEMA}; update swarmnode to join this run")
    spec = parse_runspec(tables, source="run specification from a peer")
    if encode(spec) != packed:
        raise SettingError("run specification is not in canonical form; its run id would differ between nodes")
    return spec


def to_toml(spec: RunSpec) -> str:
    """The spec as a TOML file that loads to an equal one."""
    lines: list[str] = []
    for name, section in SECTIONS.items():
        values = getattr(spec, name)
        lines += [f"[{name}]", *(f"{key} = {as_toml(getattr(values, key))}" for key in describe(section)), ""]
    return "\n".join(lines)
