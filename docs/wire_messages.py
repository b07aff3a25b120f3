"""What nodes say to one another, read from the code for docs/messages.md: protocols, calls, records, signatures.

What is served is found in the source. A new call and its messages come onto the page by themselves; a new protocol,
kind of record, note, key of bulk or purpose of signatures ends this program with a KeyError until a table below has it.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import io
import re
import tokenize
import types
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from libp2p.host.ping import ID as PING
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify_push.identify_push import ID_PUSH as IDENTIFY_PUSH
from libp2p.kad_dht.common import PROTOCOL_ID as KADEMLIA
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX

from swarmnode.crdt.envelope import Domain
from swarmnode.crdt.kinds import DAY, KINDS, MAX_PER_AUTHOR, SECOND
from swarmnode.node.succession import Succession
from swarmnode.protocols.calls.frames import Frame
from swarmnode.protocols.catalogue import ListedRun
from swarmnode.protocols.chain import statements as chain
from swarmnode.protocols.methods.btard.statements import Statement
from swarmnode.protocols.methods.rollouts.messages import PackedGroup
from swarmnode.protocols.methods.rollouts.weights import Weights
from swarmnode.protocols.peers.hello import Hello
from swarmnode.protocols.reputation.attestation import Attestation
from swarmnode.protocols.transfer.bulk import BulkHeader, BulkWant
from swarmnode.protocols.transfer.shard_wire import Piece, ShardWant
from swarmnode.protocols.wire import MAX_BYTES, MAX_DEPTH, MAX_VALUES

ROOT = Path(__file__).parents[1]
OWN = "/swarmnode/"
SPECS = "https://github.com/libp2p/specs/blob/master"

# What protocols are for, and the messages of our own, or where others are specified.
PROTOCOLS: dict[str, tuple[str, tuple[type, ...] | str]] = {
    str(IDENTIFY): ("key, addresses, protocols and agent of a node", "identify/README.md"),
    str(IDENTIFY_PUSH): ("the same, when they changed", "identify/README.md"),
    str(PING): ("32 bytes that come back", "ping/ping.md"),
    str(KADEMLIA): ("who provides a key, who is near one; values are refused", "kad-dht/README.md"),
    "/libp2p/autonat/1.0.0": ("can you dial me?", "autonat/autonat-v1.md"),
    "/libp2p/circuit/relay/0.2.0/hop": ("asked of a relay: a place, a circuit", "relay/circuit-v2.md"),
    "/libp2p/circuit/relay/0.2.0/stop": ("from a relay: somebody comes", "relay/circuit-v2.md"),
    "/libp2p/dcutr": ("dial me now, as I dial you", "relay/DCUtR.md"),
    f"{OWN}hello": ("who speaks which version; the one without a version, so that it never changes", (Hello,)),
    f"{OWN}rpc/2": ("calls", (Frame,)),
    f"{OWN}bulk/3": ("buffers by key, which grow while they are fetched", (BulkWant, BulkHeader)),
    f"{OWN}shards/2": ("chunks of shards", (ShardWant, Piece)),
}
# What is fetched by bulk, by the first part of its key.
BULK = {
    "parts": "what members of an all-reduce owe one another: encoded values, sums, means; with `btard` what they sign",
    "contribution": "an encoded contribution to a round of an open run",
    "audit": "states of training and the record of them, for an auditor",
    "gossip": "what two nodes that meet exchange",
}
ANY_CALL = {  # codes
    "unknown-method": "not served here",
    "malformed": "no such message",
    "busy": "beyond a limit",
    "internal": "a defect",
}
# Who writes a record, and what its value is.
RECORDS: dict[str, tuple[str, tuple[type, ...]]] = {
    "member": ("members: the lease {addresses, lasts (s), instance, since (ms), rival}", ()),
    "vote": ("validators: the roster that they follow", (chain.ForkChoiceVote,)),
    "note": ("anybody, also by `swarmnode state put`; below are those that the program uses", ()),
    "commit": ("who offers a contribution", (chain.Commit,)),
    "availability": ("judges", (chain.AvailabilityVote,)),
    "reveal": ("who committed", (chain.Reveal,)),
    "score": ("judges, twice: SUBJECT ends in `-seal`, then in `-open`", (chain.Seal, chain.Scores)),
    "roster": ("the leader of the attempt", (chain.Roster,)),
    "attestation": ("members, of others whose work they looked at; SUBJECT is a peer id", (Attestation,)),
    "probe": ("members of a run by seeds: (round of the record before, a byte for each step)", ()),
    "evidence": ("nobody: two records of one author under one key, with their signatures; NAME is their kind", ()),
}
NOTES: dict[str, tuple[str, tuple[type, ...]]] = {
    "note/steering": ("the run's owner: {changes: ((round, TABLE.KEY, value), …)}", ()),
    "note/successor": ("the run's owner: the run that follows", (Succession,)),
    "note/population": ("members, with `[inner] population`: {period, factor, loss}", ()),
    "note/away": ("a node of an open run that takes no part for now: true", ()),
    "note/btard/": ("members who saw a lie proved, or believe others who did: why; behind the slash the liar", ()),
}
# What a signature is bound to besides the payload, and what that is.
SIGNED: dict[str, tuple[str, str, tuple[type, ...]]] = {
    "record": ("", "a record: {author, hlc, key, run, ttl (ms), v, value}", ()),
    "listing": ("", "what a member says of its run in the catalogue", (ListedRun,)),
    "rollout": ("run id", "a group of answers, by its author", (PackedGroup,)),
    "weights": ("run id", "weights of a policy, by who trains it", (Weights,)),
    "btard": ("attempt/life/kind", "what a member says in a round", get_args(Statement)),
    "provenance": ("", "the record beside an exported model ([provenance](provenance.md))", ()),
    "open/secret": ("", "the run id; nobody is told the signature, from which a node's secrets follow", ()),
}


def page() -> str:
    """docs/messages.md: every protocol, call, record and signature, with the fields of each message."""
    messages, calls = _Messages(), served()
    lines = [
        "# Messages",
        "",
        "Written by `python docs/generate.py messages > docs/messages.md` from the code; change the types and comments",
        "there, not this page. The first lines of the files say in which order messages follow, and who may fail when.",
        "",
        f"A message is a msgpack map from field names to values: at most {MAX_BYTES:,} bytes, {MAX_VALUES:,} values",
        f"and {MAX_DEPTH} levels (`protocols/wire.py`), each behind its length as a varint (`protocols/frames.py`).",
        "A field that has its default (`= …`) is left out. One that a node does not know is passed over, but refused",
        "in statements of an open round, attestations and groups of rollouts. A value outside of what is *allowed*",
        "makes a message malformed. An `int` has 64 bits, a `float` is a float64, and a hash is a sha-256.",
        "",
        "## Protocols",
        "",
        f"Connections are Noise (`{NOISE}`) and Yamux (`{YAMUX}`) over TCP, or QUIC. On them a node serves:",
        "",
        *table("protocol | for | messages | in"),
    ]
    for name, place in sorted(streams().items(), key=lambda each: (not each[0].startswith(OWN), each[0])):
        purpose, said = PROTOCOLS[name]
        told = f"[specification]({SPECS}/{said})" if isinstance(said, str) else messages.named(*said)
        lines.append(f"| `{name}` | {purpose} | {told} | {place} |")
    lines += ["", *messages.new(), "### Keys of bulk", "", *table("key | what is fetched | offered in")]
    lines += [f"| `{key}` | {BULK[key.split(',')[0]]} | `{place}` |" for key, place in bulk_keys()]
    lines += ["", "## Calls", "", f"They travel by `{OWN}rpc`, each call and each answer in a [Frame](#frame).", ""]
    for part, methods in sorted(calls.items()):
        lines += [f"### {part}", "", *table("call | asked with | answered with | in")]
        for name, request, answer, place in methods:
            lines.append(f"| `{name}` | {messages.named(request)} | {messages.named(answer)} | `{place}` |")
        lines += ["", *messages.new()]
    lines += [
        "### Refusals",
        "",
        f"Any call may be refused as {', '.join(f'`{code}` ({why})' for code, why in ANY_CALL.items())}.",
        "Handlers have these codes besides:",
        "",
        *table("code | what is said | in"),
        *(f"| `{code}` | {'; '.join(texts)} | {', '.join(places)} |" for code, texts, places in refusals()),
        "",
        "## Signed records",
        "",
        "Small signed facts that every member of a run holds (`crdt/record.py`; [state](state.md)). All of one",
        f"author have at most {MAX_PER_AUTHOR:,} bytes. Two of one author under one write-once key are evidence",
        "against it. A value has all fields but those that the key tells, and rows as lists of their columns.",
        "ROUND has eight digits. SUBJECT begins, in an open run, with 16 hex digits of the id of the roster before.",
        "",
        *table("key | lives | of one author | bytes | written by, and what | value"),
    ]
    for kind in KINDS.values():
        who, values = RECORDS[kind.name]
        lives = f"{kind.ttl // DAY} d" if kind.ttl >= DAY else f"{kind.ttl // SECOND:,} s"
        form = "/ROUND/SUBJECT` (write-once)" if kind.write_once else "`" if kind.slots == 1 else "/NAME`"
        sizes = f"{lives} | {kind.slots} | {kind.max_size:,}"
        lines.append(f"| `{kind.name}{form} | {sizes} | {who} | {messages.named(*values)} |")
    lines += ["", *table("note | written by, and what | value")]
    lines += [f"| `{key}` | {NOTES[key][0]} | {messages.named(*NOTES[key][1])} |" for key in notes()]
    lines += ["", *messages.new()]
    lines += [
        "## Signatures",
        "",
        "Ed25519 over `swarmnode/PURPOSE/VERSION`, a zero byte and the payload; what it is bound to stands before the",
        "payload, with a zero byte behind it (`crdt/envelope.py`). No signature for one purpose passes for another.",
        "",
        *table("purpose/version | bytes of payload | bound to | what is signed | payload | in"),
    ]
    for domain, place in domains():
        bound, what, kinds = SIGNED[domain.purpose]
        payload = f"{domain.max_size:,} | {bound} | {what} | {messages.named(*kinds)}"
        lines.append(f"| `{domain.purpose}/{domain.version}` | {payload} | `{place}` |")
    return "\n".join([*lines, "", *messages.new()][:-1]) + "\n"


def table(head: str) -> list[str]:
    return [f"| {head} |", f"|{'---|' * (head.count(' | ') + 1)}"]


# -- what the source says


class _Source:
    """One module of the product: its tree, and its comments by line."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.module = importlib.import_module("swarmnode." + place.removesuffix(".py").replace("/", "."))
        self._text = (ROOT / place).read_text(encoding="utf-8")
        self.tree = ast.parse(self._text)
        self.nodes = list(ast.walk(self.tree))

    @cached_property
    def _comments(self) -> dict[int, tuple[str, bool]]:
        """By line, and whether nothing else is there."""
        found = tokenize.generate_tokens(io.StringIO(self._text).readline)
        return {
            each.start[0]: (each.string.lstrip("# "), each.line.lstrip().startswith("#"))
            for each in found
            if each.type == tokenize.COMMENT
        }

    def value(self, expression: ast.expr) -> Any:
        return eval(ast.unparse(expression), vars(self.module))

    def comment(self, line: ast.stmt) -> str:
        """What stands above a line, and behind it."""
        first = line.lineno
        while self._comments.get(first - 1, ("", False))[1]:
            first -= 1
        lines = range(first, (line.end_lineno or first) + 1)
        return " ".join(self._comments[at][0] for at in lines if at in self._comments)

    def calls(self) -> Iterator[tuple[str, list[ast.expr]]]:
        """What is called of that which serves and refuses, and with what."""
        for node in self.nodes:
            match node:
                case ast.Call(ast.Name("Refuse") | ast.Attribute(attr="serve" | "set_stream_handler") as called, given):
                    yield ast.unparse(called), given

    def returns(self, function: str) -> Any:
        """The type that a function is annotated to return."""
        kinds = ast.FunctionDef | ast.AsyncFunctionDef
        (found,) = (each for each in self.nodes if isinstance(each, kinds) and each.name == function)
        assert found.returns is not None
        return self.value(found.returns)


@cache
def sources() -> dict[str, _Source]:
    """By the module's name."""
    paths = [path for room in ("crdt", "protocols", "node") for path in sorted((ROOT / room).rglob("*.py"))]
    found = [_Source(path.relative_to(ROOT).as_posix()) for path in paths if path.name != "__init__.py"]
    return {source.module.__name__: source for source in found}


def served() -> dict[str, list[tuple[str, type, type, str]]]:
    """The calls, by the first part of their names: name, request, answer, and where."""
    found = defaultdict(list)
    for source in sources().values():
        for called, arguments in source.calls():
            if called.endswith(".serve") and len(arguments) == 3:
                name, request = map(source.value, arguments[:2])
                answer = source.returns(ast.unparse(arguments[2]).rpartition(".")[2])
                found[name.rpartition(".")[0] or "of any node"].append((name, request, answer, source.place))
    return found


def streams() -> dict[str, str]:
    """The protocols that a node serves, and where."""
    found = dict.fromkeys(map(str, (IDENTIFY, IDENTIFY_PUSH, PING)), "py-libp2p")
    for source in sources().values():
        for called, arguments in source.calls():
            match arguments:
                case [name, _] if called.endswith("network.serve"):
                    found[source.value(name)] = f"`{source.place}`"
                case [ast.Call(args=[ast.Name("kad")]), _] if called.endswith("set_stream_handler"):
                    found[str(KADEMLIA)] = "py-libp2p, `node/discovery/kademlia.py`"
    return found


def refusals() -> list[tuple[str, list[str], list[str]]]:
    """The codes by which handlers refuse, what they say then, and where."""
    texts: defaultdict[str, dict[str, None]] = defaultdict(dict)
    places: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for source in sources().values():
        for called, arguments in source.calls():
            if called == "Refuse":
                code, text = source.value(arguments[0]), arguments[1]
                parts = text.values if isinstance(text, ast.JoinedStr) else [text]
                said = "".join(str(each.value) if isinstance(each, ast.Constant) else "…" for each in parts)
                texts[code][said], places[code][f"`{source.place}`"] = None, None
    return [(code, list(texts[code]), list(places[code])) for code in sorted(texts.keys() - ANY_CALL)]


def bulk_keys() -> Iterator[tuple[str, str]]:
    for source in sources().values():
        for node in source.nodes:
            if isinstance(node, ast.FunctionDef) and node.returns and ast.unparse(node.returns) == "Key":
                match node.body[-1]:
                    case ast.Return(ast.Tuple([ast.Constant(str(name)), *rest])):
                        key = ", ".join([name, *map(ast.unparse, rest)])
                        yield re.sub(r"self\.|_?parts\.|\.hex\(\)|\b_", "", key), source.place


def notes() -> list[str]:
    """What names the program itself uses of the kind `note`."""
    values = [each.value for source in sources().values() for each in source.tree.body if isinstance(each, ast.Assign)]
    found = [each.value for each in values if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return sorted(each for each in found if each.startswith("note/"))


def domains() -> list[tuple[Domain, str]]:
    """The purposes of signatures, and where each is made."""
    found = []
    for source in sources().values():
        for each in source.tree.body:
            match each:
                case ast.Assign(value=ast.Call(func=ast.Name("Domain")) as made):
                    found.append((source.value(made), source.place))
    return sorted(found, key=lambda each: each[0].purpose)


# -- messages


class _Messages:
    """The messages named so far, each of which `new` describes once."""

    def __init__(self) -> None:
        self._named: dict[type, bool] = {}  # whether it was described
        self._beside_types = {  # comments at the names of types
            id(vars(source.module)[name.id]): source.comment(each)
            for source in sources().values()
            for each in source.tree.body
            if isinstance(each, ast.Assign | ast.AnnAssign)
            for name in (each.targets if isinstance(each, ast.Assign) else [each.target])
            if isinstance(name, ast.Name) and get_origin(vars(source.module)[name.id]) is Annotated
        }

    def named(self, *kinds: type) -> str:
        """Links to them."""
        for kind in kinds:
            self._named.setdefault(kind, False)
        return ", ".join(f"[{kind.__name__}](#{kind.__name__.lower()})" for kind in kinds)

    def new(self) -> list[str]:
        """Those that were named since, with those inside them."""
        lines = []
        while todo := [kind for kind, described in self._named.items() if not described]:
            self._named[todo[0]] = True
            lines += self._described(todo[0])
        return lines

    def _described(self, kind: type) -> list[str]:
        doc = kind.__dict__["__doc__"]
        lines = [f"#### {kind.__name__}", ""]
        if not doc.startswith(f"{kind.__name__}("):  # what `dataclass` writes where there is none
            lines += [in_words(" ".join(doc.split()), kind.__module__), ""]
        rows = []
        hints = get_type_hints(kind, include_extras=True)
        for field in dataclasses.fields(kind):
            hint, made = hints[field.name], field.default_factory
            default = field.default if made is dataclasses.MISSING else made()
            typed = self._typed(hint)
            if default is not dataclasses.MISSING:
                typed += " = …" if dataclasses.is_dataclass(default) else f" = `{default!r}`"
            options = (hint, *get_args(hint))  # a field that may be None has the check in one of two options
            kinds = [each for each in options if get_origin(each) is Annotated]
            allowed = "; ".join(
                self._allowed(check, get_args(each)[0]) for each in kinds for check in each.__metadata__
            )
            said = [self._beside(kind, field.name), *(self._beside_types.get(id(each), "") for each in kinds)]
            meaning = in_words("; ".join(dict.fromkeys(filter(None, said))), kind.__module__)
            rows.append(f"| `{field.name}` | {typed} | {allowed} | {meaning} |")
        lines += [*table("field | type | allowed | meaning"), *rows, ""] if rows else []
        more = _constants(kind.__dict__.get("__post_init__"))
        return [*lines, *([f"As a whole it is checked by {more}.", ""] if more else [])]

    def _typed(self, hint: Any) -> str:
        """A type in words."""
        origin, inside = get_origin(hint), get_args(hint)
        if origin is Annotated:
            return self._typed(inside[0])
        if origin in (typing.Union, types.UnionType):
            return " or ".join(map(self._typed, inside))
        if origin is tuple and inside[-1] is Ellipsis:
            return f"list of {self._typed(inside[0])}"
        if origin is tuple:
            return f"({', '.join(map(self._typed, inside))})"
        if origin in (dict, Mapping):
            return f"map from `str` to {self._typed(inside[1])}"
        if dataclasses.is_dataclass(hint):
            return self.named(hint)
        if issubclass(hint, Enum):
            return ", ".join(f"`{each.value}` {each.name.lower()}" for each in hint)
        return "none" if hint is type(None) else f"`{hint.__name__}`"

    def _allowed(self, check: Any, hint: Any = None) -> str:
        """What a check lets pass."""
        inside = inspect.getclosurevars(check).nonlocals
        match check.__qualname__.partition(".")[0]:
            case "within":
                low, high = map(_number, (inside["low"], inside["high"]))
                unit = " characters" if hint is str else " bytes" if hint is bytes else ""
                unit = unit or (" items" if get_origin(hint) in (tuple, dict) else "")
                return f"{low}{unit}" if low == high else f"{low} to {high}{unit}"
            case "_sized":
                return f"{' or '.join(map(str, inside['sizes']))} bytes"
            case "_ascending":
                each = self._allowed(inside["item"]) if inside["item"] else ""
                return f"at most {inside['most']} items, ascending{f', each {each}' * bool(each)}"
        doc = re.sub("^Raise WireError", "refused", " ".join((check.__doc__ or "").split())).rstrip(".")
        return ": ".join(filter(None, (doc, _constants(check))))

    def _beside(self, kind: type, field: str) -> str:
        """The comments at a field, in the class that has it."""
        for each in kind.__mro__:
            if field in inspect.get_annotations(each):
                source = sources()[each.__module__]
                (found,) = (n for n in source.tree.body if isinstance(n, ast.ClassDef) and n.name == each.__name__)
                (line,) = (n for n in found.body if isinstance(n, ast.AnnAssign) and ast.unparse(n.target) == field)
                return source.comment(line)
        raise KeyError(field)


def _constants(function: Any) -> str:
    """The numbers by name that a function uses."""
    if (code := getattr(function, "__code__", None)) is None:
        return ""
    found = {name: function.__globals__.get(name) for name in code.co_names if name.isupper()}
    return ", ".join(f"`{name}` {_number(value)}" for name, value in found.items() if isinstance(value, int))


def _number(value: float) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    for added, told in ((0, ""), (1, " − 1")):  # a power of two, or one less
        if abs(value) >= 1 << 20 and (abs(value) + added).bit_count() == 1:
            return f"{'−' * (value < 0)}2^{(abs(value) + added).bit_length() - 1}{told}"
    return f"{value:,}"


def in_words(text: str, module: str) -> str:
    """Text of a table, with the values of the constants that it names."""

    def told(name: re.Match[str]) -> str:
        value = vars(sources()[module].module).get(name[0])
        return f"{name[0]} ({_number(value)})" if isinstance(value, int | float) else name[0]

    return re.sub(r"\b[A-Z][A-Z_]+\b", told, text).replace("|", "\\|")
