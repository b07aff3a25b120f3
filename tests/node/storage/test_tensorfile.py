"""Files of tensors: others can read them, and no bytes make reading them take more than they are worth."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from swarmnode.node.storage.tensorfile import NotTensors, read_tensors, write_tensors

TENSORS = {
    "matrix": np.arange(12, dtype=np.float32).reshape(3, 4),
    "bytes": np.frombuffer(b"some bytes", np.uint8),
    "number": np.array(3.0, np.float32),
    "nothing": np.zeros(0, np.float32),
}


def test_others_read_what_is_written_here_and_the_hash_is_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    sha256 = write_tensors(path, TENSORS, {"round": "7"})
    assert hashlib.sha256(path.read_bytes()).hexdigest() == sha256
    found = load_file(path)
    ours, ours_sha256 = read_tensors(path)
    with safe_open(path, "np") as file:
        assert ours_sha256 == sha256 and file.metadata() == {"round": "7"}
    for name, tensor in TENSORS.items():
        for read in (found[name], ours[name]):
            assert read.dtype == tensor.dtype and read.shape == tensor.shape and read.tobytes() == tensor.tobytes()


def test_what_others_write_is_read_here(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "file.safetensors", metadata={"by": "them"})
    found, _ = read_tensors(tmp_path / "file.safetensors")
    assert all(found[name].tobytes() == tensor.tobytes() for name, tensor in TENSORS.items())


def header(**entries: object) -> bytes:
    encoded = json.dumps(entries).encode()
    return len(encoded).to_bytes(8, "little") + encoded


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        (1 << 40).to_bytes(8, "little"),
        header()[:-1],
        header(a=7),
        header(a={"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}),
        header(a={"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}) + bytes(4),
        header(a={"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}),
        header(a={"dtype": "F64", "shape": [1], "data_offsets": [0, 8]}) + bytes(8),
        header(a={"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}) + bytes(8),
        header(a={"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}) + bytes(5),
        header(a={"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 4]}) + bytes(4),
        header(__metadata__=3),
    ],
)
def test_a_file_that_lies_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(NotTensors):
        read_tensors(tmp_path / "file")


@given(st.data())
def test_any_bytes_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    write_tensors(path, TENSORS, {})
    content = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    path.write_bytes(content)
    with contextlib.suppress(NotTensors):
        read_tensors(path)
