"""The node's key: the same peer id for ever, private, made once, and clear words where it cannot be used."""

from __future__ import annotations

import errno
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from swarmnode.node import identity
from swarmnode.node.assembly import check_admitted
from swarmnode.node.exitcodes import ExpectedError
from swarmnode.node.identity import (
    NAME_LENGTH,
    IdentityError,
    agent,
    load,
    load_or_create,
    named,
    peer_id_of,
    read_passphrase,
    replace,
)
from swarmnode.node.storage.datadir import NoSpace
from swarmnode.training.runspec import parse_runspec


def test_the_key_is_made_once_and_gives_the_same_peer_id_ever_after(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    first = load_or_create(path, None)
    again = load_or_create(path, None)
    seeds = {one.private_key.private_bytes_raw() for one in (first, again)}
    assert first.peer_id == again.peer_id and first.peer_id.startswith("12D3KooW")
    assert len(seeds) == 1
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.read_bytes().startswith(b"-----BEGIN PRIVATE KEY-----")
    assert [p.name for p in tmp_path.iterdir()] == ["identity.key"]


def test_peer_id_is_that_of_libp2p() -> None:
    libp2p_id = pytest.importorskip("libp2p.peer.id")
    ed25519 = pytest.importorskip("libp2p.crypto.ed25519")
    for seed in (bytes(32), bytes(range(32))):
        pair = ed25519.create_new_key_pair(seed)
        assert peer_id_of(pair.public_key.to_bytes()) == str(libp2p_id.ID.from_pubkey(pair.public_key))


def test_programs_that_start_together_end_up_with_one_key(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(lambda _: load_or_create(path, None).peer_id, range(8)))
    assert len(ids) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["identity.key"]


def test_a_passphrase_protects_the_key_and_a_wrong_one_is_said(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    made = load_or_create(path, b"correct horse")
    assert b"ENCRYPTED" in path.read_bytes()
    assert load_or_create(path, b"correct horse").peer_id == made.peer_id
    with pytest.raises(IdentityError, match="passphrase does not open this key"):
        load_or_create(path, b"battery staple")
    with pytest.raises(IdentityError, match="none was given"):
        load_or_create(path, None)


def test_a_passphrase_for_an_open_key_is_refused_rather_than_ignored(tmp_path: Path) -> None:
    load_or_create(tmp_path / "identity.key", None)
    with pytest.raises(IdentityError, match="not protected by one"):
        load_or_create(tmp_path / "identity.key", b"secret")


def test_a_key_that_others_can_read_is_refused_with_the_remedy(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    load_or_create(path, None)
    path.chmod(0o640)
    with pytest.raises(IdentityError, match=r"mode 0640.*chmod 600"):
        load_or_create(path, None)


def test_a_damaged_key_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "identity.key"
    path.write_bytes(b"not a key")
    path.chmod(0o600)
    with pytest.raises(IdentityError, match="PKCS8"):
        load_or_create(path, None)
    assert path.read_bytes() == b"not a key"


def test_a_key_of_another_kind_is_named(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    path = tmp_path / "identity.key"
    path.write_bytes(X25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    path.chmod(0o600)
    with pytest.raises(IdentityError, match="another kind"):
        load_or_create(path, None)


def test_passphrase_comes_from_file_then_environment(tmp_path: Path) -> None:
    file = tmp_path / "passphrase"
    file.write_text("from file\nsecond line\n")
    file.chmod(0o600)
    environ = {"SWARMNODE_PASSPHRASE": "from environment"}
    assert read_passphrase(str(file), environ) == b"from file"
    assert read_passphrase("", environ) == b"from environment"
    assert read_passphrase("", {}) is None
    file.chmod(0o644)
    with pytest.raises(IdentityError, match="chmod 600"):
        read_passphrase(str(file), environ)
    with pytest.raises(IdentityError, match="cannot be read"):
        read_passphrase(str(tmp_path / "none"), environ)


def test_a_run_that_asks_for_work_refuses_a_key_without_it_and_says_what_to_do() -> None:
    spec = parse_runspec(
        {"run": {"name": "r", "trust": "open"}, "trust": {"identity_bits": 40, "validators": ["12D3a"]}}, source="test"
    )
    with pytest.raises(ExpectedError, match="--mine 40"):
        check_admitted(spec, peer_id_of(bytes(32)))
    check_admitted(spec, "12D3a")
    check_admitted(parse_runspec({"run": {"name": "r"}}, source="test"), "12D3b")


def test_a_name_travels_behind_the_version_and_is_cleaned_on_both_sides(tmp_path: Path) -> None:
    path = tmp_path / "name"
    assert agent("1.2", path) == "swarmnode/1.2" and named("swarmnode/1.2") == ("swarmnode/1.2", "")
    path.write_text(" Anna's\x1b[2J\u202e desktop ")
    assert named(agent("1.2", path)) == ("swarmnode/1.2", "Anna's[2J desktop")
    assert named("swarmnode/1.2 " + "x\n" * 99)[1] == "x" * NAME_LENGTH
    assert named("kubo/0.30 desktop") == ("kubo/0.30", "")


def test_a_key_that_cannot_be_written_replaces_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "identity.key"
    before, mined = load_or_create(path, None).peer_id, Ed25519PrivateKey.generate()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(identity, "write_all", full)
        with pytest.raises(NoSpace):
            replace(path, None, mined)
    assert load_or_create(path, None).peer_id == before
    aside = replace(path, None, mined)
    assert aside is not None and load(aside, None).peer_id == before != load(path, None).peer_id
