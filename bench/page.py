"""What the page costs its daemon while it is closed, open and hidden; prints JSON lines. Wants chromium.

    .venv/bin/python bench/page.py [--seconds 30] [--repeats 3] [--paused]

A node trains alone, in rounds of some seconds; beside it another one does the same with --no-dashboard. In each turn
the CPU time of both daemons (the trainers' is not in it) is taken with the page closed, open in a tab that is seen, and
open in a tab that is hidden, each for --seconds. `cpu` is the share of a core, `without` that of the other one
in the same seconds; `to_closed` what it is of the closed page's in the same turn; `requests` what the page asked
meanwhile, streams that it opened included. The last line has the medians, and as `page` the medians of cpu - without:
what the page costs. The exit code is 1 where the open page takes 1 % of a core more than the closed one, or the hidden
one asks anything, or the closed or hidden one costs more than NOTHING.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from pair import cpu_seconds

from swarmnode.node.control.client import ControlClient, ControlError, NotRunning

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from browser import Browser, Page

RUN = """
[run]
name = "page"
[model]
layers = 2
heads = 4
width = 64
context = 64
[inner]
steps = 200
"""
WITHIN = 240.0  # s until the nodes have begun, on a busy machine
HOW = ("closed", "open", "hidden")
SETTLED = 3.0  # s from when the page is opened or hidden until it is measured
MOST = 0.01  # of a core, more than closed
NOTHING = 0.001  # of a core: what two equal nodes differ by


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--paused", action="store_true", help="have both nodes train nothing meanwhile")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="page-") as folder, Browser() as browser:
        home, bare, run, text = (Path(folder) / name for name in ("node", "bare", "run.toml", "corpus.txt"))
        run.write_text(RUN)
        text.write_text(" ".join(random.Random(1).choices(["alpha", "beta", "gamma", "delta", "epsilon"], k=40_000)))
        program = [sys.executable, "-m", "swarmnode", "run", str(run), "--corpus", str(text), "--port", "0", "--json"]
        program += ["--listen", "127.0.0.1", "--no-mdns", "--no-upnp", "--threads", "1"]
        places = ((home, "127.0.0.1:0"), (bare, "off"))
        node, other = nodes = [
            subprocess.Popen([*program, "--data-dir", str(place), "--dashboard", page], stdout=subprocess.DEVNULL)
            for place, page in places
        ]
        try:
            for place, _ in places:
                wait_for_round(place)
                if chosen.paused:
                    ControlClient(place).call("pause")
            opened = [sys.executable, "-m", "swarmnode", "open", "--print", "--json", "--data-dir", str(home)]
            address = json.loads(subprocess.run(opened, capture_output=True, check=True).stdout)["address"]
            turns = [one_turn(browser, address, (node.pid, other.pid), chosen.seconds) for _ in range(chosen.repeats)]
        finally:
            for each in nodes:
                each.terminate()
                each.wait()
    took = {how: median(turn[how][0] for turn in turns) for how in HOW}
    page = {how: median(turn[how][0] - turn[how][1] for turn in turns) for how in HOW}
    asked = sum(turn["hidden"][2] for turn in turns)
    holds = took["open"] - took["closed"] <= MOST and max(page["closed"], page["hidden"]) <= NOTHING and not asked
    told: dict[str, object] = {how: round(share, 5) for how, share in took.items()}
    told["page"] = {how: round(share, 5) for how, share in page.items()}
    print(json.dumps({**told, "asked_hidden": asked, "load": round(os.getloadavg()[0], 1), "holds": holds}))
    return 0 if holds else 1


def one_turn(
    browser: Browser, address: str, daemons: tuple[int, int], seconds: float
) -> dict[str, tuple[float, float, int]]:
    """(share of a core, that of the daemon without a page, requests of the page) with it closed, open and hidden."""
    found: dict[str, tuple[float, float, int]] = {}
    page: Page | None = None
    for how in HOW:
        if how == "open":
            page = browser.open(address)
            page.wait("document.querySelector('#link').innerText === 'live'", within=WITHIN)
        elif page is not None:
            page.hide()
        time.sleep(SETTLED)
        asked, spent, began = requests_of(page), [cpu_seconds(each) for each in daemons], time.monotonic()
        time.sleep(seconds)
        lasted = time.monotonic() - began
        cpu, without = ((cpu_seconds(each) - before) / lasted for each, before in zip(daemons, spent, strict=True))
        found[how] = cpu, without, requests_of(page) - asked
        line = {"page": how, "cpu": round(cpu, 5), "without": round(without, 5)}
        line["to_closed"] = round(cpu / found["closed"][0], 3)
        print(json.dumps({**line, "requests": found[how][2]}), flush=True)
    if page is not None:
        page.call("Page.close")
    return found


def requests_of(page: Page | None) -> int:
    """What it asked so far; what the browser told meanwhile is read first."""
    if page is not None:
        page.js("0")
    return len(page.requests) if page is not None else 0


def wait_for_round(home: Path) -> None:
    give_up = time.monotonic() + WITHIN
    while time.monotonic() < give_up:
        try:
            if ((ControlClient(home).call("status")["run"] or {}).get("round") or 0) > 1:
                return
        except (NotRunning, ControlError):
            pass
        time.sleep(0.5)
    raise SystemExit("the node began no round")


if __name__ == "__main__":
    sys.exit(main())
