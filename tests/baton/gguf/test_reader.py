"""A damaged header gives one error that names the file, for any lengths and places in it."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from baton.errors import ModelError
from baton.gguf.folder import unfold
from baton.gguf.reader import read_gguf

F32, U32, I32, STRING, ARRAY = 0, 4, 5, 8, 9


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def entry(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, *dims: int, offset: int = 0) -> bytes:
    shape = struct.pack(f"<I{len(dims)}Q", len(dims), *dims)
    return text(name) + shape + struct.pack("<IQ", F32, offset)


def written(path: Path, entries: list[bytes], tensors: list[bytes], data: bytes = b"") -> Path:
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(entries))
    header = head + b"".join(entries + tensors)
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


def nested(depth: int) -> bytes:
    return struct.pack("<IQ", ARRAY, 1) * depth + struct.pack("<IQ", U32, 0)


DAMAGED: dict[str, tuple[list[bytes], list[bytes]]] = {
    "alignment 0": ([entry("general.alignment", U32, bytes(4))], [tensor("a", 4)]),
    "alignment -8": ([entry("general.alignment", I32, struct.pack("<i", -8))], [tensor("a", 4)]),
    "alignment of text": ([entry("general.alignment", STRING, text("32"))], [tensor("a", 4)]),
    "arrays in arrays": ([entry("a", ARRAY, nested(100_000))], []),
    "array of an unknown type": ([entry("a", ARRAY, struct.pack("<IQIQ", 77, 1, U32, 0))], []),
    "array beyond the file": ([entry("a", ARRAY, struct.pack("<IQ", U32, 1 << 62))], []),
    "text beyond the file": ([entry("a", STRING, struct.pack("<Q", (1 << 64) - 1))], []),
    "no dimensions": ([], [tensor("a")]),
    "five dimensions": ([], [tensor("a", 1, 1, 1, 1, 4)]),
    "many dimensions": ([], [text("a") + struct.pack("<I", (1 << 32) - 1)]),
    "tensor beyond the file": ([], [tensor("a", 5)]),
    "huge tensor": ([], [tensor("a", *[1 << 63] * 4)]),
    "far tensor": ([], [tensor("a", 1, offset=(1 << 64) - 1)]),
    "tensors that overlap": ([], [tensor("a", 3), tensor("b", 2, offset=8)]),
    "tensors of one name": ([], [tensor("a", 2), tensor("a", 2, offset=8)]),
}


def test_a_whole_header_is_read(tmp_path: Path) -> None:
    tensors = [tensor("b", 2, offset=8), tensor("a", 2, 1), tensor("none", 0, offset=8)]
    entries = [
        entry("general.alignment", U32, struct.pack("<I", 32)),
        entry("a", ARRAY, nested(2)),
        entry("texts", ARRAY, struct.pack("<IQ", STRING, 2) + text("x") + text("")),
    ]
    data = struct.pack("<4f", 1, 2, 3, 4)
    file = read_gguf(written(tmp_path / "own.gguf", entries, tensors, data))
    assert file.floats("b") == [3.0, 4.0]
    assert file.tensors["a"].shape == (1, 2)
    assert file.metadata["texts"] == ["x", ""]
    assert file.metadata["a"] == [[[]]]


@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_header_is_refused(tmp_path: Path, what: str) -> None:
    path = written(tmp_path / "own.gguf", *DAMAGED[what], data=bytes(16))
    with pytest.raises(ModelError, match=r"own\.gguf: not a whole GGUF file"):
        read_gguf(path)


def number(key: str, value: int) -> bytes:
    return entry(f"llama.{key}", U32, struct.pack("<I", value))


@pytest.mark.parametrize(
    "head_count",
    [number("attention.head_count", 0), entry("llama.attention.head_count", STRING, text("x"))],
)
def test_metadata_of_no_model_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head_count: bytes
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    entries = [entry("general.architecture", STRING, text("llama")), head_count]
    keys = ("embedding_length", "feed_forward_length", "block_count", "context_length")
    entries += [number(key, 8) for key in keys]
    path = written(tmp_path / "own.gguf", entries, [])
    with pytest.raises(ModelError, match=r"own\.gguf: its metadata describe no model"):
        unfold(path)
    assert not list((tmp_path / "cache").rglob(".unfolding-*"))
