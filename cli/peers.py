"""Commands about other nodes and the ways to them: peers, ping, bw, dht."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Annotated, Any

import typer

from swarmnode.cli.terminal import (
    DataDirOption,
    JsonOption,
    UsageMistake,
    as_json,
    ask,
    beside,
    called,
    duration,
    group,
    heed,
    live,
    number_of,
    plain,
    say,
    short_peer,
    show,
    size,
    table,
)
from swarmnode.cli.views import path_of
from swarmnode.node.control.client import ControlError

PING_TIMEOUT = 20.0  # s for one ping, connecting included
PING_EVERY = 1.0  # s
PUNCH_EVERY = 10  # pings through a relay between two asks to replace it
GIVE_UP = 10  # pings in a row without an answer
LOOKUP_TIMEOUT = 30.0  # s; a lookup ends by itself after 5
KEY_HELP = "64 hex digits (as a shard's id), a peer id, run/RUN_ID, relays, or catalogue."

PeerArgument = Annotated[
    str, typer.Argument(metavar="PEER", help="Peer id, a connected peer's as peers prints it, or a multiaddr.")
]

peers = group("List the connected peers; look at one, connect, block.")


@peers.callback(invoke_without_command=True, no_args_is_help=False)
def list_peers(context: typer.Context, data_dir: DataDirOption = None, json_output: JsonOption = False) -> None:
    """List the connected peers; look at one, connect, block."""
    if context.invoked_subcommand is not None:
        if data_dir is not None or json_output:
            raise UsageMistake(f"options stand at the end: swarmnode peers {context.invoked_subcommand} … --json")
        return
    heed(data_dir, json_output)
    answer = ask("peers", timeout=10.0)
    for kept in answer["kept_out"]:
        say(f"{short_peer(kept['peer_id'])} is kept out for {duration(kept['for_s'])} more: {plain(kept['why'], 80)}")
    for blocked in answer["blocked"]:
        say(f"{short_peer(blocked)} is blocked: swarmnode peers unblock {blocked[-6:]}")
    rows = [
        (
            called(peer),
            "-" if peer["rtt_ms"] is None else f"{peer['rtt_ms']:.0f} ms",
            path_of(peer) + (" in" if peer["inbound"] else " out"),
            duration(peer["age_s"]),
            "-" if peer["round"] is None else str(peer["round"]),
            "yes" if peer["member"] else "no",
            peer["standing"],
            plain(peer["agent"] or "-", 24),
            "-" if peer["relay"] else plain(peer["address"].partition("/p2p/")[0], 48),
        )
        for peer in sorted(answer["peers"], key=lambda p: (not p["member"], p["peer_id"]))
    ]
    heads = ("PEER", "RTT", "PATH", "SINCE", "ROUND", "MEMBER", "STANDING", "AGENT", "ADDRESS")
    nobody = "no peers. Print the line for another machine with: swarmnode id --join"
    show(answer, table(heads, rows, right=frozenset({1, 3, 4})) or nobody)


@peers.command("show")
def show_peer(peer: PeerArgument) -> None:
    """Show all that this node knows of a peer.

    That is addresses, protocols, paths and why they changed, traffic, and why it stands as it does; of a peer that is
    not connected, what is remembered. Example: swarmnode peers show zNgh7
    """
    answer = ask("peer", peer=peer)
    show(answer, (line for label, texts in _known_of(answer) for line in beside(label, texts)))


@peers.command()
def connect(peer: PeerArgument) -> None:
    """Connect to a peer now.

    That is at a multiaddr, or by its id, whose addresses are looked up in the DHT.

    Example: swarmnode peers connect /ip4/192.0.2.7/tcp/4077
    """
    _link(peer, "connected")


@peers.command()
def disconnect(peer: PeerArgument) -> None:
    """Close all connections to a peer now.

    It may connect again; block keeps it out. Example: swarmnode peers disconnect zNgh7
    """
    _link(peer, "disconnected")


@peers.command()
def block(peer: PeerArgument) -> None:
    """Disconnect a peer and keep it out.

    That lasts until unblock, also over restarts. Others go on to speak with it. Example: swarmnode peers block zNgh7
    """
    _link(peer, "blocked")


@peers.command()
def unblock(peer: PeerArgument) -> None:
    """Let a peer in again.

    One that was blocked, or is kept out for what it did.

    Example: swarmnode peers unblock zNgh7
    """
    _link(peer, "unblocked")


def _link(peer: str, to: str) -> None:
    answer = ask("link", timeout=40.0, peer=peer, to=to)
    now = "not connected" if answer["path"] == "none" else f"connected: {_way(answer)}"
    if to == "unblocked":
        now = f"{'let in again' if answer['barred_before'] else 'it was not blocked'}, {now}"
    elif to == "disconnected" and answer["path"] != "none":
        now = f"disconnected, and one of the two dialled the other again at once: {now}"
    show(answer, f"{answer['peer_id']}: {'blocked, ' if answer['blocked'] else ''}{now}")


def _way(way: dict[str, Any]) -> str:
    """`direct over tcp`, `through the relay 12D3…zNgh7 over tcp`, `not connected`."""
    if way["path"] == "none":
        return "not connected"
    over = f" over {plain(way['transport'], 24)}" if way["transport"] else ""
    return (f"through the relay {short_peer(way['relay'])}" if way["relay"] else plain(way["path"], 12)) + over


def _known_of(peer: dict[str, Any]) -> Iterator[tuple[str, Iterable[str]]]:
    """What is shown of a peer, as labels and lines."""
    member = "a member of this node's run" if peer["member"] else "no member of this node's run"
    yield "peer", [f"{called(peer)}, {plain(peer['agent'] or 'program not known', 48)}, {member}"]
    rtt = f", {peer['rtt_ms']:.0f} ms" if peer["rtt_ms"] is not None and peer["path"] != "none" else ""
    yield "path", [_way(peer) + rtt]
    yield "connections", map(_connection, peer["connections"])
    yield "addresses", [plain(address, 160) for address in peer["addresses"]] or ["none known"]
    yield "protocols", [plain(each, 80) for each in peer["protocols"]] or ["not told yet"]
    yield "standing", _standing(peer["scoring"])
    if peer["score"] is not None:
        yield "score", [f"{peer['score']:.2f} for its work; swarmnode scores {peer['peer_id'][-6:]} --why"]
    rows = [(plain(name, 60), size(each["in"]), size(each["out"])) for name, each in peer["traffic"].items()]
    yield "traffic", table(("PROTOCOL", "IN", "OUT"), rows, right=frozenset({1, 2})).splitlines()
    changes = (
        f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(each['at']))}  {each['path']:<8} {plain(each['why'], 160)}"
        for each in peer["history"]
    )
    yield "history", changes


def _connection(each: dict[str, Any]) -> str:
    side = "it dialled" if each["inbound"] else "dialled from here"
    rtt = "" if each["rtt_ms"] is None else f", {each['rtt_ms']:.0f} ms"
    streams = number_of(each["streams"], "stream")
    return f"{plain(each['address'], 100)}, {_way(each)}, {side} {duration(each['age_s'])} ago, {streams}{rtt}"


def _standing(told: dict[str, Any]) -> Iterator[str]:
    falls = ", ".join(f"{word} from {points:g}" for word, points in told["falls_at"].items())
    yield (
        "blocked by this node's owner"
        if told["blocked"]
        else told["standing"] + (f" for {duration(told['banned_for_s'])} more" if told["banned_for_s"] else "")
    )
    yield f"{told['points']:g} points for what it did wrong ({falls}; half of them fade in {told['half_life_s']:g} s)"
    for protocol, kinds in told["violations"].items():
        yield f"{plain(protocol, 60)}: {', '.join(f'{count} {kind}' for kind, count in kinds.items())}"
    if told["last"]:
        yield f"the last: {plain(told['last'], 120)}"


# --- ping ------------------------------------------------------------------------------------------------------------


def ping(
    peer: PeerArgument,
    count: Annotated[
        int | None,
        typer.Option("--count", "-c", min=1, metavar="COUNT", help="Round trips. [default: until one is direct]"),
    ] = None,
) -> None:
    """Measure round trips to a peer until one went directly.

    Ctrl-C ends it with a summary. Each says which way it went. While it is through a relay, the node tries to connect
    directly. Example: swarmnode ping zNgh7 --count 4
    """
    rtts: list[float] = []
    ways: list[dict[str, Any]] = []
    sent = silent = 0
    with suppress(KeyboardInterrupt):
        while sent < count if count else not (ways and ways[-1]["path"] == "direct"):
            if sent:
                time.sleep(PING_EVERY)
            punch = bool(ways) and ways[-1]["path"] == "relayed" and sent % PUNCH_EVERY == 1
            sent += 1
            try:
                answer = ask("ping", timeout=PING_TIMEOUT, peer=peer, punch=punch)
            except ControlError as error:
                silent += 1
                if not rtts or silent == GIVE_UP:
                    raise
                _print_reply(str(error))
                continue
            silent, peer = 0, answer["peer_id"]  # the same one, also where an address was named
            rtts.append(answer["rtt_ms"])
            ways.append(answer["way"])
            _print_reply(f"{peer}: {rtts[-1]:.1f} ms {_way(ways[-1])}")
    if not rtts:
        raise ControlError(f"{peer} has not answered yet; try each way: swarmnode netcheck {peer}")
    path, relays = ways[-1]["path"], [way["relay"] for way in ways]
    told = {"peer_id": peer, "rtts_ms": rtts, "relays": relays, "ways": ways, "sent": sent, "path": path}
    show(told, f"{len(rtts)} of {sent} answered, {path}: {min(rtts):.1f} to {max(rtts):.1f} ms")


def _print_reply(text: str) -> None:
    if not as_json():
        print(plain(text), flush=True)


# --- bw --------------------------------------------------------------------------------------------------------------


def bw(
    peer: Annotated[
        str | None, typer.Option("--peer", metavar="PEER", help="Only with this peer. [default: all]")
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option("--protocol", metavar="PROTOCOL", help="Only those whose names have this in them. [default: all]"),
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Refresh until Ctrl-C. [default: print once]")] = False,
    interval: Annotated[
        float, typer.Option(min=0.2, max=3600, metavar="SECONDS", help="Time over which rates are measured.")
    ] = 1.0,
) -> None:
    """Show the traffic by protocol and by peer.

    Bytes so far, and a second. Protocols count bytes of streams, the total those at the sockets.
    Example: swarmnode bw --protocol shards --watch
    """

    def answers() -> Iterator[dict[str, Any]]:
        before = ask("traffic", timeout=10.0, peer=peer)
        while True:
            time.sleep(interval)
            now = ask("traffic", timeout=10.0, peer=peer)
            yield _with_rates(now, before, protocol)
            before = now

    screens = ((answer, _traffic(answer)) for answer in answers())
    if watch:
        live(screens, 0.0)
    else:
        show(*next(screens))


def _with_rates(now: dict[str, Any], before: dict[str, Any], protocol: str | None) -> dict[str, Any]:
    """An answer of `traffic` with rates in bytes/s since the one before, and the protocols that are wanted."""
    seconds = max(now["time"] - before["time"], 1e-3)

    def rated(new: dict[str, int], old: dict[str, int]) -> dict[str, float]:
        rates = {f"rate_{way}": round(max(0, new[way] - old.get(way, 0)) / seconds, 1) for way in ("in", "out")}
        return {"in": new["in"], "out": new["out"], **rates}

    def each(kind: str) -> dict[str, dict[str, float]]:
        return {name: rated(counted, before[kind].get(name, {})) for name, counted in now[kind].items()}

    wanted = {name: told for name, told in each("protocols").items() if (protocol or "") in name}
    if protocol and not wanted:
        raise UsageMistake(f"no protocol with {protocol!r} in its name has had traffic; swarmnode bw lists them")
    return {"total": rated(now, before), "protocols": wanted, "peers": each("peers")}


def _traffic(answer: dict[str, Any]) -> str:
    def row(name: str, told: dict[str, float]) -> tuple[str, ...]:
        return (name, size(told["in"]), size(told["out"]), f"{size(told['rate_in'])}/s", f"{size(told['rate_out'])}/s")

    columns, right = ("IN", "OUT", "IN NOW", "OUT NOW"), frozenset({1, 2, 3, 4})
    most = lambda told: -told[1]["in"] - told[1]["out"]  # noqa: E731
    protocols = [row(plain(name, 48), told) for name, told in sorted(answer["protocols"].items(), key=most)]
    peers = [row(short_peer(name), told) for name, told in sorted(answer["peers"].items(), key=most)]
    tables = [table(("PROTOCOL", *columns), protocols, right=right), table(("PEER", *columns), peers, right=right)]
    return "\n\n".join(filter(None, [table(("TOTAL", *columns), [row("", answer["total"])], right=right), *tables]))


# --- dht -------------------------------------------------------------------------------------------------------------

KeyArgument = Annotated[str, typer.Argument(metavar="KEY", help=KEY_HELP)]

dht = group("Look up peers, providers and keys in the DHT.")


@dht.command()
def find(peer: Annotated[str, typer.Argument(metavar="PEER", help="The whole peer id.")]) -> None:
    """Find where a peer can be dialled, as others say.

    Example: swarmnode dht find 12D3KooWBzHKPFNxhKvV8RBYHb3epemWjkghamekAbj3kLedSqEP
    """
    answer = ask("dht", timeout=LOOKUP_TIMEOUT, find=peer)
    found = [plain(address, 200) for address in answer["addresses"]] or [f"nobody says where {answer['peer_id']} is"]
    show(answer, [*found, _asked(answer)])


@dht.command()
def providers(key: KeyArgument) -> None:
    """Find who announced KEY.

    That is who has a shard, takes part in a run, or relays. Example: swarmnode dht providers relays
    """
    answer = ask("dht", timeout=LOOKUP_TIMEOUT, providers=key)
    show(answer, [*_listed(answer["providers"], "nobody announced it"), _asked(answer)])


@dht.command()
def query(key: KeyArgument) -> None:
    """Find the peers closest to KEY.

    They keep what is stored there; the closest comes first. Example: swarmnode dht query catalogue
    """
    answer = ask("dht", timeout=LOOKUP_TIMEOUT, query=key)
    show(answer, [*_listed(answer["closest"], "nobody"), _asked(answer)])


@dht.command()
def stats() -> None:
    """Show how large this node's part in the DHT is.

    That is its routing table, and what it keeps for others. Example: swarmnode dht stats --json
    """
    answer = ask("dht", timeout=10.0)
    kept = [bucket for bucket in answer["table"] if bucket]
    sizes = f", with {', '.join(str(len(bucket)) for bucket in kept)} of them" if len(kept) > 1 else ""
    in_table = number_of(sum(map(len, kept)), "peer")
    lines = [
        f"routing table  {in_table} in {number_of(len(kept), 'bucket')}{sizes}",
        f"connected      {number_of(answer['connected'], 'peer')} of the DHT",
        f"announced      {number_of(answer['provided_keys'], 'key')} by this node",
        f"kept           providers of {number_of(answer['provider_keys'], 'key')}, for others",
    ]
    show(answer, lines)


def _listed(found: list[dict[str, Any]], nobody: str) -> list[str]:
    """A peer a line, with the first address that is known of it."""
    return [f"{each['peer_id']}  {plain(' '.join(each['addresses'][:1]), 160)}".rstrip() for each in found] or [nobody]


def _asked(answer: dict[str, Any]) -> str:
    return f"({number_of(answer['asked'], 'peer')} answered in {answer['seconds']:.2f} s)"
