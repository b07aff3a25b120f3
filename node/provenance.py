"""Where a model comes from: provenance records.

    NAME.safetensors        the tensors of the model under their own names, float32; in a folder with what
                            `transformers` or `peft` read beside it, where the run has a base model; in a folder of
                            another language model swarmnode.safetensors, beside the same model as a Qwen3
    NAME.gguf               the same model for llama.cpp, where that was asked for: beside NAME.safetensors
    NAME.provenance.json    {"record": {…}, "signature": hex}
    NAME.tokenizer.json     the run's tokenizer, where it has one; in a folder tokenizer.json

The record names the run and its whole specification, hashes of the data, the round, the hash of the shared state, the
sha-256 of the file beside it, and each round that its maker saw end: state hash, id of the roster where the exchange
method has a chain of them, and whose work is in the state. The record is signed in an
envelope (`crdt.envelope`): Ed25519 over a tag and the record in canonical msgpack.

What a record proves: that its maker, who is known by a peer id, says all this; that the file is the one it says it of;
that the specification is that of the run, and the data hashes are in it; that the file is the state with that hash
(where the outer momentum is zero or in the file, since the hash covers it). It does not prove that the rounds went as
told: for that, compare the records of several makers, a node's own history, or the rosters that validators signed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from swarmnode.crdt import encoding
from swarmnode.crdt.envelope import Domain, Envelope
from swarmnode.node.exitcodes import ExpectedError
from swarmnode.node.host.addresses import verify as verify_signature
from swarmnode.node.identity import Identity
from swarmnode.node.storage.checkpoints import CheckpointManifest, newest_whole
from swarmnode.node.storage.datadir import RUN_ID, DataDir, RunStore, explaining, write_atomic
from swarmnode.node.storage.history import HISTORY, PastRound, read_history
from swarmnode.node.storage.tensorfile import NotTensors, read_tensors, write_tensors
from swarmnode.protocols.transfer.shard_manifest import ShardManifest
from swarmnode.training.hub import as_qwen3, fetch, file_name, weights_hash, write_beside, write_gguf
from swarmnode.training.options import SettingError, installing
from swarmnode.training.outer import Layout, OuterState, state_hash
from swarmnode.training.runspec import TEXT_TASKS, RunSpec, decode, encode
from swarmnode.training.tasks import TaskError
from swarmnode.training.tokens import CorpusError

FORMAT = 2  # 1 was signed over JSON
MOMENTUM = "outer_momentum"  # name of the optional tensor (P,) beside those of the model
MAX_RECORD = 1 << 28  # bytes; a million rounds
DOMAIN = Domain("provenance", FORMAT, MAX_RECORD)
OWN_NAMES = "swarmnode.safetensors"  # in a folder for transformers: the model that the record is of


class NoModel(ExpectedError):
    """There is nothing to make a record of, or the file given is none."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at. `holds` is None where it could not be told."""

    what: str
    holds: bool | None
    detail: str


def export(
    home: DataDir, run_id: str, identity: Identity, target: Path, *, with_momentum: bool, base: str = ""
) -> tuple[Path, dict[str, Any]]:
    """Write the newest whole checkpoint of a run in the data directory `home` as a model, and its record. Blocking.

    `target` is the file, a folder for `transformers`, or a .gguf beside which the file is written; a base model lies in
    `base` if not where the run says.
    Returns the record's path and the record. Raises NoModel, SettingError, NoSpace or DataDirError.
    """
    store = RunStore(home)
    spec, folder = store.load(run_id), store.folder(run_id)
    if spec is None:
        raise NoModel(f"{folder}: has no specification of the run, so nothing can be said about its model")
    found = newest_whole(folder / "checkpoints", spec.run_id)
    if found is None:
        raise NoModel(
            f"{folder}: holds no whole checkpoint of run {spec.run.name} yet; one is written every few rounds "
            "(--checkpoint-every), and when the node stops in order"
        )
    manifest, saved = found
    layout = manifest.table
    given = target
    if given.suffix == ".gguf":
        target = given.with_suffix(".safetensors")
    elif given.suffix != ".safetensors":
        target = _as_folder(given, spec, layout, base)
    tensors = {
        file_name(spec.model, slot.name): saved.state.parameters[slot.place].reshape(slot.shape)
        for slot in layout.slots
    }
    tokenizer = _tokenizer(spec, target, home.path / "shards")
    if spec.data.tokenizer and not tokenizer and given.suffix != ".safetensors":
        raise NoModel(f"{given}: the run's tokenizer is not among this node's shards; name a file in .safetensors")
    if given.suffix == ".gguf":
        _for_llama(given, spec, tensors, tokenizer)
    elif target != given and not spec.model.base:
        _for_transformers(given, spec, tensors)
    momentum = "left out" if saved.state.momentum.view(np.uint32).any() else "zero"
    if momentum == "left out" and with_momentum:
        tensors[MOMENTUM], momentum = saved.state.momentum, "included"
    if tokenizer:
        write_atomic(tokenizer_path(target, base=spec.model.base), tokenizer)
    named = {"format": "pt", "run": spec.run_id, "round": str(saved.round), "state_hash": manifest.state_hash}
    sha256 = write_tensors(target, tensors, named)
    history = tuple(e for e in read_history(folder / HISTORY) if e.round < saved.round)
    file = {"file": target.name, "sha256": sha256, "momentum": momentum}
    record = make_record(spec, manifest, history, file=file, maker=identity.peer_id)
    beside = record_path(target)
    sealed = {"record": record, "signature": DOMAIN.seal(record, identity.private_key.sign).signature.hex()}
    write_atomic(beside, json.dumps(sealed).encode())
    return beside, record


def _as_folder(target: Path, spec: RunSpec, layout: Layout, base: str) -> Path:
    """The file for the weights in a folder that `from_pretrained` reads. Raises NoModel, NoSpace or DataDirError."""
    if not spec.model.base:
        return target / OWN_NAMES
    with explaining(target):
        try:
            return write_beside(target, spec.model, [slot.name for slot in layout.slots], base=base)
        except (ValueError, ImportError, FileNotFoundError) as error:
            raise NoModel(f"the run's base model is not here, for its shape and tokenizer (--base): {error}") from error


def _for_transformers(folder: Path, spec: RunSpec, tensors: dict[str, NDArray[np.float32]]) -> None:
    """Write what `from_pretrained` reads beside a GPT's own file. Raises NoModel, NoSpace or DataDirError."""
    try:
        written, config = as_qwen3(spec, tensors)
    except ValueError as error:
        raise NoModel(f"{folder}: {error}; name a file in .safetensors, which holds it as it is") from error
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / "model.safetensors", written, {"format": "pt"})
    write_atomic(folder / "config.json", json.dumps(config, indent=2).encode())
    if spec.data.tokenizer:
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": spec.model.context}
        write_atomic(folder / "tokenizer_config.json", json.dumps(kind, indent=2).encode())


def _for_llama(path: Path, spec: RunSpec, tensors: dict[str, NDArray[np.float32]], tokenizer: bytes) -> None:
    """Write a GPT as GGUF. Raises NoModel, NoSpace or DataDirError."""
    try:
        with explaining(path):
            write_gguf(path, spec, tensors, tokenizer)
    except ImportError as error:
        raise NoModel(
            f"{path}: GGUF needs a package that cannot be imported ({error}): {installing('swarmnode[gguf]')}"
        ) from error
    except ValueError as error:
        raise NoModel(
            f"{path}: {error}, so no GGUF is written; name a file in .safetensors, or a folder, which llama.cpp's "
            "convert_hf_to_gguf.py may take"
        ) from error


def record_path(model: Path) -> Path:
    return model.with_name(f"{model.name.removesuffix('.safetensors')}.provenance.json")


def tokenizer_path(model: Path, *, base: str = "") -> Path:
    """`base`: of the run; then the file is one of a folder."""
    in_folder = base or model.name == OWN_NAMES
    name = "tokenizer.json" if in_folder else f"{model.name.removesuffix('.safetensors')}.tokenizer.json"
    return model.with_name(name)


def _tokenizer(spec: RunSpec, model: Path, shards: Path) -> bytes:
    """The run's tokenizer.json, known by its hash, from beside the model or a node's shards; empty where it is not."""
    for path in (tokenizer_path(model, base=spec.model.base), shards / f"{spec.data.tokenizer}.shard"):
        with suppress(OSError):
            found = path.read_bytes() if spec.data.tokenizer else b""
            if found and ShardManifest.of(found).id.hex() == spec.data.tokenizer:
                return found
    return b""


def make_record(
    spec: RunSpec, manifest: CheckpointManifest, history: tuple[PastRound, ...], *, file: dict[str, str], maker: str
) -> dict[str, Any]:
    """The record without its signature; no value is a float, and `made` is in seconds since 1970.

    `file`: what the record says of the file beside it: `file` (its name), `sha256` and `momentum`.
    """
    peers = sorted({peer for entry in history for peer in entry.counted})
    number = {peer: index for index, peer in enumerate(peers)}
    return {
        "format": FORMAT,
        "run": spec.run_id,
        "name": spec.run.name,
        "spec": base64.b64encode(encode(spec)).decode(),
        "data": {"index": spec.data.index, "heldout_sha256": spec.task.heldout_sha256},
        "model": {
            **file,
            "round": manifest.round,  # rounds that are in it
            "state_hash": manifest.state_hash,
            "layout": [[slot.name, list(slot.shape)] for slot in manifest.table.slots],
        },
        "peers": peers,
        "rounds": [[e.round, e.state_hash, e.roster, int(e.at), [number[p] for p in e.counted]] for e in history],
        "contributors": dict(sorted(_accepted(history).items())),
        "maker": maker,
        "made": int(time.time()),
    }


def _accepted(history: tuple[PastRound, ...]) -> Counter[str]:
    return Counter(peer for entry in history for peer in set(entry.counted))


# --- verifying ------------------------------------------------------------------------------------------------------


def verify(
    file: Path, *, home: Path | None = None, sealed: Path | None = None, base: str = ""
) -> tuple[dict[str, Any], list[Check]]:
    """Look at a record and the model beside it; `file` is either. Blocking. Raises NoModel where it is neither.

    Where this node took part in the run itself, its own history in the data directory `home` is compared as well.
    `sealed`: the text that the run's creator kept back, on which the model's loss is then measured; `base`: where the
    base model of LoRA lies, if not where the run says.
    """
    beside = file if file.name.endswith(".json") else record_path(file)
    record, signature = _read(beside)
    try:
        model = beside.with_name(Path(str(record["model"]["file"])).name) if file == beside else file
        checks = list(_checks(record, signature, model))
        if sealed is not None:
            whole = all(check.holds is not False for check in checks)
            checks.append(_sealed(record, model, sealed, whole=whole, home=home, base=base))
        if home is not None and RUN_ID.fullmatch(run := str(record["run"])):
            checks += _compared(record, read_history(home / "runs" / run / HISTORY))
        return record, checks
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise NoModel(f"{beside}: is no provenance record of this format: {error!r}") from error


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    try:
        if path.stat().st_size > MAX_RECORD:
            raise ValueError(f"it has more than {MAX_RECORD} bytes")
        sealed = json.loads(path.read_bytes())
        record, signature = sealed["record"], bytes.fromhex(sealed["signature"])
        if not isinstance(record, dict) or record.get("format") != FORMAT:
            raise ValueError(f"it is no record of format {FORMAT}")
        numbers = (record["made"], *record["contributors"].values())
        if not isinstance(record["name"], str) or not all(type(n) is int and 0 <= n < 1 << 40 for n in numbers):
            raise ValueError("its name is no text, or its date or a count no number")
        return record, signature
    except OSError as error:
        raise NoModel(
            f"{path}: cannot be read: {error.strerror}; a model's record lies beside it, NAME.provenance.json"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise NoModel(f"{path}: is no provenance record: {error}") from error


def _checks(record: dict[str, Any], signature: bytes, path: Path) -> Iterator[Check]:
    yield _signed(record, signature)
    spec = _spec_of(record)
    hashes = "it hashes to the run id" if spec else "it does not hash to the run id"
    yield Check("specification", spec is not None, hashes)
    if spec is not None:
        data = {"index": spec.data.index, "heldout_sha256": spec.task.heldout_sha256}
        same = record["data"] == data and record["name"] == spec.run.name
        yield Check("data", same, "hashes as in the specification" if same else "other hashes than the specification's")
    model = record["model"]
    peers, told = record["peers"], record["rounds"]
    rounds = tuple(PastRound(r, h, tuple(peers[i] for i in who), roster, at) for r, h, roster, at, who in told)
    yield from _history(record, rounds)
    try:
        tensors, sha256 = read_tensors(path)
    except (OSError, NotTensors) as error:
        yield Check("model", False, f"{path.name} cannot be read: {error}")
        return
    yield Check("model", sha256 == model["sha256"], f"{path.name} has sha-256 {sha256[:16]}…")
    layout = Layout.of([(str(name), tuple(int(axis) for axis in shape)) for name, shape in model["layout"]])
    shapes = {name: tensor.shape for name, tensor in tensors.items() if name != MOMENTUM}
    names = [slot.name if spec is None else file_name(spec.model, slot.name) for slot in layout.slots]
    fits = shapes == {name: slot.shape for name, slot in zip(names, layout.slots, strict=True)}
    yield Check("tensors", fits, f"{layout.parameters:,} parameters in {len(layout.slots)} tensors")
    if fits and model["momentum"] == "left out":
        why = "its hash covers an outer momentum that the file does not contain (export --momentum)"
        yield Check("state", None, why)
    elif fits:
        parameters = np.concatenate([tensors[name].reshape(-1) for name in names])
        momentum = tensors.get(MOMENTUM, np.zeros_like(parameters))
        hash = state_hash(int(model["round"]), layout, OuterState(parameters, momentum))
        yield Check("state", hash == model["state_hash"], f"the file is the state with hash {hash[:16]}…")


def _sealed(record: dict[str, Any], model: Path, sealed: Path, *, whole: bool, home: Path | None, base: str) -> Check:
    """Whether a text is the one that the run's creator kept back, and the loss on it of a model that is `whole`."""
    what, spec = "sealed text", _spec_of(record)
    if spec is None or not spec.data.sealed:
        return Check(what, False, "the run's specification names none ([data] sealed): no text is held against it")
    try:
        text = sealed.read_bytes()
    except OSError as error:
        raise NoModel(f"{sealed}: cannot be read: {error.strerror}") from error
    found = hashlib.sha256(text).hexdigest()
    if found != spec.data.sealed:
        says = f"{sealed.name} has sha-256 {found[:16]}…, the run's sealed text {spec.data.sealed[:16]}…"
        return Check(what, False, f"{says}: it is another file, or not as it was when the run was created")
    tokenizer = _tokenizer(spec, model, (home or model.parent) / "shards")
    if not whole:
        why = "the model does not hold"
    elif spec.task.name not in TEXT_TASKS:
        why = f"none is known of the task {spec.task.name}"
    elif spec.data.tokenizer and not tokenizer:
        named = tokenizer_path(model, base=spec.model.base).name
        why = f"the run's tokenizer is not here: it belongs beside the model, as {named}"
    else:
        from swarmnode.training.byte_lm import loss_on

        tensors, _ = read_tensors(model)
        names = [file_name(spec.model, str(name)) for name, _ in record["model"]["layout"]]
        parameters = np.concatenate([tensors[name].reshape(-1) for name in names])
        try:
            loss = loss_on(text, spec, parameters, tokenizer=tokenizer, base=_base_of(spec, model, base))
            return Check(what, True, f"the model's loss on it is {loss:.4f} bits per byte")
        except (CorpusError, ValueError) as error:
            return Check(what, False, f"the model's loss on it cannot be measured: {error}")
        except TaskError as error:
            why = f"the run's base model cannot be used (--base): {error}"
    return Check(what, True, f"it is the run's; no loss on it is measured, as {why}")


def _base_of(spec: RunSpec, model: Path, named: str) -> str:
    """The folder from which the model's shape comes, and of LoRA its frozen weights. Raises TaskError."""
    if not spec.model.base:
        return ""
    whole = not spec.model.lora_rank
    if whole and (model.parent / "config.json").is_file():
        return str(model.parent)
    try:
        found = fetch(named or spec.model.base, offline=True)
        same = whole or spec.model.base_sha256 in ("", weights_hash(found))
    except (OSError, ValueError, ImportError) as error:
        raise TaskError(str(error)) from error
    if not same:
        raise TaskError(f"{found} has other weights than the run's")
    return str(found)


def _compared(record: dict[str, Any], own: tuple[PastRound, ...]) -> Iterator[Check]:
    """Whether what the record tells is what this node saw."""
    spec = _spec_of(record)
    if spec is not None and not spec.one_state:
        yield Check("own history", None, "each member of this run has a state of its own; nothing to compare")
        return
    seen = {entry.round: entry.state_hash for entry in own}
    both = [(round, hash) for round, hash, *_ in record["rounds"] if round in seen]
    other = [round for round, hash in both if seen[round] != hash]
    if both:
        told = f"this node saw other states after {len(other)} of" if other else "this node saw the same states after"
        yield Check("own history", not other, f"{told} {len(both)} rounds that both saw")


def _signed(record: dict[str, Any], signature: bytes) -> Check:
    maker = str(record["maker"])
    try:
        envelope = Envelope(encoding.encode(record, max_size=MAX_RECORD), signature)
        genuine = DOMAIN.is_signed(envelope, maker, verify_signature)
    except ValueError:  # no value that could be signed
        genuine = False
    return Check("signature", genuine, f"of {maker}" if genuine else f"it is not that of {maker}")


def _spec_of(record: dict[str, Any]) -> RunSpec | None:
    try:
        return decode(base64.b64decode(record["spec"], validate=True), expected_run_id=str(record["run"]))
    except (SettingError, ValueError):
        return None


def _history(record: dict[str, Any], rounds: tuple[PastRound, ...]) -> Iterator[Check]:
    """Whether the rounds are in order, lead to the model, and give the contributors' counts."""
    done = int(record["model"]["round"])
    numbers = [entry.round for entry in rounds]
    ordered = all(a < b for a, b in pairwise(numbers)) and all(0 <= n < done for n in numbers)
    seen = f"its maker saw {len(rounds)} of {done} rounds end"
    yield Check("rounds", ordered, seen if ordered else "they are not in order, or later than the model")
    if rounds and rounds[-1].round == done - 1:
        same = rounds[-1].state_hash == record["model"]["state_hash"]
        yield Check("chain", same, "the last round led to the model's state" if same else "it leads to another state")
    else:
        yield Check("chain", None, "its maker did not see the last round end, but took the state over from members")
    counts = dict(_accepted(rounds)) == record["contributors"]
    told = f"{len(record['contributors'])} peers" if counts else "the counts are not those of the rounds"
    yield Check("contributors", counts, told)
