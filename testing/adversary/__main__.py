"""`python -m swarmnode.testing.adversary LIE run --join …`: an adversary of a local swarm. `swarmnode local` starts it.

It takes the arguments that a local swarm gives its nodes. It refuses to begin a run, and to listen or to dial anywhere
but on loopback. The package's first lines say why.
"""

from __future__ import annotations

import argparse
import ipaddress
import os
import sys
from collections.abc import Sequence

from swarmnode.cli.local.attack import LIES
from swarmnode.node import assembly, daemon
from swarmnode.node.config import NodeConfig, load_config
from swarmnode.node.exitcodes import CONFIG, ExpectedError, UsageMistake
from swarmnode.node.session import METHODS
from swarmnode.testing.adversary.disguise import methods_with, trainer_with
from swarmnode.training.options import SettingError

_FOREIGN = ("SWARMNODE_JOIN", "SWARMNODE_ANNOUNCE", "SWARMNODE_LISTEN", "SWARMNODE_MDNS", "SWARMNODE_UPNP")


def main(arguments: Sequence[str]) -> int:
    """Run the node; the exit code."""
    told = _parser().parse_args(arguments)
    flags = {key: getattr(told, key) for key in ("data_dir", "listen", "port", "threads")}
    flags |= {"join": (told.join,), "mdns": False, "upnp": False, "role": "train"}
    environ = {key: value for key, value in os.environ.items() if key not in _FOREIGN}
    try:
        loaded = load_config(None, environ, flags)
        stay_here(loaded.config)
        METHODS.update(methods_with(told.lie, dict(METHODS)))
        assembly.make_trainer = trainer_with(told.lie, assembly.make_trainer)
        options = assembly.RunOptions(None, told.run, told.rounds, stay=True, json_events=True)
        return daemon.run_daemon(loaded, options)
    except (ExpectedError, SettingError) as error:
        print(f"adversary: {error}", file=sys.stderr)
        return getattr(error, "exit_code", CONFIG)


def stay_here(config: NodeConfig) -> None:
    """Raises UsageMistake unless the node can be reached, and reaches others, on this machine alone."""
    if not config.join:
        raise UsageMistake("an adversary begins no run; it joins the local swarm that started it")
    for address in config.join:
        parts = address.split("/")
        if len(parts) < 3 or parts[1] not in ("ip4", "ip6") or not _is_loopback(parts[2]) or "p2p-circuit" in parts:
            raise UsageMistake(f"{address} is not on loopback; adversaries join local swarms only")
    if not _is_loopback(config.listen):
        raise UsageMistake(
            f"--listen {config.listen} is not on loopback; adversaries are reached from this machine only"
        )
    if config.announce or config.mdns or config.upnp:
        raise UsageMistake("an adversary announces itself nowhere")


def _is_loopback(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m swarmnode.testing.adversary", allow_abbrev=False)
    parser.add_argument("lie", choices=sorted(LIES))
    parser.add_argument("command", choices=("run",))
    parser.add_argument("--join", required=True, metavar="MULTIADDR", help="on loopback")
    parser.add_argument("--run", required=True, metavar="RUN_ID")
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--listen", default="127.0.0.1", metavar="IP", help="on loopback")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, required=True)
    for flag in ("--no-mdns", "--no-dashboard", "--stay", "--json"):
        parser.add_argument(flag, action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
