"""`swarmnode provenance …`: a trained model as a file with a signed record of where it comes from, and checking one."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnode.cli.terminal import PassphraseOption, directory, group, number_of, one_run, own_home, plain, show, table
from swarmnode.node.exitcodes import CONFIG, ExpectedError
from swarmnode.node.identity import load_or_create

provenance = group("Export a trained model with its signed origin; verify one.")


@provenance.command("export")
def export(
    file: Annotated[
        Path,
        typer.Argument(
            metavar="FILE.safetensors",
            help="The file to write; one that is there is replaced. Of a run by hf-lm, gpt or byte-lm it may be a "
            "folder, which transformers, or peft for LoRA, then loads; of gpt and byte-lm also FILE.gguf, for "
            "llama.cpp.",
        ),
    ],
    run_id: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="Its name, or how its id begins. [default: the only one there is]"),
    ] = None,
    momentum: Annotated[
        bool,
        typer.Option(
            "--momentum", help="Add the outer momentum, so that the state's hash can be checked. [default: model only]"
        ),
    ] = False,
    base: Annotated[
        str,
        typer.Option("--base", metavar="MODEL", help="Where the base model lies, or its name. [default: the run's]"),
    ] = "",
    passphrase_file: PassphraseOption = None,
) -> None:
    """Write a run's newest model, and a signed record of its origin.

    The record is FILE.provenance.json, signed with this node's key. Works whether or not the node is running. The
    record tells the run, its specification and data, the rounds that this node saw end, and whose work counted in
    them.

    Example: swarmnode provenance export model.safetensors --run byte-lm
    """
    from swarmnode.node.provenance import export as write

    home, passphrase = own_home(passphrase_file)
    known = home.known_runs()
    if not known:
        raise ExpectedError(f"{home.path}: no run is known here; swarmnode run begins or joins one", exit_code=CONFIG)
    chosen = one_run(known, run_id, home.path, "--run ")
    identity = load_or_create(home.identity, passphrase)
    target = file.expanduser().absolute()
    beside, record = write(home, chosen, identity, target, with_momentum=momentum, base=base)
    target = beside.with_name(record["model"]["file"])
    told = f"{target}, and {file.name} for llama.cpp" if file.suffix == ".gguf" else f"{target}"
    text = f"{told}: {record['name']} after {record['model']['round']} rounds\n"
    text += f"{beside}: signed by {record['maker']}; {number_of(len(record['contributors']), 'contributor')}"
    show({"model": str(target), "record": str(beside), **_summary(record)}, text)


@provenance.command("verify")
def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The model or its record, which lie side by side.")],
    maker: Annotated[
        str | None,
        typer.Option("--maker", metavar="PEER", help="The peer who must have signed. [default: whoever did]"),
    ] = None,
    sealed: Annotated[
        Path | None,
        typer.Option(
            "--sealed",
            metavar="TEXT",
            help="The text that the run's creator kept back: check its hash, and measure the model's loss. "
            "[default: neither]",
        ),
    ] = None,
    base: Annotated[
        str,
        typer.Option("--base", metavar="MODEL", help="Where the base of LoRA lies, or its name. [default: the run's]"),
    ] = "",
) -> None:
    """Check a model against its record.

    Looked at are signature, specification, data hashes, rounds, file and state hash. Where this node took part in the
    run, what it saw itself is compared as well. Exit code 1 where something does not hold. What could not be told
    is said, and is no failure.

    Example: swarmnode provenance verify model.safetensors
    """
    from swarmnode.node.provenance import Check
    from swarmnode.node.provenance import verify as look

    text = None if sealed is None else sealed.expanduser().absolute()
    record, checks = look(file.expanduser().absolute(), home=directory(), sealed=text, base=base)
    if maker is not None:
        checks.append(Check("maker", record["maker"] == maker, f"{record['maker']} made it, {maker} was asked for"))
    failed = [check.what for check in checks if check.holds is False]
    told = [asdict(check) for check in checks]
    show({"valid": not failed, "checks": told, **_summary(record)}, _found(record, told))
    if failed:
        raise ExpectedError(f"{file}: does not hold: {', '.join(failed)}")


def _found(record: dict[str, Any], checks: list[dict[str, Any]]) -> list[str]:
    words = {True: "holds", False: "FAILS", None: "unknown"}
    made = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(record["made"]))
    name, run, signer = (plain(str(record[key])) for key in ("name", "run", "maker"))
    rows = [[check["what"], words[check["holds"]], plain(check["detail"])] for check in checks]
    by_count = sorted(record["contributors"].items(), key=lambda item: (-int(item[1]), item[0]))
    counted = [[plain(str(peer)), str(count)] for peer, count in by_count]
    return [
        table(["CHECK", "", ""], rows),
        f"{name}, run {run}, made {made} by {signer}",
        table(["CONTRIBUTOR", "ROUNDS"], counted, right=frozenset({1})),
    ]


def _summary(record: dict[str, Any]) -> dict[str, Any]:
    """What a program wants of a record: all but its rounds."""
    left_out = ("rounds", "peers", "spec", "format")
    return {"rounds": len(record["rounds"]), **{k: v for k, v in record.items() if k not in left_out}}
