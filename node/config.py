"""The node's own settings, and where each value came from.

    swarmnode config show

Later sources win: defaults, then a TOML file (`config.toml` in the data directory, or --config FILE), then the
environment (`SWARMNODE_PORT=4078`), then flags. The file is flat: one `key = value` a line, no tables; a run file has
tables, which is how `swarmnode config check` tells the two apart. `docs/generate.py` writes `docs/configuration.md`
from the descriptions here and in `training/sections.py`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from swarmnode.node.host.addresses import EXPECTED, parse
from swarmnode.training.options import SettingError, coerce, describe, option, parse_section, read_toml, types_of

ENVIRONMENT = "SWARMNODE_"
SECRETS = ("SWARMNODE_PASSPHRASE",)  # variables that are read elsewhere and are no settings
DEVICES = ("auto", "cpu", "cuda")
GIGABYTE = 1e9  # bytes
MEGABIT = 1e6 / 8  # bytes
CLOCK = r"([01]\d|2[0-3]):[0-5]\d"
SPAN = f"{CLOCK}-{CLOCK}"
OFF = "off"  # no dashboard
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class NodeConfig:
    """How one node behaves on one machine. Nothing here changes what a run computes."""

    data_dir: str = option(
        "~/.local/share/swarmnode",
        "directory of the key, logs, checkpoints and control socket; XDG_DATA_HOME is honoured",
    )
    port: int = option(4077, "TCP port, and UDP port, to listen on; 0 takes any free one", between=(0, 65535))
    quic: bool = option(True, "listen and dial over UDP (QUIC) as well, at the same port number, and punch holes there")
    listen: str = option(
        "::",
        "IP address to listen on; :: is every interface, IPv4 and IPv6, 0.0.0.0 every one of IPv4, 127.0.0.1 this "
        "machine only",
    )
    announce: tuple[str, ...] = option(
        (), "multiaddrs to tell peers instead of those found out, for a node behind a port forward"
    )
    join: tuple[str, ...] = option(
        (), "multiaddrs of nodes to join; with /p2p/PEER_ID it is checked who answers. Only the flag also takes a link"
    )
    bootstrap: tuple[str, ...] = option(
        (),
        "where to find other nodes while few are known: multiaddrs of seeds, /dnsaddr/NAME for those that its TXT "
        "records list, or files with one a line",
    )
    unlisted: bool = option(
        False, "do not list the run in the catalogue (swarmnode discover); other members of the run still may"
    )
    mdns: bool = option(True, "find and be found by nodes on the local network")
    upnp: bool = option(
        True, "ask the router by PCP, NAT-PMP or UPnP to let peers in, where they cannot dial this node otherwise"
    )
    role: str = option(
        "train",
        "train; rollout: in a run by rollouts, only sample answers for a policy that another node trains; relay: no "
        "training, helps nodes find one another and carries traffic for those that nobody can dial; watch: the same "
        "without carrying",
        choices=("train", "rollout", "relay", "watch"),
    )
    device: str = option("auto", "where to train; auto takes a CUDA GPU for all but small policies", choices=DEVICES)
    ranks: int = option(
        0,
        "processes that train, each on a device of its own and with its part of every batch; 0 is one for each CUDA "
        "GPU, and one where there is none",
        unit="processes",
        between=(0, 64),
    )
    sharded: bool = option(
        False,
        "have the ranks divide the model among them as well (FSDP2), for one that is too large for a device with its "
        "gradients and moments: slower, with a share of the memory each",
    )
    threads: int = option(0, "CPU threads of the trainer; 0 takes one for each core", unit="threads", between=(0, 1024))
    micro_batch: int = option(
        0,
        "sequences of a step that the trainer computes at once, for a device with little memory; steps are the same. "
        "0: all, or as many as a GPU has memory for",
        unit="sequences",
        between=(0, 65536),
    )
    cpu: float = option(
        100.0,
        "CPU time of the node at the most, of all cores together; 100 is no cap. The trainer is stopped and continued "
        "many times a second, so steps take longer",
        unit="%",
        between=(1, 100),
    )
    nice: int = option(
        10, "niceness of the trainer; 0 is the priority of other programs, 19 the lowest", between=(0, 19)
    )
    memory: float = option(
        0.0,
        "memory that the trainer may reserve for itself, as for libraries, gradients and activations; 0 is no cap. Not "
        "counted: parameters and moments shared with the daemon, mapped files, GPU memory, the daemon. Above it the "
        "trainer ends, and is started again",
        unit="GB",
        between=(0, 1_000_000),
    )
    device_memory: float = option(
        0.0,
        "memory of each GPU that the trainer may take; 0 is no cap. Fewer sequences are then computed at once",
        unit="GB",
        between=(0, 1_000_000),
    )
    sandbox: str = option(
        "auto",
        "the trainer's sandbox: auto, all that this kernel can enforce, and the node says what it cannot; require, all "
        "of it or no training; off, none but the cap on memory",
        choices=("auto", "require", "off"),
    )
    sandbox_read: tuple[str, ...] = option(
        (), "further files and directories that the trainer may read, for a task of your own"
    )
    up: float = option(0.0, "upload cap; 0 is no cap", unit="Mbit/s", between=(0, 1_000_000))
    down: float = option(0.0, "download cap; 0 is no cap", unit="Mbit/s", between=(0, 1_000_000))
    max_peers: int = option(64, "peers to be connected to at the most", unit="peers", between=(1, 4096))
    corpus: str = option(
        "",
        "file or folder with this node's own text (text, .jsonl, .parquet, or tokens: .bin, .npy), or "
        "datasets:NAME[:SPLIT]; empty takes the Python standard library's own sources",
    )
    tokenizer: str = option(
        "",
        "file tokenizer.json, or a folder with one, for a run that this node creates; empty: that of the run's base "
        "model, or one is trained where [data] vocabulary is above 256",
    )
    weights: str = option(
        "",
        "safetensors file with the parameters that a run which this node creates begins from, such as one by "
        "swarmnode provenance export; empty: drawn by the run's seed",
    )
    data: str = option(
        "run",
        "what to train on: run, the data that the run's creator published, or local, this node's corpus",
        choices=("run", "local"),
    )
    task: str = option(
        "",
        "a task of your own, FILE.py:CLASS, or questions of a run by rollouts, text:FILE.jsonl; code is only ever "
        "taken from this machine",
    )
    base: str = option(
        "",
        "the base model of a run by hf-lm on this machine: a folder, or a name on the hub, which is then fetched; "
        "empty takes the run's, which has to be here already",
    )
    policy: str = option(
        "",
        "this node's policy in a run by rollouts: gpt or gru, layers x width (gru:1x32), or hf:MODEL; empty takes the "
        "run's",
    )
    sampling: str = option(
        "auto",
        "what writes the answers of a policy hf:MODEL: auto, vLLM where it is installed and works, else torch; torch; "
        "or vllm, and no training where it does not work",
        choices=("auto", "torch", "vllm"),
    )
    checkpoint_every: int = option(5, "rounds between two checkpoints", unit="rounds", between=(1, 100_000))
    checkpoint_keep: int = option(3, "newest checkpoints kept of a run", unit="checkpoints", between=(1, 10_000))
    checkpoint_hours: float = option(
        24.0,
        "older checkpoints kept: one 1 to 2 hours old, one 2 to 4, and so on up to this; 0 keeps the newest only",
        unit="h",
        between=(0, 100_000),
    )
    shards_cap: float = option(
        10.0, "disk that shards may take; above it the least recently used go", unit="GB", between=(0, 1e6)
    )
    disk: float = option(
        0.0,
        "disk that the whole data directory may take; 0 is no cap. Shards make room, and above it training pauses",
        unit="GB",
        between=(0, 1e6),
    )
    hours: str = option(
        "",
        "local times of day at which to train, such as 22:00-07:00, or several with commas between; empty: always",
        form=(f"({SPAN}(, ?{SPAN})*)?", "spans such as 22:00-07:00, 12:00-13:30"),
    )
    only_when_idle: float = option(
        0.0,
        "train only when nobody has used the machine for so long: no key at a terminal, no program with a tenth of "
        "the CPU, and a desktop that calls itself idle; 0: always",
        unit="min",
        between=(0, 10_000),
    )
    not_on_battery: bool = option(False, "pause training while the machine runs on its battery")
    temperature: float = option(
        0.0,
        "pause training while a sensor of the machine shows more, until it shows 5 less; 0 is no cap",
        unit="°C",
        between=(0, 150),
    )
    wait_peers: int = option(
        0, "who begins or resumes a run starts when this many others are there", unit="peers", between=(0, 4096)
    )
    wait_seconds: float = option(
        60.0, "it starts without the missing ones after this long", unit="s", between=(0, 86400)
    )
    dashboard: str = option(
        "127.0.0.1:4078",
        "HOST:PORT of the page that shows the node in a browser, with any free port where that one is taken, and off "
        "for none. Whoever reads the network can take the page's token, and with it steer the node, so name no address "
        "but this machine's own",
    )
    log_level: str = option("info", "least serious messages to be logged", choices=LOG_LEVELS)
    log_format: str = option(
        "plain",
        "how log lines look on standard error: plain, for people; or json, an object a line as in the log file, for "
        "collectors of logs",
        choices=("plain", "json"),
    )
    passphrase_file: str = option(
        "", "file whose first line is the key's passphrase; empty takes SWARMNODE_PASSPHRASE, or none"
    )

    @property
    def directory(self) -> Path:
        return Path(self.data_dir).expanduser().absolute()

    @property
    def seeds(self) -> tuple[str, ...]:
        """The multiaddrs of `bootstrap`, files read. Raises SettingError."""
        found: list[str] = []
        for place in self.bootstrap:
            try:
                lines = [place] if parse(place) else Path(place).expanduser().read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise SettingError(
                    f"bootstrap: {place} cannot be read ({getattr(error, 'strerror', error)})"
                ) from error
            told = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
            if wrong := [line for line in told if parse(line) is None]:
                raise SettingError(
                    f"{place}: {wrong[0]!r} is no address: {EXPECTED}; a line that begins with # is none"
                )
            found += told
        return tuple(dict.fromkeys(found))


# What an owner changes while the node runs (swarmnode caps): how much it may take, and when.
AMOUNTS = ("cpu", "threads", "nice", "memory", "device_memory", "disk", "shards_cap", "up", "down")
CAPS = (*AMOUNTS, "hours", "only_when_idle", "not_on_battery", "temperature")
CAPS_FILE = "caps.toml"  # in the data directory: what was changed so


@dataclass(frozen=True)
class Loaded:
    """A configuration, and the origin of each value by key: `default`, `env NAME`, `flag --name` or a file's path."""

    config: NodeConfig
    origins: dict[str, str]
    uncapped: NodeConfig  # as it would be without CAPS_FILE

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """By key, each `value` and its `origin`."""
        return {key: {"value": getattr(self.config, key), "origin": origin} for key, origin in self.origins.items()}


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """$XDG_DATA_HOME/swarmnode, ~/.local/share/swarmnode where it is not set (XDG Base Directory Specification)."""
    base = environ.get("XDG_DATA_HOME", "")
    home = Path(base) if base.startswith("/") else Path("~/.local/share").expanduser()
    return home / "swarmnode"


def load_config(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, Any]) -> Loaded:
    """Put the configuration together. `flags` holds what was given on the command line, by key of NodeConfig.

    Without `file`, `config.toml` in the data directory is read where there is one; `caps.toml` there always is, after
    the file. Raises SettingError.
    """
    values: dict[str, Any] = {}
    origins = dict.fromkeys(describe(NodeConfig), "default")
    from_environment = _environment(environ)
    given = {key: coerce(NodeConfig, key, value, where=f"flag {flag_name(key)}") for key, value in flags.items()}

    def home() -> Path:
        """The data directory, as far as it is known by now."""
        named = given.get("data_dir") or from_environment.get("data_dir") or values.get("data_dir")
        return Path(named or default_data_dir(environ)).expanduser().absolute()

    def take(path: Path, table: Mapping[str, Any]) -> None:
        found = parse_node_table(table, source=str(path))
        values.update(found)
        origins.update(dict.fromkeys(found, str(path)))

    if file is not None:
        take(file, read_toml(file))
    elif (implied := home() / "config.toml").exists():
        table = read_toml(implied)
        if "data_dir" in table:
            raise SettingError(
                f"{implied}: data_dir cannot be set by the file inside the data directory; remove the line, "
                "and use --data-dir or SWARMNODE_DATA_DIR"
            )
        take(implied, table)
    below = dict(values)
    if (caps := home() / CAPS_FILE).exists():
        take(caps, read_toml(caps))
    origins.update({key: f"env {ENVIRONMENT}{key.upper()}" for key in from_environment})
    origins.update({key: f"flag {flag_name(key)}" for key in given})
    above = {**from_environment, **given, "data_dir": str(home())}
    config = NodeConfig(**{**values, **above})
    _check_together(config, origins)
    return Loaded(config, origins, NodeConfig(**{**below, **above}))


def parse_node_table(table: Mapping[str, Any], *, source: str) -> dict[str, Any]:
    """The values that a node configuration file sets, checked. Raises SettingError."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            raise SettingError(
                f"{source}: [{key}] is a table; a node configuration is flat, one 'key = value' a line. "
                "Tables belong in a run file"
            )
    parsed = parse_section(NodeConfig, table, where=source)
    values = {key: getattr(parsed, key) for key in table}
    _check_together(parsed, dict.fromkeys(table, source))
    return values


def changed_caps(
    config: NodeConfig, changes: Mapping[str, Any], uncapped: NodeConfig
) -> tuple[NodeConfig, dict[str, Any]]:
    """The configuration with other caps, and what of these to keep: None where one is as in `uncapped` again.

    Texts are taken as in environment variables. Raises SettingError.
    """
    if unknown := [key for key in changes if key not in CAPS]:
        raise SettingError(
            f"{unknown[0]} is no cap that can be changed while the node runs; expected {', '.join(CAPS)}"
        )
    kept: dict[str, Any] = {
        key: None
        if value in (None, "")
        else coerce(NodeConfig, key, _from_text(key, value) if isinstance(value, str) else value, where="caps")
        for key, value in changes.items()
    }
    return replace(config, **{k: getattr(uncapped, k) if v is None else v for k, v in kept.items()}), kept


def caps_told(config: NodeConfig) -> dict[str, dict[str, Any]]:
    """By key, each cap's `value` and its `unit`."""
    known = describe(NodeConfig)
    return {key: {"value": getattr(config, key), "unit": known[key][1].unit} for key in CAPS}


def flag_name(key: str) -> str:
    """The command line's spelling of a key: `--data-dir` for `data_dir`."""
    return "--" + key.replace("_", "-")


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key in describe(NodeConfig):
        text = environ.get(variable := ENVIRONMENT + key.upper())
        if text or (text is not None and types_of(NodeConfig)[key] is str):
            values[key] = coerce(NodeConfig, key, _from_text(key, text), where=f"environment variable {variable}")
    return values


def misspelt(environ: Iterable[str]) -> Iterator[str]:
    """A warning for each SWARMNODE_* variable that is no setting."""
    names = [*SECRETS, *(ENVIRONMENT + key.upper() for key in describe(NodeConfig))]
    for variable in sorted(v for v in environ if v.startswith(ENVIRONMENT) and v not in names):
        near = get_close_matches(variable, names, n=1)
        hint = f"did you mean {near[0]}?" if near else "see docs/configuration.md for the names"
        yield f"environment variable {variable} is not a setting and is ignored; {hint}"


def _from_text(key: str, text: str) -> Any:
    """A variable's text as the type of its setting; what does not fit stays text, for `coerce` to refuse."""
    wanted = types_of(NodeConfig)[key]
    if wanted is bool:
        words = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
        return words.get(text.lower(), text)
    if wanted in (int, float):
        try:
            return float(text) if wanted is float or not text.lstrip("+-").isdigit() else int(text)
        except ValueError:
            return text
    if wanted == tuple[str, ...]:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    return text


def _check_together(config: NodeConfig, origins: Mapping[str, str]) -> None:
    """What type and range cannot tell. Raises one SettingError, a line for each thing that is wrong."""
    said: list[str] = []

    def wrong(key: str, value: Any, expected: str) -> None:
        said.append(f"{origins.get(key, 'default')}: {key} = {value!r} is not valid; expected {expected}")

    try:
        ipaddress.ip_address(config.listen)
    except ValueError:
        wrong("listen", config.listen, "an IP address such as ::, 0.0.0.0 or 127.0.0.1")
    for address in config.join:
        if parse(address) is None:
            known, unknown = "/ip4/203.0.113.7/tcp/4077/p2p/12D3KooW…", "/dns4/node.example/tcp/4077"
            wrong("join", address, f"a multiaddr such as {known}, or {unknown} to take whoever answers")
    for place in config.bootstrap:
        if parse(place) is None and not Path(place).expanduser().is_file():
            wrong("bootstrap", place, "a multiaddr such as /dnsaddr/seed.example.org, or a file with one a line")
    for address in config.announce:
        if not address.startswith("/") or address.count("/") < 2:
            wrong("announce", address, "a multiaddr such as /ip4/203.0.113.7/tcp/4077")
    if config.dashboard != OFF:
        host, _, port = config.dashboard.rpartition(":")
        try:
            ipaddress.ip_address(host.strip("[]"))
            coerced = 0 <= int(port) < 65536
        except ValueError:
            coerced = False
        if not coerced:
            wrong("dashboard", config.dashboard, "an IP address and a port such as 127.0.0.1:4078, or off")
    if config.task:
        file, _, name = config.task.rpartition(":")
        if not (file.endswith(".py") and name.isidentifier()) and not config.task.startswith("text:"):
            wrong("task", config.task, "FILE.py:CLASS, such as my_task.py:Task, or text:FILE.jsonl")
    if said:
        raise SettingError("\n".join(said))
