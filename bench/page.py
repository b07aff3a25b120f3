"""What the page costs its daemon while it is closed, open and hidden; prints JSON lines. Wants chromium.

    .venv/bin/python bench/page.py [--seconds 30] [--repeats 3]

A node trains alone, in rounds of some seconds. In each turn its daemon's CPU time (the trainer's is not in it) is taken
with the page closed, open in a tab that is seen, and open in a tab that is hidden, each for --seconds. `cpu` is the
share of a core; `to_closed` what it is of the closed page's in the same turn; `requests` what the page asked meanwhile,
streams that it opened included. The last line has the medians. The exit code is 1 where the open page takes 1 % of a
core more than the closed one, or the hidden one asks anything or takes more than a tenth over the closed one's.
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
WITHIN = 60.0  # s until the node has begun
SETTLED = 3.0  # s from when the page is opened or hidden until it is measured
MOST = 0.01  # of a core, more than closed
NOTHING = 1.1  # times the closed page's: what one measurement is beside the next


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--repeats", type=int, default=3)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="page-") as folder, Browser() as browser:
        home, run, text = Path(folder) / "node", Path(folder) / "run.toml", Path(folder) / "corpus.txt"
        run.write_text(RUN)
        text.write_text(" ".join(random.Random(1).choices(["alpha", "beta", "gamma", "delta", "epsilon"], k=40_000)))
        options = [str(run), "--corpus", str(text), "--data-dir", str(home), "--port", "0", "--listen", "127.0.0.1"]
        options += ["--no-mdns", "--no-upnp", "--threads", "1", "--dashboard", "127.0.0.1:0", "--json"]
        node = subprocess.Popen([sys.executable, "-m", "swarmnode", "run", *options], stdout=subprocess.DEVNULL)
        try:
            wait_for_round(home)
            opened = [sys.executable, "-m", "swarmnode", "open", "--print", "--json", "--data-dir", str(home)]
            address = json.loads(subprocess.run(opened, capture_output=True, check=True).stdout)["address"]
            turns = [one_turn(browser, address, node.pid, chosen.seconds) for _ in range(chosen.repeats)]
        finally:
            node.terminate()
            node.wait()
    closed, seen, hidden = (median(turn[how][0] for turn in turns) for how in ("closed", "open", "hidden"))
    ratio = median(turn["hidden"][0] / turn["closed"][0] for turn in turns)
    asked = sum(turn["hidden"][1] for turn in turns)
    holds = seen - closed <= MOST and ratio <= NOTHING and not asked
    told = {"closed": round(closed, 5), "open": round(seen, 5), "hidden": round(hidden, 5)}
    print(json.dumps({**told, "hidden_to_closed": round(ratio, 3), "asked_hidden": asked, "holds": holds}))
    return 0 if holds else 1


def one_turn(browser: Browser, address: str, daemon: int, seconds: float) -> dict[str, tuple[float, int]]:
    """(share of a core, requests of the page) with it closed, open and hidden."""
    found: dict[str, tuple[float, int]] = {}
    page: Page | None = None
    for how in ("closed", "open", "hidden"):
        if how == "open":
            page = browser.open(address)
            page.wait("document.querySelector('#link').innerText === 'live'", within=WITHIN)
        elif page is not None:
            page.hide()
        time.sleep(SETTLED)
        asked, spent, began = requests_of(page), cpu_of(daemon), time.monotonic()
        time.sleep(seconds)
        cpu = (cpu_of(daemon) - spent) / (time.monotonic() - began)
        found[how] = cpu, requests_of(page) - asked
        line = {"page": how, "cpu": round(cpu, 5), "to_closed": round(cpu / found["closed"][0], 3)}
        print(json.dumps({**line, "requests": found[how][1]}), flush=True)
    if page is not None:
        page.call("Page.close")
    return found


def requests_of(page: Page | None) -> int:
    """What it asked so far; what the browser told meanwhile is read first."""
    if page is not None:
        page.js("0")
    return len(page.requests) if page is not None else 0


def cpu_of(process: int) -> float:
    """Seconds of CPU that a process took by now."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
