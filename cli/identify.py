"""Commands that say who and what this is, or another node: id, version."""

from __future__ import annotations

import io
import platform
import sys
from typing import Annotated

import typer

from swarmnode import __version__
from swarmnode.cli.terminal import PassphraseOption, UsageMistake, as_json, ask, beside, own_home, plain, say, show
from swarmnode.node import identity as keys
from swarmnode.node.control.client import ControlError, NotRunning
from swarmnode.node.invite import is_link
from swarmnode.node.storage.datadir import DataDir, write_atomic


def identify(
    peer: Annotated[
        str | None,
        typer.Argument(
            metavar="[PEER]", help="Another node: peer id, as peers prints it, or a multiaddr. [default: this node]"
        ),
    ] = None,
    join: Annotated[
        bool,
        typer.Option("--join", help="Print the line that joins this node elsewhere, and a QR code. [default: peer id]"),
    ] = False,
    mine: Annotated[
        int | None,
        typer.Option(
            "--mine",
            min=1,
            max=40,
            metavar="BITS",
            help="Make a key with so many bits of work, as runs may ask for; each doubles the time. [default: none]",
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="Name the node for its peers, 1 to 32 characters. [default: none]"),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="With --mine: move a key with less work aside. [default: keep it]")
    ] = False,
    passphrase_file: PassphraseOption = None,
) -> None:
    """Print the node's peer id, or what another node says of itself.

    A key is made on first use.

    swarmnode id --name "Anna's desktop" names the node: peers see it beside the peer id. Names are not unique.

    swarmnode id --mine 20 makes a key that cost a million tries, for runs that admit no cheaper ones ([trust]
    identity_bits); some half a minute on one core. The node must not be running.

    Example: swarmnode id --join
    """
    if peer is not None:
        if join or replace or mine is not None or name is not None:
            raise UsageMistake("--join, --mine, --name and --replace are about this node; leave PEER out")
        _print_other(peer)
        return
    if join:
        _print_join()
        return
    home, passphrase = own_home(passphrase_file)
    home.prepare()
    if mine is not None:
        _mine(home, passphrase, mine, replacing=replace)
    identity = keys.load_or_create(home.identity, passphrase)
    if name is not None:
        if not name.strip() or keys.cleaned(name) != name.strip():
            raise UsageMistake(f"--name: a name has 1 to {keys.NAME_LENGTH} printable characters")
        write_atomic(home.name, keys.cleaned(name).encode())
        if home.holder() is not None:
            say("peers see the name once the node is started again: swarmnode stop, then swarmnode run")
    called = keys.named(keys.agent("", home.name))[1]
    told = {"peer_id": identity.peer_id, "name": called, "data_dir": str(home.path), "key": str(home.identity)}
    text = f"{identity.peer_id}  {called}" if name is not None else identity.peer_id
    show({**told, "work_bits": keys.work_of(identity)}, text)


def _print_other(peer: str) -> None:
    """What identify says of a node, which is connected for that where it is not yet."""
    answer = ask("peer", timeout=40.0, peer=peer, identify=True)
    said = answer["identify"]
    rows = [
        ("agent", [said["agent"]]),
        ("speaks", [said["protocol_version"]]),
        ("public key", [f"Ed25519 {answer['public_key']}"]),
        ("addresses", said["addresses"]),
        ("sees us at", [said["sees_this_node_at"]]),
        ("protocols", said["protocols"]),
    ]
    lines = [line for label, texts in rows for line in beside(label, [plain(text, 160) for text in texts])]
    told = {key: answer[key] for key in ("peer_id", "name", "public_key", "path", "relay", "transport")}
    show({**told, **said}, [answer["peer_id"], *lines])


def _mine(home: DataDir, passphrase: bytes | None, bits: int, *, replacing: bool) -> None:
    """Have a key of so many bits of work in the data directory, which no daemon may hold meanwhile."""
    with home:
        if home.identity.exists():
            has = keys.work_of(keys.load(home.identity, passphrase))
            if has >= bits:
                say(f"the key that is there has {has} bits of work already")
                return
            if not replacing:
                raise keys.IdentityError(
                    f"{home.identity}: there is a key already, with {has} bits of work. A new key is a new peer id, "
                    "without the standing of the old one; --replace moves the old key aside"
                )
        expected = 2**bits

        watched = sys.stderr.isatty() and not as_json()

        def progress(tried: int, rate: float) -> None:
            text = f"{tried:,} keys tried, {rate:,.0f} a second; {expected:,} are needed on average"
            if watched:
                print(f"\r{text:<78}", end="", file=sys.stderr, flush=True)

        key = keys.mine(bits, progress=progress)
        if watched:
            print(file=sys.stderr)
        aside = keys.replace(home.identity, passphrase, key)
        if aside is not None:
            say(f"the old key is now {aside}")


def _print_join() -> None:
    answer = ask("status", timeout=10.0)
    if not answer["join"]:
        raise ControlError(
            "the node has no address yet that others could dial. Wait a moment, or name one with --announce when it "
            "starts; swarmnode status says how it is reachable."
        )
    if answer["addresses"][0].startswith(("/ip4/127.", "/ip6/::1/")):
        say("from this machine only: others cannot dial it, as it listens here only")
    run = answer["run"] or {}
    told = {"join": answer["join"], "addresses": answer["addresses"]}
    shown = [answer["join"], _picture(answer["join"].split()[-1]) if sys.stdout.isatty() else ""]
    show({**told, "run_id": run.get("run_id"), "roster": run.get("roster")}, shown)


def _picture(link: str) -> str:
    """The link as a QR code for a terminal; a multiaddr has none. In capitals, which take less room in it."""
    if not is_link(link):
        return ""
    import segno

    drawn = io.StringIO()
    segno.make(link.upper(), error="l").terminal(drawn, compact=True)
    return drawn.getvalue()


def version() -> None:
    """Print the versions of swarmnode, Python and the daemon.

    Example: swarmnode version --json
    """
    try:
        daemon = ask("status", timeout=5.0)["version"]
    except (NotRunning, ControlError):
        daemon = None
    python = platform.python_version()
    text = f"swarmnode {__version__} (Python {python})"
    if daemon is not None and daemon != __version__:
        text += f"\nthe running daemon is {daemon}; restart it to use {__version__}"
    show({"version": __version__, "python": python, "daemon": daemon}, text)
