"""The node's settings: who wins, what is refused and how, and that the documentation tells the same."""

from __future__ import annotations

import json
import re
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from swarmnode.node.assembly import host_settings
from swarmnode.node.config import NodeConfig, default_data_dir, load_config, misspelt
from swarmnode.node.host.limits import Limits
from swarmnode.training import options
from swarmnode.training.options import SettingError, describe, installing

REPOSITORY = Path(__file__).resolve().parents[2]


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path / "node.toml", 'port = 1\nthreads = 2\nup = 3\ncorpus = "books"\n')
    environ = {"SWARMNODE_PORT": "10", "SWARMNODE_THREADS": "20", "SWARMNODE_DATA_DIR": str(tmp_path)}
    loaded = load_config(file, environ, {"port": 100})
    config, origins = loaded.config, loaded.origins
    assert (config.port, config.threads, config.up, config.corpus, config.nice) == (100, 20, 3.0, "books", 10)
    assert origins["port"] == "flag --port"
    assert origins["threads"] == "env SWARMNODE_THREADS"
    assert origins["up"] == str(file)
    assert origins["nice"] == "default"
    assert set(origins) == set(describe(NodeConfig))


def test_the_data_directorys_own_file_is_read_without_being_named(tmp_path: Path) -> None:
    written(tmp_path / "config.toml", "max_peers = 7\n")
    loaded = load_config(None, {}, {"data_dir": str(tmp_path)})
    assert loaded.config.max_peers == 7
    assert loaded.origins["max_peers"] == str(tmp_path / "config.toml")
    assert loaded.config.directory == tmp_path


def test_the_file_in_the_data_directory_cannot_move_the_data_directory(tmp_path: Path) -> None:
    written(tmp_path / "config.toml", 'data_dir = "/elsewhere"\n')
    with pytest.raises(SettingError, match="cannot be set by the file inside"):
        load_config(None, {"SWARMNODE_DATA_DIR": str(tmp_path)}, {})


def test_caps_are_those_of_the_data_directory_in_force_whatever_a_file_says(tmp_path: Path) -> None:
    for name, cpu in (("of-the-file", 10), ("of-the-flag", 20)):
        (tmp_path / name).mkdir()
        written(tmp_path / name / "caps.toml", f"cpu = {cpu}.0\n")
    file = written(tmp_path / "node.toml", f'data_dir = "{tmp_path / "of-the-file"}"\n')
    assert load_config(file, {}, {}).config.cpu == 10
    assert load_config(file, {}, {"data_dir": str(tmp_path / "of-the-flag")}).config.cpu == 20


def test_default_data_directory_follows_xdg(tmp_path: Path) -> None:
    assert default_data_dir({"XDG_DATA_HOME": str(tmp_path)}) == tmp_path / "swarmnode"
    assert default_data_dir({"XDG_DATA_HOME": "relative"}) == Path("~/.local/share/swarmnode").expanduser()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("prot = 1", ["node.toml", "'prot'", "did you mean 'port'?"]),
        ("port = 70000", ["node.toml", "port = 70000", "0 to 65535"]),
        ('port = "x"', ["node.toml", "port = 'x'", "a number"]),
        ('role = "king"', ["node.toml", "'king'", "one of train, rollout, relay, watch"]),
        ('listen = "home"', ["node.toml", "listen = 'home'", "an IP address"]),
        ('join = ["1.2.3.4:80"]', ["node.toml", "1.2.3.4:80", "/p2p/", "/dns4/"]),
        ('join = ["/dns4/seed/udp/80"]', ["node.toml", "/dns4/seed/udp/80", "/p2p/", "/dns4/"]),
        ('task = "code.txt"', ["node.toml", "code.txt", "FILE.py:CLASS"]),
        ("mdns = 1", ["node.toml", "mdns = 1", "true or false"]),
        ("[run]\nname = 'x'", ["node.toml", "[run]", "run file"]),
        ("port = ", ["node.toml", "not valid TOML"]),
    ],
)
def test_a_wrong_file_is_refused_with_file_key_value_and_range(tmp_path: Path, text: str, parts: list[str]) -> None:
    file = written(tmp_path / "node.toml", text)
    with pytest.raises(SettingError) as refused:
        load_config(file, {}, {})
    assert all(part in str(refused.value) for part in parts), str(refused.value)


def test_a_wrong_variable_or_flag_is_named() -> None:
    with pytest.raises(SettingError, match=r"environment variable SWARMNODE_PORT: port = 'many'.*0 to 65535"):
        load_config(None, {"SWARMNODE_PORT": "many", "XDG_DATA_HOME": "/nonexistent"}, {})
    with pytest.raises(SettingError, match=r"flag --max-peers: max_peers = 0 .*1 to 4096 peers"):
        load_config(None, {"XDG_DATA_HOME": "/nonexistent"}, {"max_peers": 0})


def test_an_unknown_variable_is_a_warning_with_the_nearest_name() -> None:
    (warning,) = misspelt(("SWARMNODE_DATA_DIR", "SWARMNODE_PROT", "SWARMNODE_PASSPHRASE"))
    assert "SWARMNODE_PROT" in warning and "SWARMNODE_PORT?" in warning


def test_variables_carry_lists_and_truth(tmp_path: Path) -> None:
    join = "/ip4/203.0.113.7/tcp/4077/p2p/12D3KooWA, /ip4/203.0.113.8/tcp/4077/p2p/12D3KooWB"
    environ = {"SWARMNODE_DATA_DIR": str(tmp_path), "SWARMNODE_JOIN": join, "SWARMNODE_MDNS": "off"}
    config = load_config(None, environ, {}).config
    assert [address.rpartition("/")[2] for address in config.join] == ["12D3KooWA", "12D3KooWB"]
    assert config.mdns is False


@pytest.mark.parametrize(
    "place", ["/ip4/203.0.113.7", "/ip6/2001:db8::7", "/dns4/seed", "/dns6/a.example", "/dns/a_b-1"]
)
@pytest.mark.parametrize("peer", ["", "/p2p/12D3KooWA"])
def test_join_addresses_may_be_names_and_need_not_say_who_answers(place: str, peer: str) -> None:
    address = f"{place}/tcp/4077{peer}"
    assert load_config(None, {"XDG_DATA_HOME": "/nonexistent"}, {"join": (address,)}).config.join == (address,)


@pytest.mark.parametrize(
    "address",
    [
        "/ip4/203.0.113.777/tcp/4077",
        "/ip4/0.0.0.0/tcp/4077",
        "/ip4/seed/tcp/4077",
        "/dns4//tcp/4077",
        "/dns4/a b/tcp/4077",
        "/dns4/seed/tcp/0",
        "/dns4/seed/tcp/65536",
        "/dns4/seed/tcp/4077/p2p/",
        "/dns4/seed/tcp/4077/ws",
        "/dns4/" + "a" * 64 + "/tcp/1",
        "seed:4077",
    ],
)
def test_join_addresses_that_cannot_be_dialled_are_refused(address: str) -> None:
    with pytest.raises(SettingError, match="whoever answers"):
        load_config(None, {"XDG_DATA_HOME": "/nonexistent"}, {"join": (address,)})


def test_seeds_come_from_settings_and_files(tmp_path: Path) -> None:
    listed, name = tmp_path / "seeds.txt", "/dnsaddr/seed.example.org"
    listed.write_text(f"# ours\n\n/ip4/203.0.113.7/tcp/4077\n {name} \n")

    def seeds(*bootstrap: str) -> tuple[str, ...]:
        return load_config(None, {"XDG_DATA_HOME": "/nonexistent"}, {"bootstrap": bootstrap}).config.seeds

    assert seeds(name, str(listed)) == (name, "/ip4/203.0.113.7/tcp/4077")
    listed.write_text("example.org\n")
    with pytest.raises(SettingError, match="is no address: expected /ip4/"):
        seeds(str(listed))
    with pytest.raises(SettingError, match="or a file with one a line"):
        seeds("example.org")


def test_caps_are_given_in_megabits_and_used_in_bytes() -> None:
    settings = host_settings(NodeConfig(up=8.0, down=80.0), limits=Limits(), agent="swarmnode/1")
    assert (settings.up, settings.down) == (1e6, 1e7)


def test_every_setting_is_described_and_documented() -> None:
    page = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
    for key, (_, described) in describe(NodeConfig).items():
        assert len(described.help) > 10, key
        assert re.search(rf"\| `{key}` \|", page), key


def test_a_missing_package_is_added_by_what_made_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/a venv/bin/python")
    monkeypatch.setattr(options, "find_spec", lambda name: name)
    told = {"dir_info": {"editable": True}, "url": "file:///a%20checkout"}
    monkeypatch.setattr(metadata, "distribution", lambda name: SimpleNamespace(read_text=lambda file: json.dumps(told)))
    assert installing("swarmnode[hf]") == (
        "'/a venv/bin/python' -m pip install --constraint '/a checkout/constraints.txt' -e '/a checkout[hf]'"
    )
    told.clear()
    assert installing("swarmnode[hf]") == "'/a venv/bin/python' -m pip install \"swarmnode[hf]\""
    monkeypatch.setattr(options, "find_spec", lambda name: None)
    assert installing("swarmnode[hf]") == "uv pip install --python '/a venv/bin/python' \"swarmnode[hf]\""
