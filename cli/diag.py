"""`swarmnode log level` and `swarmnode diag`: what is wanted of somebody who found a bug.

`diag` puts into one file what a reader of a bug report asks for: versions, settings, status, peers, netcheck, metrics
and the end of the log. It never reads the private key into it, and whatever is a secret is struck out of all of it
besides: the key's lines, the page's token, passphrases, values of environment variables that are called so, passwords
in URLs, and what lets others join a run: links, and all but the beginning of run ids.
"""

from __future__ import annotations

import io
import json
import os
import platform
import re
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from swarmnode import __version__
from swarmnode.cli.terminal import UsageMistake, ask, directory, group, loaded, say, show, size, table
from swarmnode.node.exitcodes import ExpectedError
from swarmnode.node.logs import LEVELS, read_tail
from swarmnode.node.storage.datadir import DataDir, explain
from swarmnode.training.options import SettingError

LOG_LINES = 5000  # the newest; some 1 MB
SHORT = 8  # characters: what is shorter is no secret that could be struck out
ASKED = ("status", "peers", "netcheck", "caps")  # of the running daemon, beside its metrics
PACKAGES = ("libp2p", "trio", "aioquic", "multiaddr", "cryptography", "numpy", "torch", "typer", "protobuf")
SECRET_NAME = re.compile(r"TOKEN|SECRET|PASS|API_KEY|CREDENTIAL", re.IGNORECASE)
LINK = re.compile(r"swarm1[0-9a-z]{20,}", re.IGNORECASE)
RUN = re.compile(r"(?<![0-9a-f])([0-9a-f]{12})[0-9a-f]{52}(?![0-9a-f])")
IN_URL = re.compile(r"(?<=://)[^/@\s\"]+:[^/@\s\"]+(?=@)")
STRUCK = "(left out)"

log = group("Change how much the running node logs.")


@log.command()
def level(
    part: Annotated[
        str | None, typer.Argument(metavar="[PART]", help="A part, as log lines name it. [default: all]")
    ] = None,
    to: Annotated[
        str | None, typer.Argument(metavar="[LEVEL]", help="debug, info, warning, error, default. [default: show them]")
    ] = None,
) -> None:
    """Set the level of the log, or of one part of it.

    It holds until the node ends, or until default takes it back. Without LEVEL the levels in force are shown; a level
    without PART is that of all parts but libraries. Example: swarmnode log level node.nat debug
    """
    if to is None and (part or "").upper() in LEVELS:
        part, to = None, part
    answer = ask("log_level", timeout=10.0, part=part, level=to)
    rows = [(name or "(all others)", told.lower()) for name, told in answer["levels"].items()]
    show(answer, table(("PART", "LEVEL"), rows))


def diag(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Where to put it. [default: swarmnode-diag-TIME.tar.gz here]"),
    ] = None,
) -> None:
    """Write one file for a bug report, with secrets left out.

    It has versions, settings, status, peers, netcheck, metrics and the end of the log, with the addresses and ids of
    peers. Works with and without a running node. Example: swarmnode diag report.tar.gz
    """
    home = DataDir(directory())
    path = file or Path(time.strftime("swarmnode-diag-%Y%m%d-%H%M%S.tar.gz"))
    collected: dict[str, str] = {}
    missing: list[str] = []
    for name, read in _parts(home):
        try:
            collected[name] = read()
        except (ExpectedError, SettingError, OSError) as error:
            missing.append(f"{name}: {error}")
    if missing:
        collected["missing.txt"] = "".join(f"{line}\n" for line in missing)
    secrets = _secrets(home)
    clean = {name: struck(text, secrets) for name, text in collected.items()}
    try:
        with path.open("xb") as out:
            os.fchmod(out.fileno(), 0o600)
            with tarfile.open(fileobj=out, mode="w:gz") as archive:
                for name, text in sorted(clean.items()):
                    content, member = text.encode(errors="backslashreplace"), tarfile.TarInfo(f"swarmnode-diag/{name}")
                    member.size, member.mtime, member.mode = len(content), int(time.time()), 0o600
                    archive.addfile(member, io.BytesIO(content))
    except FileExistsError:
        raise UsageMistake(f"{path}: there is a file already; name another, or delete it") from None
    except OSError as error:
        raise explain(error, path) from error
    written = path.stat().st_size
    show(
        {"path": str(path.absolute()), "bytes": written, "files": sorted(clean), "missing": missing},
        [f"{path}: {', '.join(sorted(clean))}; {size(written)}", *(f"- lacks {each}" for each in missing)],
    )
    say("keys, tokens, passphrases and links are left out; addresses and peer ids are in it: look before you send it")


def _parts(home: DataDir) -> Iterator[tuple[str, Any]]:
    """Each file of the report, and what reads its text; that may raise."""
    yield "versions.json", lambda: _json(_versions())
    yield "config.json", lambda: _json(loaded().settings)
    for method in ASKED:
        yield f"{method}.json", lambda method=method: _json(ask(method, timeout=10.0))
    yield "metrics.txt", lambda: str(ask("metrics", timeout=10.0)["text"])
    yield "log.jsonl", lambda: "".join(_json(line, indent=None) for line in read_tail(home.logs, LOG_LINES))


def _versions() -> dict[str, Any]:
    installed = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            installed[package] = version(package)
    return {
        "swarmnode": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "packages": installed,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def _json(value: Any, indent: int | None = 1) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent, default=str) + "\n"


def _secrets(home: DataDir) -> list[str]:
    """What must not be in the file, as far as this machine knows it; longer ones first."""
    found = [value for name, value in os.environ.items() if SECRET_NAME.search(name)]
    files = [home.identity, home.dashboard_token]
    with suppress(ExpectedError, SettingError):
        passphrase_file = loaded().config.passphrase_file
        files += [Path(passphrase_file).expanduser()] if passphrase_file else []
    for path in files:
        with suppress(OSError):
            found += path.read_text(encoding="utf-8", errors="ignore").splitlines()
    return sorted({each.strip() for each in found if len(each.strip()) >= SHORT}, key=len, reverse=True)


def struck(text: str, secrets: list[str]) -> str:
    """`text` without secrets, also where JSON escapes them; of run ids, and all else that looks so, the beginning."""
    for secret in secrets:
        for form in (secret, json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]):
            text = text.replace(form, STRUCK)
    return IN_URL.sub(STRUCK, LINK.sub(STRUCK, RUN.sub(r"\1…", text)))
