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
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

import msgpack

from swarmnode.training.options import SettingError, as_toml, describe, parse_section, read_toml
from swarmnode.training.rl.section import USUAL, RolloutsSection, wrong_in
from swarmnode.training.sections import (
    DataSection,
    ExchangeSection,
    InnerSection,
    ModelSection,
    OuterSection,
    RunSection,
    TaskSection,
    TrustSection,
)

SCHEMA = 6  # 2: validators, which were electors; 3: other models, and tokens; 4: all keys till then; 5: eps; 6: no push
MAX_ENCODED_SPEC = 64 << 10  # bytes; a spec from a peer is refused above this
CHECKABLE_CODECS = ("fp32", "fp16", "bf16", "int8")  # of btard
REACH = 5e-4  # of a step of `seed`, at the most: some times what trains well, so that mistakes are told
NOBODY = "none"  # as a run's owner
BASE_TASK = "hf-lm"  # the built-in task that begins from a base model
BYTES_UNIT, REWARD = "bits per byte", "reward"
# By name: the class, imported when a run asks for one, since all of them bring torch; and what success is counted in.
BUILT_IN = {
    "byte-lm": ("swarmnode.training.byte_lm:ByteLM", BYTES_UNIT),
    "gpt": ("swarmnode.training.byte_lm:ByteLM", BYTES_UNIT),
    BASE_TASK: ("swarmnode.training.hf_lm:HfLM", BYTES_UNIT),
    "image": ("swarmnode.training.image:DigitImages", "bits per picture"),
    "digits-rl": ("swarmnode.training.rl.trainee:Trainee", REWARD),
    "rollouts": ("swarmnode.training.rl.trainee:Trainee", REWARD),
}
TEXT_TASKS = tuple(name for name, (_, unit) in BUILT_IN.items() if unit == BYTES_UNIT)  # whose runs publish a corpus
ROLLOUT_TASKS = tuple(name for name, (_, unit) in BUILT_IN.items() if unit == REWARD)  # learned from rollouts
# By name: the run files that come with the program, of runs that need nothing of who begins them.
BUILT_IN_RUNS = {path.stem: path for path in sorted((Path(__file__).parent / "runs").glob("*.toml"))}


@dataclass(frozen=True)
class RunSpec:
    """One training job. Immutable; two specs with equal `run_id` are the same run on every machine."""

    run: RunSection
    task: TaskSection = field(default_factory=TaskSection)
    data: DataSection = field(default_factory=DataSection)
    model: ModelSection = field(default_factory=ModelSection)
    inner: InnerSection = field(default_factory=InnerSection)
    outer: OuterSection = field(default_factory=OuterSection)
    exchange: ExchangeSection = field(default_factory=ExchangeSection)
    trust: TrustSection = field(default_factory=TrustSection)
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

    @cached_property
    def loss_unit(self) -> str:
        """What is measured: the reward, or what a held-out loss is counted in, as far as the task is a built-in one."""
        return BUILT_IN.get(self.task.name, ("", "in the task's unit"))[1]

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
    yield from wrong_in(rollouts)


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
    return msgpack.packb(dict(sorted(tables.items())), use_single_float=False)


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
        raise SettingError(f"run specification is malformed: {error}; ask whoever made the run") from error
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
