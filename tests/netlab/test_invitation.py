"""Behind a NAT nobody can dial: a node gets a place at a relay, says its invitation again, and it leads in."""

from __future__ import annotations

import re
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from agents import FLAGS, PORT, Relay
from lab import Host, Lab
from realnodes import PROGRAM, RUN_TOML, environment

from swarmnode.node.invite import decode

pytestmark = pytest.mark.slow

WITHIN = 60.0  # s, on a machine that has other things to do
LINE = re.compile(r"^  swarmnode (join \S+)$", re.MULTILINE)
AGAIN = "Others can dial this node now."


class Person:
    """Somebody who types a command into the terminal of a machine, and reads what it says."""

    def __init__(self, host: Host, home: Path, *command: str | Path) -> None:
        self._home = home
        home.mkdir()
        typed = [*host.enter, str(PROGRAM), *map(str, command)]
        options = ["--data-dir", str(home / "data"), "--port", str(PORT), "--no-dashboard", "--no-mdns", *FLAGS]
        with (home / "said").open("wb") as said:
            self._process = subprocess.Popen([*typed, *options], stdout=said, stderr=said, env=environment())

    def __enter__(self) -> Person:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(timeout=WITHIN)

    @property
    def read(self) -> str:
        return (self._home / "said").read_text()

    def reads(self, text: str) -> str:
        """What stands on the terminal from `text` on."""
        until = time.monotonic() + WITHIN
        while text not in self.read:
            assert time.monotonic() < until and self._process.poll() is None, self.read
            time.sleep(0.1)
        return self.read.partition(text)[2]


def test_behind_a_nat_the_invitation_is_said_again_with_a_relay_and_leads_in(
    lab: Lab, two_relays: list[Relay], tmp_path: Path
) -> None:
    run = tmp_path / "run.toml"
    run.write_text(RUN_TOML.replace("[model]", 'nonce = "00"\n[model]', 1))
    corpus = tmp_path / "text"
    corpus.write_text("".join(f"{n} bottles, {n * n} glasses and {n**3} drops\n" for n in range(8000)))
    routers = [lab.nat(f"invites{n}", "symmetric") for n in range(2)]
    homes = [lab.private(f"inviting{n}", router) for n, router in enumerate(routers)]
    lab.cut(routers[0])
    with ExitStack() as stack:
        first = Person(homes[0], tmp_path / "a", "run", run, "--join", two_relays[0].address, "--corpus", corpus)
        stack.enter_context(first)
        first.reads("is ready: ")
        lab.cut(routers[0], off=False)
        again = first.reads(AGAIN)
        line = LINE.search(again)
        assert line is not None, again
        command = line[1].split()
        assert all("/p2p-circuit/" in address for address in decode(command[-1]).addresses), line[1]
        second = stack.enter_context(Person(homes[1], tmp_path / "b", *command))
        second.reads("is ready: ")
        second.reads("2 members")
        assert first.read.count(AGAIN) == 1
    lab.take_down(*(name for name in lab.machines() if name.startswith("invit")))
