"""The pages of the documentation that follow from the code: settings, metrics, memory, errors, messages of nodes.

python docs/generate.py configuration > docs/configuration.md
python docs/generate.py memory > docs/memory.md
python docs/generate.py messages > docs/messages.md
python docs/generate.py metrics > docs/metrics.md
python docs/generate.py troubleshooting > docs/troubleshooting.md
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections.abc import Iterable
from typing import Any, get_type_hints

import swarmnode.node.daemon  # noqa: F401 (with it come all parts of a node, and so their metrics)
from swarmnode.node import exitcodes
from swarmnode.node.config import NodeConfig
from swarmnode.node.host import allowances, connections, handshakes, quic_transport
from swarmnode.node.nat import udp
from swarmnode.protocols.methods.open import recheck
from swarmnode.protocols.methods.open.checks import audits, unique
from swarmnode.protocols.metrics import Metric
from swarmnode.protocols.peers import scoring
from swarmnode.protocols.state import intake
from swarmnode.training.memory import Weight, needs
from swarmnode.training.options import as_toml, describe
from swarmnode.training.runspec import SECTIONS, parse_runspec


def configuration() -> str:
    """docs/configuration.md: every setting of a node and of a run, with default, range and meaning."""
    lines = [
        "# Configuration",
        "",
        "Written by `python docs/generate.py configuration > docs/configuration.md`; change the descriptions in",
        "`node/config.py`, `training/sections.py` and `training/rl/section.py`, not this page.",
        "",
        "Check a file with `swarmnode config check FILE`; see what a start would take with `swarmnode config show`.",
        "",
        "## The node",
        "",
        "A flat TOML file, `config.toml` in the data directory or another one named with `--config`. Each key is",
        "also an environment variable (`SWARMNODE_MAX_PEERS`; lists are separated by commas) and a flag of",
        "`swarmnode run` (`--max-peers`; for a list, once for each item; `--mdns` and `--no-mdns`). File, then",
        "`caps.toml` (what `swarmnode caps` changed), then environment, then flags: the last one wins.",
        "",
        "The passphrase of the key is not a setting: it comes from `SWARMNODE_PASSPHRASE`, or from the file that",
        "`passphrase_file` names.",
        "",
        *_table_of(NodeConfig),
        "",
        "## The run",
        "",
        "A TOML file with the tables below; every key but `name` has a default. The run id is a hash of all values.",
        "Who creates a run from a file has a run of their own, as its `nonce` is drawn then; the same command with",
        "the same data directory goes on with it, and others join it by its join line. For one run from one file on",
        "several machines, write a `nonce` into the file: two files with the same values are then the same run.",
    ]
    for name, section in SECTIONS.items():
        lines += ["", f"### [{name}]", "", *_table_of(section)]
    return "\n".join(lines) + "\n"


def _table_of(section: type[Any]) -> list[str]:
    rows = ["| key | default | allowed | meaning |", "|---|---|---|---|"]
    hints = get_type_hints(section)
    for key, (field, described) in describe(section).items():
        default = "required" if field.default is dataclasses.MISSING else f"`{as_toml(field.default)}`"
        allowed = {bool: "true or false", tuple[str, ...]: "a list of texts"}.get(hints[key], described.allowed())
        if hints[key] is str and not described.choices:
            allowed = "text"
        rows.append(f"| `{key}` | {default} | {allowed} | {described.help} |")
    return rows


def metrics() -> str:
    """docs/metrics.md: every metric with its kind, label and meaning."""
    known = {metric.name: metric for metric in declared()}
    lines = [
        "# Metrics",
        "",
        "Written by `python docs/generate.py metrics > docs/metrics.md`; change the declarations beside",
        "what they measure, not this page.",
        "",
        "`swarmnode metrics` prints what a running node counts, in Prometheus' text format (0.0.4, not OpenMetrics);",
        "`--json` prints it as a list of metrics with their samples. The dashboard's server has the same text at",
        "`/metrics`, on loopback, for who brings the token of the data directory:",
        "",
        "```",
        'curl -H "Authorization: Bearer $(cat ~/.local/share/swarmnode/dashboard.token)" http://127.0.0.1:4078/metrics',
        "```",
        "",
        "`swarmnode seed` and a node with `--no-dashboard` have no such page; read them by the file below.",
        "",
        "`deploy/monitoring` has the rest: `prometheus.yml`, which reads that page; `alerts.yml`, for a node that is",
        "down, alone, short of disk, has problems, a trainer that ends again and again, or a clock that",
        "is off; and `dashboard.json`, for Grafana. In containers, `--profile monitoring`",
        "starts all of it ([quickstart](quickstart.md#in-containers)). A Prometheus elsewhere cannot reach it: let",
        "one on the machine pass on what it reads (`remote_write`), or let node_exporter read a file:",
        "",
        "```",
        "swarmnode metrics --data-dir /var/lib/swarmnode > /var/lib/node_exporter/swarmnode.prom.new &&",
        "mv /var/lib/node_exporter/swarmnode.prom.new /var/lib/node_exporter/swarmnode.prom",
        "```",
        "",
        "every 15 s or so, from a timer of the user that the node runs as, with node_exporter's option",
        "`--collector.textfile.directory=/var/lib/node_exporter`. The file is moved into place because it may be read",
        "at any time. node_exporter does not say which file a sample came from: give a second node on the machine a",
        "node_exporter of its own. The node's user must be able to write to that folder. The alert `SwarmnodeDown`",
        "does not see a node that is read so: alert on `time() - node_textfile_mtime_seconds > 180` instead.",
        "",
        "## What to watch first",
        "",
        "| metric | look into it when |",
        "|---|---|",
        *(f"| `{known[name].name}` | {when} |" for name, when in WATCHED.items()),
        "",
        "## All metrics",
        "",
        "Peers are not labels: there can be any number of them. `swarmnode peers` shows each one's *standing*: what",
        "the rules that it broke come to at this node, good, slowed, refused or banned ([wire.md](wire.md#limits)).",
        "A limit is near where a gauge comes near the `swarmnode_limit` of its name, such as `swarmnode_unread_bytes`",
        "and `connections.unread_in_all`. A label whose values are fixed has them behind it.",
        "",
        "| metric | kind | label | meaning |",
        "|---|---|---|---|",
    ]
    for metric in known.values():
        label = ": ".join(filter(None, (f"`{metric.label}`" * bool(metric.label), ", ".join(VALUES.get(metric, ())))))
        lines.append(f"| `{metric.name}` | {metric.kind} | {label} | {metric.help} |")
    return "\n".join(lines) + "\n"


# When an operator looks into it: those of deploy/monitoring/alerts.yml, and what says that a node learns.
WATCHED = {
    "swarmnode_warnings": '`kind="problem"` is above 0; `swarmnode health` says what is wrong and what to do',
    "swarmnode_round_age_seconds": "it is several times the usual length of a round: no round brings a result",
    "swarmnode_loss": "it no longer falls (`swarmnode_reward`, in a run by rollouts: rises)",
    "swarmnode_members": "it is 1 where others should take part",
    "swarmnode_peers": "it is 0 for minutes; ask `swarmnode netcheck`",
    "swarmnode_tokens_per_second": "it falls while `swarmnode_paused` is 0",
    "swarmnode_trainer_restarts_total": "it grows by more than two in half an hour; `swarmnode logs` says why",
    "swarmnode_disk_free_bytes": "it is below 2 GB",
    "swarmnode_clock_behind_seconds": "it is beyond 20, or below -20: from 30 s on the node may sign nothing",
}

# By metric: the values of its label, where the code has them as constants.
VALUES: dict[Metric, Iterable[str]] = {
    allowances.BYTES: (allowances.IN, allowances.OUT),
    allowances.WAITED: (allowances.IN, allowances.OUT),
    audits.AUDITS: [verdict.name.lower() for verdict in audits.Verdict],
    connections.TURNED_AWAY: connections.TURNED,
    handshakes.ENDED: handshakes.OUTCOMES,
    intake.REFUSED: (*intake.NOT_STORED, "false", "busy"),
    quic_transport.STRAYS: quic_transport.WHY,
    recheck.CHECKS: recheck.OUTCOMES,
    scoring.FALLS: [standing.word for standing in scoring.Standing if standing],
    scoring.PEERS_BY_STANDING: [standing.word for standing in scoring.Standing if standing],
    udp.PACKETS: udp.KINDS,
    unique.TESTS: unique.OUTCOMES,
}


def declared() -> tuple[Metric, ...]:
    """All metrics that a node can show, by name: those that stand as constants beside what they measure."""
    found = {
        value
        for name, module in list(sys.modules.items())
        if name.startswith("swarmnode.") and module is not None
        for value in vars(module).values()
        if isinstance(value, Metric)
    }
    return tuple(sorted(found, key=lambda metric: metric.name))


def memory() -> str:
    """docs/memory.md: what a node holds, by method."""
    billion = 10**9
    lines = [
        "# Memory",
        "",
        "Written by `python docs/generate.py memory > docs/memory.md` from `training/memory.py`, by which a node",
        "checks before it trains whether a run fits; change that, not this page.",
        "",
        "Before it takes any memory for the model, a node says what the run needs here (on the console, in the",
        "log, and by the event `memory` of `--json`), and ends where that is more than there is, with what to do.",
        "A task of your own is weighed where it has `skeleton` (`training/tasks.py`); one without trains",
        "unweighed.",
        "",
        "**memory** is what the processes hold for themselves and cannot give back. **mapped** lies in files",
        "without a name in the data directory, and in as much memory as nobody else needs. **disk** stays;",
        "**older** comes in time. The unit is the vector: 4 bytes for each parameter that is trained and",
        "exchanged. Two members, AdamW (`demo`: SGD), the method's default codec; a step's activations and LoRA's",
        "base come on top, in the trainer. A node alone takes one vector more. Nobody's memory grows with the",
        "number of peers, but that of an open run by what it keeps decoded of contributions, up to a vector, and",
        "that of `demo` by two encodings a member.",
    ]
    for method in ("diloco", "streaming", "lowrank", "async", "demo", "gossip", "btard", "open", "seed"):
        trust = "open" if method == "open" else "known"
        inner = {"lr": 1e-4, **({"optimizer": "sgd", "steps": 1} if method == "demo" else {})}
        run = {"run": {"name": "r", "trust": trust}, "exchange": {"method": method}, "inner": inner}
        spec = parse_runspec(run, source=method)
        table = needs(spec, Weight(billion))
        lines += ["", f"## {method}", "", "| process | where | what | vectors |", "|---|---|---|---|"]
        rows = [row for row in table.parts if row.size and row.what != "the process"]
        lines += [f"| {row.by} | {row.where} | {row.what} | {row.size / 4 / billion:.2g} |" for row in rows]
        lines += ["", "| parameters | memory, trained on the CPU | mapped | checkpoints and what audits need |"]
        lines.append("|---|---|---|---|")
        for size in (135_000_000, billion, 8 * billion):
            there = needs(spec, Weight(size))
            of = [there.of(*where) / 1e9 for where in (("memory",), ("mapped",), ("disk", "older"))]
            lines.append(f"| {size / 1e6:,.0f} M | " + " | ".join(f"{each:,.1f} GB" for each in of) + " |")
    lines += [
        "",
        "Measured (`python bench/large.py`, 134.5 M parameters, two daemons and a joiner on one machine of 2",
        "cores, diloco with int8, one step a round): the node said 5.44 GB before it trained (the table and",
        "a step), the kernel 5.47 to 5.68 GB at the most (daemon 3.62, trainer 2.60, not at the same time), and all",
        "hashes are equal. An exchange takes",
        "1.9 to 2.2 s in the usual round, 2.2 in the median of six after the second, where the all-reduce alone takes",
        "1.8 (1.22 times that, 1.3 are aimed at); 7 and 4.5 s in the first two rounds, whose memory is new, and up to",
        "4.7 s beside a checkpoint that goes to disk. The joiner had caught up after 45 s. Not measured: GPUs,",
        "and `open` and `btard` at that size.",
        "",
        "What a step takes is counted on shapes alone, activation checkpointing and bf16 included. Of a GPT it is what",
        "torch's allocator gives on a CPU within 1 %, of small GPT-2 and Llama models by hf-lm within 7 %. A mixture",
        "of experts is estimated from its matrices.",
    ]
    return "\n".join(lines) + "\n"


# What helps with all errors of an exit code, before their own words do.
HELP = {
    "ERROR": "What was asked for could not be done, or the node cannot train; the message says why.",
    "USAGE": "`swarmnode COMMAND --help` lists what a command takes.",
    "CONFIG": "A value, a file or a folder that you named cannot be used. `swarmnode config check FILE` names all "
    "mistakes of a file at once, `swarmnode config show` where each value came from. Nothing was changed.",
    "DATADIR_BUSY": "One node, one data directory: `--data-dir DIR` gives a second node its own.",
    "DATADIR_VERSION": "Another version of the program wrote what lies there. Nothing was changed.",
    "PORT_TAKEN": "`swarmnode status` shows whether your own node has it; `--port PORT` takes another one.",
    "NO_SPACE": "Free some room, or raise the cap that the message names. What was saved before stays as it is.",
    "RUN_UNAVAILABLE": "Check the address and the run id (`swarmnode id --join` prints a fresh line on a node of the "
    "run), and that its port is open: `nc -vz 192.0.2.7 4077`. Behind a router: [nat.md](nat.md).",
    "NOT_RUNNING": "Start it: `swarmnode run`. A node elsewhere on this machine: `--data-dir DIR`.",
    "KEY_IN_USE": "Two daemons must never have one key: copy a data directory only to move it.",
}


def troubleshooting() -> str:
    """docs/troubleshooting.md: every error message for a person, by the exit code of the program."""
    from errors import Source  # which imports all of the product

    found: dict[int, dict[str, str]] = {}
    for code, text, place in Source().messages():
        found.setdefault(code, {}).setdefault(text, place)
    lines = [
        "# Troubleshooting",
        "",
        "Written by `python docs/generate.py troubleshooting > docs/troubleshooting.md` from the messages in the code;",
        "change those, not this page.",
        "",
        "Search this page for the words of your message that are not names or numbers. It has what the program says",
        "when an error ends it, by exit code, in the order of the first words; `…` stands for what differs: names,",
        "numbers, lists, and what the system or a library said. All exit codes are in [cli.md](cli.md#exit-codes);",
        "symptoms without a message are in the [quickstart](quickstart.md#when-it-does-not-work), and",
        "`swarmnode health` and `swarmnode netcheck` look for more.",
        "",
        "| what you see | what to do |",
        "|---|---|",
        '| `swarmnode: command not found` | type `export PATH="$PWD/.venv/bin:$PATH"` in this terminal, '
        "in the checkout |",
        "| the installation fails at fastecdsa | install a C compiler and the GMP headers (Debian, Ubuntu: "
        "`apt install build-essential python3-dev libgmp-dev`) |",
        '| "swarmnode needs Python 3.11, 3.12 or 3.13" | install one of them, and name it: '
        "`make venv PYTHON=python3.12` |",
        "| it trains on the CPU, although there is an NVIDIA GPU | `swarmnode doctor` says why |",
    ]
    names = {value: name for name, value in vars(exitcodes).items() if name.isupper()}
    for code in sorted(found):
        lines += ["", f"## Exit code {code}, {names[code]}", "", HELP[names[code]], ""]
        in_order = sorted(found[code].items(), key=lambda item: re.sub(r"^[\W_]+", "", item[0].lower()))
        lines += [f"- {text} (`{place}`)" for text, place in in_order]
    return "\n".join(lines) + "\n"


def messages() -> str:
    """docs/messages.md: what nodes say to one another and sign."""
    from wire_messages import page  # which imports all of the product

    return page()


PAGES = {
    "configuration": configuration,
    "memory": memory,
    "messages": messages,
    "metrics": metrics,
    "troubleshooting": troubleshooting,
}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PAGES:
        sys.exit(f"usage: python docs/generate.py {'|'.join(PAGES)}")
    os.write(1, PAGES[sys.argv[1]]().encode())
