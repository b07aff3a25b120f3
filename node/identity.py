"""Who a node is: one Ed25519 key, kept as PKCS8 PEM in the data directory, and the libp2p peer id that follows from it.

The file is 0600 and is created once, atomically: two programs that start together end up with the same key. A
passphrase, where one is set, encrypts the file; it comes from SWARMNODE_PASSPHRASE or from a file named by
`passphrase_file`, never from the command line, where other users of the machine could read it.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import base58

from swarmnode.node.exitcodes import CONFIG, ExpectedError
from swarmnode.node.host.addresses import ED25519_PREFIX
from swarmnode.node.storage.datadir import beside, explaining, sync_directory, write_all

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PASSPHRASE_VARIABLE = "SWARMNODE_PASSPHRASE"
BATCH = 4096  # keys that a process tries before it is heard of: a tenth of a second or two

Progress = Callable[[int, float], None]  # keys tried, and keys a second


class IdentityError(ExpectedError):
    """The key file cannot be used. The text says what is wrong with it and what to do."""

    exit_code = CONFIG


NAME_LENGTH = 32  # characters


def agent(version: str, path: Path) -> str:
    """What peers hear of a node: `swarmnode/0.1.0`, and after a space the name in the file `path`, where it has one."""
    try:
        return f"swarmnode/{version} {cleaned(path.read_text(encoding='utf-8'))}".rstrip()
    except (OSError, ValueError):
        return f"swarmnode/{version}"


def named(agent: str) -> tuple[str, str]:
    """Program and name in what a peer says of itself; the name is anybody's words, without control characters."""
    program, _, name = agent.partition(" ")
    return program, cleaned(name) if program.startswith("swarmnode/") else ""


def cleaned(name: str) -> str:
    """A name as it is shown: printable, on one line, at most NAME_LENGTH characters."""
    return "".join(char for char in name if char.isprintable()).strip()[:NAME_LENGTH]


@dataclass(frozen=True)
class Identity:
    """A node's key, and by it its name in the network."""

    private_key: Ed25519PrivateKey

    @cached_property
    def peer_id(self) -> str:
        """In base58btc, as "12D3KooW…"."""
        return peer_id_of(self.private_key.public_key().public_bytes_raw())

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"


def peer_id_of(public_key: bytes) -> str:
    """The libp2p peer id of a raw Ed25519 public key (32 bytes)."""
    if len(public_key) != 32:
        raise ValueError(f"an Ed25519 public key has 32 bytes, not {len(public_key)}")
    return base58.b58encode(ED25519_PREFIX + public_key).decode()


def work_of(identity: Identity) -> int:
    """Bits of work in the key; see `protocols.state.membership.py`."""
    from swarmnode.protocols.state.membership import work_of_key

    return work_of_key(identity.private_key.public_key().public_bytes_raw())


def mine(bits: int, *, progress: Progress) -> Ed25519PrivateKey:
    """A new key with at least so many bits of work, after 2^bits tries on average: for runs that admit no others.

    A process on each core looks for it; `progress` is told now and then.
    """
    from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    began, tried = time.monotonic(), 0
    workers = os.cpu_count() or 1
    with ProcessPoolExecutor(workers) as pool:
        searching: set[Future[bytes | None]] = {pool.submit(_search, bits, BATCH) for _ in range(workers)}
        try:
            while True:
                done, searching = wait(searching, return_when=FIRST_COMPLETED)
                tried += BATCH * len(done)
                for found in done:
                    seed = found.result()
                    if seed is not None:
                        return Ed25519PrivateKey.from_private_bytes(seed)
                    searching.add(pool.submit(_search, bits, BATCH))
                progress(tried, tried / max(time.monotonic() - began, 1e-9))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _search(bits: int, tries: int) -> bytes | None:
    """The seed of a key with the work, if one is among so many."""
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from swarmnode.protocols.state.membership import work_of_key

    for _ in range(tries):
        seed = os.urandom(32)
        if work_of_key(Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()) >= bits:
            return seed
    return None


def read_passphrase(file: str, environ: Mapping[str, str]) -> bytes | None:
    """The passphrase of the key: the first line of `file`, else SWARMNODE_PASSPHRASE, else None.

    Raises IdentityError where the file is missing, empty, or readable by other users.
    """
    if not file:
        given = environ.get(PASSPHRASE_VARIABLE, "")
        return given.encode() or None
    path = Path(file).expanduser()
    try:
        _refuse_open_file(path)
        passphrase = path.read_bytes().split(b"\n", 1)[0].rstrip(b"\r")
    except OSError as error:
        raise IdentityError(
            f"{path}: the passphrase file cannot be read: {error.strerror}. Correct passphrase_file, or leave it out "
            f"and set {PASSPHRASE_VARIABLE}."
        ) from error
    if not passphrase:
        raise IdentityError(f"{path}: the first line of the passphrase file is empty; write the passphrase there.")
    return passphrase


def load_or_create(path: Path, passphrase: bytes | None) -> Identity:
    """The identity kept at `path`, made and saved there on first use. Raises IdentityError or DataDirError."""
    with explaining(path):
        if not path.exists():
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

            _save(path, passphrase, Ed25519PrivateKey.generate())  # unless another program was faster: its key stays
        return load(path, passphrase)


def replace(path: Path, passphrase: bytes | None, key: Ed25519PrivateKey) -> Path | None:
    """Make `key` the identity kept at `path`; where the old one was moved to, None where there was none.

    Raises IdentityError where the old one cannot be opened, or DataDirError.
    """
    aside = None
    with explaining(path):
        if path.exists():
            aside = path.with_name(f"{path.name}.{load(path, passphrase).peer_id[-12:]}")
            with suppress(FileExistsError):  # of an earlier try
                os.link(path, aside)
        _save(path, passphrase, key, place=os.replace)
    return aside


def load(path: Path, passphrase: bytes | None) -> Identity:
    """The identity kept at `path`. Raises IdentityError, or OSError where the file cannot be read."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    _refuse_open_file(path)
    pem = path.read_bytes()
    encrypted = b"-----BEGIN ENCRYPTED PRIVATE KEY-----" in pem
    if encrypted and passphrase is None:
        raise IdentityError(
            f"{path}: the key is protected by a passphrase and none was given. Set {PASSPHRASE_VARIABLE}, or name a "
            "file that holds it with --passphrase-file."
        )
    if passphrase is not None and not encrypted and b"-----BEGIN PRIVATE KEY-----" in pem:
        raise IdentityError(
            f"{path}: a passphrase was given and the key is not protected by one. Start without it, or protect the key "
            f"first: openssl pkcs8 -topk8 -v2 aes-256-cbc -in {path} -out NEW_FILE"
        )
    try:
        private_key = load_pem_private_key(pem, passphrase)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        if encrypted and b"-----END ENCRYPTED PRIVATE KEY-----" in pem:
            raise IdentityError(
                f"{path}: the passphrase does not open this key (or the file is damaged). Try another passphrase; "
                "there is no way to recover a forgotten one, and a new key is a new peer id."
            ) from error
        raise IdentityError(
            f"{path}: not a private key in PKCS8 PEM: {error}. Put the right file back, or move it away to start with "
            "a new key and a new peer id."
        ) from error
    if not isinstance(private_key, Ed25519PrivateKey):
        raise IdentityError(
            f"{path}: holds a key of another kind ({type(private_key).__name__}); swarmnode identities are Ed25519. "
            "Move the file away to start with a new key."
        )
    return Identity(private_key)


def _save(path: Path, passphrase: bytes | None, key: Ed25519PrivateKey, *, place: Any = os.link) -> None:
    """Keep `key` at `path`, unless there is one: unlike a rename, a link replaces none."""
    from cryptography.hazmat.primitives import serialization as form

    encryption = form.BestAvailableEncryption(passphrase) if passphrase else form.NoEncryption()
    pem = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, encryption)
    with beside(path) as (file, written):
        write_all(file, pem)
        os.fsync(file.fileno())
    try:
        place(written, path)
    except FileExistsError:
        return
    finally:
        written.unlink(missing_ok=True)
    sync_directory(path.parent)


def _refuse_open_file(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise IdentityError(
            f"{path}: other users can reach this secret (mode {mode:04o}). Close it with: chmod 600 {path}; if others "
            "may have read it, move it away and start with a new one."
        )
