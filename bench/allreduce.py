"""The all-reduce of four processes on this machine, beside hivemind's, as JSON lines.

    python bench/allreduce.py [--parameters 50M,1M] [--codecs fp16,int8] [--rounds 5]
                              [--baseline hivemind [--hivemind-python PATH]]
                              [--kill] [--freeze] [--at 0.5] [--repeats 3]

A round's time is that from the word to all members until the last of them has its mean. `seconds` is the median of the
rounds, `fastest` and `slowest` their spread; two rounds before them, which take new memory, do not count (`first` is
one of them). `bytes_per_parameter` is what a member sends at its sockets, all overheads included; `cpu_s` the CPU
seconds of all members and of what they started; `identical` whether all of them hold the same bits.

The systems take turns round by round, so that what else the machine does (`load`) weighs on both: compare by the
`summary` line, the median of the ratios of neighbouring rounds. The baseline is hivemind's averager, which the
extra `bench` installs, in one group of four, its matchmaking done before the clock starts; int8 is compared with its
float32, which is what it replaces.

`--kill` and `--freeze` measure rounds of a run, whose members also agree on the roster and on the hash of the result:
one member gets SIGKILL, or SIGSTOP, halfway through a round or at the parts of its time in `--at`, and `ratio` is how
long that round took to one in which nobody fails. `computed`: how many survivors computed the result themselves; the
others, who had given the exchange up before it was decided, would now fetch it from them. `exact`: the mean of those is
that of the survivors' values, bit for bit (codecs but fp32 round: `error` is the largest difference).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pair

MEMBERS = 4
HERE = Path(__file__).resolve().parent
AGAINST = {"fp32": "fp32", "bf16": "fp16", "fp16": "fp16", "int8": "fp32"}  # ours: what of hivemind's it stands against
WARM = 2  # rounds that take new memory: a second lot is used while what the round before offered stands


def emit(**figures: Any) -> None:
    """One JSON line."""
    print(json.dumps(figures), flush=True)


class Group:
    """The processes of one system: each does what it is told and answers with a line."""

    def __init__(self, system: str, python: str, *options: str, members: int = MEMBERS) -> None:
        self.system, self.members = system, members
        script = HERE / "_allreduce" / f"{system}_member.py"
        self.processes = [
            subprocess.Popen(
                [python, str(script), str(index), str(members), *options],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for index in range(members)
        ]
        self.peers: list[str] = []
        addresses: list[str] = []
        for process in self.processes:  # each connects to those before it
            self.tell(process, do="start", addresses=addresses)
            place = self.answer(process)
            addresses = addresses + place["addresses"]
            self.peers.append(place.get("peer", ""))

    def tell(self, process: subprocess.Popen[str], **command: Any) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()

    def answer(self, process: subprocess.Popen[str]) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        raise SystemExit(f"a member of {self.system} ended")

    def all(self, only: list[int] | None = None, **command: Any) -> list[dict[str, Any]]:
        """The answers of these members, or of all, to one command."""
        chosen = [self.processes[i] for i in (range(self.members) if only is None else only)]
        for process in chosen:
            self.tell(process, **command)
        return [self.answer(process) for process in chosen]

    def prepare(self, parameters: int, codec: str, turn: int) -> None:
        self.all(do="prepare", parameters=parameters, codec_name=codec, members=self.peers, turn=turn)

    def round(self) -> dict[str, Any]:
        """One all-reduce: its seconds, and what the members found afterwards."""
        if not all(answer["grouped"] for answer in self.all(do="group")):
            raise SystemExit(f"{self.system} found no group")
        cpu, began = self.cpu_seconds(), time.perf_counter()
        done = self.all(do="round")
        seconds, cpu = time.perf_counter() - began, self.cpu_seconds() - cpu
        if any(answer["members"] != self.members for answer in done):
            raise SystemExit(f"{self.system} lost a member")
        found = self.all(do="hash")
        return {"seconds": seconds, "cpu": cpu, "found": found, "identical": len({each["hash"] for each in found}) == 1}

    def cpu_seconds(self) -> float:
        """CPU time of all processes of the system and of those that they started."""
        return sum(pair.cpu_seconds(pid) for process in self.processes for pid in family(process.pid))

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                self.tell(process, do="end")
        for process in self.processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def family(pid: int) -> list[int]:
    """A process and all below it."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(one for task in tasks for child in task.read_text().split() for one in family(int(child)))]


@contextmanager
def group(system: str, python: str, *options: str, members: int = MEMBERS) -> Iterator[Group]:
    """A system's members, ended with the block."""
    started = Group(system, python, *options, members=members)
    try:
        yield started
    finally:
        started.end()


def compare(chosen: argparse.Namespace) -> None:
    """Let the systems take turns, for each size and codec."""
    with ExitStack() as stack:
        ours = stack.enter_context(group("swarmnode", sys.executable, "--patient", members=chosen.members))
        baseline = stack.enter_context(group("hivemind", chosen.hivemind_python)) if has_baseline(chosen) else None
        cases = [(size, codec) for size in chosen.parameters for codec in chosen.codecs]
        for turn, (parameters, codec) in enumerate(cases):
            systems = {ours: codec} | ({baseline: AGAINST[codec]} if baseline else {})
            for system, its in systems.items():
                system.prepare(parameters, its, turn)
            rounds: dict[Group, list[dict[str, Any]]] = {system: [] for system in systems}
            for _ in range(WARM + chosen.rounds):
                for system, its_rounds in rounds.items():
                    its_rounds.append(system.round())
            for system, its_rounds in rounds.items():
                emit(
                    system=system.system,
                    parameters=parameters,
                    codec=systems[system],
                    **figures(its_rounds, parameters),
                )
            if baseline:
                pairs = list(zip(rounds[ours][WARM:], rounds[baseline][WARM:], strict=True))
                for figure in ("seconds", "cpu"):
                    ratios = [mine[figure] / its[figure] for mine, its in pairs]
                    emit(
                        summary="swarmnode / hivemind",
                        parameters=parameters,
                        codec=codec,
                        against=AGAINST[codec],
                        figure=figure,
                        ratio=round(statistics.median(ratios), 3),
                        least=round(min(ratios), 3),
                        most=round(max(ratios), 3),
                    )


def figures(rounds: list[dict[str, Any]], parameters: int) -> dict[str, Any]:
    """What the rounds of one system came to."""
    first, rest = rounds[0]["seconds"], [each["seconds"] for each in rounds[WARM:]]
    line: dict[str, Any] = {
        "seconds": round(statistics.median(rest), 3),
        "fastest": round(min(rest), 3),
        "slowest": round(max(rest), 3),
        "first": round(first, 3),
        "cpu_s": round(statistics.median(each["cpu"] for each in rounds[WARM:]), 2),
        "rounds": len(rest),
        "identical": all(each["identical"] for each in rounds),
    }
    found = [each["found"] for each in rounds[WARM:]]
    if "bytes_out" in found[0][0]:
        sent = [member["bytes_out"] for each in found for member in each]
        line["bytes_per_parameter"] = round(statistics.mean(sent) / parameters, 3)
    return {**line, "load": round(os.getloadavg()[0], 2)}


def has_baseline(chosen: argparse.Namespace) -> bool:
    """Whether hivemind was asked for and is there; says so where it is not."""
    if not chosen.baseline:
        return False
    if chosen.hivemind_python == sys.executable:
        found = importlib.util.find_spec("hivemind") is not None
    else:
        found = not subprocess.run([chosen.hivemind_python, "-c", "import hivemind"], capture_output=True).returncode
    if not found:
        emit(system="hivemind", skipped=f"hivemind is not installed for {chosen.hivemind_python}: the extra `bench`")
    return found


def fail(chosen: argparse.Namespace, what: str, stop: signal.Signals) -> None:
    """Rounds of runs in which one member gets `stop` at one of the moments, each in a group of its own."""
    for parameters in chosen.parameters:
        for codec in chosen.codecs:
            for number, moment in enumerate(chosen.at * chosen.repeats):
                with group("swarmnode", sys.executable) as members:
                    members.prepare(parameters, codec, number)
                    members.all(do="begin")
                    found = fail_once(members, number % MEMBERS, stop, moment)
                emit(system="swarmnode", what=what, at=moment, parameters=parameters, codec=codec, **found)


def fail_once(members: Group, victim: int, stop: signal.Signals, moment: float) -> dict[str, Any]:
    """Some rounds as they should be, and one in which the victim gets `stop` at `moment`, a part of the usual time."""
    usual = []
    for _ in range(WARM + 2):
        began = time.perf_counter()
        answers = members.all(do="agree")
        usual.append(time.perf_counter() - began)
        if any(len(answer["seats"]) != MEMBERS for answer in answers):
            return {"skipped": "a member was given up before anything failed: the machine is too busy"}
    normal = statistics.median(usual[WARM:])
    rest = [i for i in range(MEMBERS) if i != victim]
    began = time.perf_counter()
    for process in members.processes:
        members.tell(process, do="agree")
    time.sleep(normal * moment)
    members.processes[victim].send_signal(stop)
    answers = [members.answer(members.processes[i]) for i in rest]
    seconds = time.perf_counter() - began
    computed = [i for i, answer in zip(rest, answers, strict=True) if answer["computed"]]
    checks = members.all(computed, do="check", seats=answers[0]["seats"])
    return {
        "seconds": round(seconds, 3),
        "normal": round(normal, 3),
        "ratio": round(seconds / normal, 2),
        "attempts": answers[0]["attempts"],  # when they began, in seconds
        "seats": answers[0]["seats"],
        "identical": len({answer["hash"] for answer in answers}) == 1,
        "computed": len(computed),
        "error": round(max(check["error"] for check in checks), 6),
        "exact": all(check["exact"] for check in checks),
        "load": round(os.getloadavg()[0], 2),
    }


def count(text: str) -> int:
    """50M, 1M, 200k or a plain number."""
    return int(float(text.rstrip("kM")) * {"k": 1e3, "M": 1e6}.get(text[-1], 1))


def main() -> None:
    options = argparse.ArgumentParser(description="The all-reduce of four processes, as JSON lines.")
    options.add_argument("--parameters", default="50M,1M", help="sizes of the vector, for example 50M,1M")
    options.add_argument("--codecs", default="fp16,int8", help="of " + ", ".join(AGAINST))
    options.add_argument("--members", type=int, default=MEMBERS, help="processes; of a comparison always four")
    options.add_argument("--rounds", type=int, default=5, help="timed rounds of each")
    options.add_argument("--baseline", choices=("hivemind",), help="also measure this one")
    options.add_argument("--hivemind-python", default=sys.executable, help="interpreter that has hivemind")
    options.add_argument("--kill", action="store_true", help="measure rounds in which a member is killed instead")
    options.add_argument("--freeze", action="store_true", help="measure rounds in which a member is frozen instead")
    options.add_argument(
        "--at", default="0.5", help="when it fails, as parts of a usual round, for example 0.1,0.5,0.9"
    )
    options.add_argument(
        "--repeats", type=int, default=3, help="rounds with a failure at each moment, by other members"
    )
    chosen = options.parse_args()
    chosen.at = [float(moment) for moment in chosen.at.split(",")]
    chosen.parameters = [count(text) for text in chosen.parameters.split(",")]
    chosen.codecs = chosen.codecs.split(",")
    if not (chosen.kill or chosen.freeze):
        compare(chosen)
    if chosen.kill:
        fail(chosen, "kill", signal.SIGKILL)
    if chosen.freeze:
        fail(chosen, "freeze", signal.SIGSTOP)


if __name__ == "__main__":
    main()
