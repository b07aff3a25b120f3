"""The pages of the documentation that follow from the code: every setting, every metric, all memory.

python docs/generate.py configuration > docs/configuration.md
python docs/generate.py memory > docs/memory.md
python docs/generate.py metrics > docs/metrics.md
"""

from __future__ import annotations

import dataclasses
import os
import sys
from typing import Any, get_type_hints

import swarmnode.node.daemon  # noqa: F401 (with it come all parts of a node, and so their metrics)
from swarmnode.node.config import NodeConfig
from swarmnode.protocols.metrics import Metric
from swarmnode.training.memory import Weight, needs
from swarmnode.training.options import as_toml, describe
from swarmnode.training.runspec import SECTIONS, parse_runspec


def configuration() -> str:
    """docs/configuration.md: every setting of a node and of a run, with default, range and meaning."""
    lines = [
        "# Configuration",
        "",
        "Written by `python docs/generate.py configuration > docs/configuration.md`; change the descriptions in",
        "`node/config.py` and `training/runspec.py`, not this page.",
        "",
        "Check a file with `swarmnode config check FILE`; see what is in force with `swarmnode config show`.",
        "",
        "## The node",
        "",
        "A flat TOML file, `config.toml` in the data directory or another one named with `--config`. Each key is",
        "also an environment variable (`SWARMNODE_MAX_PEERS`; lists are separated by commas) and a flag of",
        "`swarmnode run` (`--max-peers`; for a list, once for each item; `--mdns` and `--no-mdns`). File, then",
        "environment, then flags: the last one wins.",
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
    lines = [
        "# Metrics",
        "",
        "Written by `python docs/generate.py metrics > docs/metrics.md`; change the declarations beside",
        "what they measure, not this page.",
        "",
        "`swarmnode metrics` prints what a running node counts, in Prometheus' text format (0.0.4, not OpenMetrics);",
        "`--json` prints it as a list of metrics with their samples. The node opens no port for it. To collect it, let",
        "node_exporter read a file:",
        "",
        "```",
        "swarmnode metrics > /var/lib/node_exporter/swarmnode.prom.new",
        "mv /var/lib/node_exporter/swarmnode.prom.new /var/lib/node_exporter/swarmnode.prom",
        "```",
        "",
        "every 15 s or so, from a timer of the user that the node runs as, with node_exporter's option",
        "`--collector.textfile.directory=/var/lib/node_exporter`. The file is moved into place because it may be read",
        "at any time. node_exporter does not say which file a sample came from: give a second node on the machine a",
        "node_exporter of its own.",
        "",
        "Peers are not labels: there can be any number of them. `swarmnode peers` shows how each one stands. A limit",
        "is near where a gauge comes near the `swarmnode_limit` of its name, such as `swarmnode_unread_bytes` and",
        "`connections.unread_in_all`.",
        "",
        "| metric | kind | label | meaning |",
        "|---|---|---|---|",
    ]
    for metric in declared():
        label = f"`{metric.label}`" if metric.label else ""
        lines.append(f"| `{metric.name}` | {metric.kind} | {label} | {metric.help} |")
    return "\n".join(lines) + "\n"


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
        "exchanged. Two members, AdamW, the method's default codec; a step's activations and LoRA's base come on",
        "top, in the trainer. A node alone takes one vector more. Nobody's memory grows with the number of peers,",
        "but that of an open run by what it keeps decoded of contributions, up to a vector.",
    ]
    for method in ("diloco", "btard", "open"):
        trust = "open" if method == "open" else "known"
        run = {"run": {"name": "r", "trust": trust}, "exchange": {"method": method}}
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
        "cores, diloco with int8, one step a round): the table says 5.44 GB for a node, the kernel 5.47 to 5.68",
        "GB at the most (daemon 3.62, trainer 2.60, not at the same time), and all hashes are equal. An exchange takes",
        "1.9 to 2.2 s in the usual round, 2.2 in the median of six after the second, where the all-reduce alone takes",
        "1.8 (1.22 times that, 1.3 are aimed at); 7 and 4.5 s in the first two rounds, whose memory is new, and up to",
        "4.7 s beside a checkpoint that goes to disk. The joiner had caught up after 45 s. No GPU has been measured,",
        "nor `open` and `btard` at that size.",
        "",
        "What a step takes is counted on shapes alone, activation checkpointing and bf16 included. Of a GPT it is what",
        "torch's allocator gives on a CPU within 1 %, of small GPT-2 and Llama models by hf-lm within 7 %. A mixture",
        "of experts is estimated from its matrices.",
    ]
    return "\n".join(lines) + "\n"


PAGES = {"configuration": configuration, "memory": memory, "metrics": metrics}

if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1] not in PAGES:
        sys.exit(f"usage: python docs/generate.py {'|'.join(PAGES)}")
    os.write(1, PAGES[sys.argv[1]]().encode())
