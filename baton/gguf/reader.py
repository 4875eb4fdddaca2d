"""Reads the header of a GGUF file: its metadata, and where its tensors lie.

Layout (github.com/ggml-org/ggml/blob/master/docs/gguf.md): magic, version, number of tensors and of
metadata entries; the entries; name, shape, type and offset of each tensor; then, from the next
multiple of general.alignment on, the tensors.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from baton.errors import ModelError, UnsupportedModel
from baton.gguf.block_types import BLOCK_TYPES, BlockType

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_MAX_DIMS = 4
#: Formats of struct by the number of a metadata value's type.
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
#: Errors that a damaged file causes; RecursionError: by arrays in arrays.
_DAMAGE = (OSError, ValueError, struct.error, KeyError, OverflowError, MemoryError, RecursionError)
_BY_NUMBER = {each.number: each for each in BLOCK_TYPES.values()}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor: shape as torch has it, [rows, columns] or [size]; offset: from the file's start, in
    bytes."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.num_values * self.type.num_bytes

    @property
    def num_bytes(self) -> int:
        return prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of the file at `path`. metadata: values by key, without those of other GGUF
    readers' private types. tensors: by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))

    def floats(self, name: str) -> list[float]:
        """Values of a float32 tensor; empty if there is none."""
        info = self.tensors.get(name)
        if info is None or info.type.name != "F32":
            return []
        with self.path.open("rb") as file:
            file.seek(info.offset)
            return [
                shortest(x)
                for x in struct.unpack(f"<{prod(info.shape)}f", file.read(info.num_bytes))
            ]


def read_gguf(path: Path) -> GgufFile:
    """Read a header. Raises ModelError, UnsupportedModel."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Header(path, data).read()
    except _DAMAGE as error:
        raise ModelError(f"{path}: not a whole GGUF file ({error!r}); fetch it again") from error


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32."""
    stored = struct.pack("<f", value)
    rounded = (float(f"{value:.{digits}g}") for digits in range(6, 10))
    return next((each for each in rounded if struct.pack("<f", each) == stored), value)


class _Header:
    """Reads from `at` on."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self._path, self._data, self._at = path, data, 0

    def read(self) -> GgufFile:
        if self._data[:4] != _MAGIC:
            raise ModelError(f"{self._path}: not a GGUF file; give one, or a checkpoint's folder")
        self._at = 4
        version, num_tensors, num_entries = self._take("IQQ")
        if version not in _VERSIONS:
            raise UnsupportedModel(
                f"{self._path}: GGUF version {version}: 2 and 3 in little-endian order are read; "
                "convert the model again"
            )
        metadata = {}
        for _ in range(num_entries):
            key = self._string()
            metadata[key] = self._value(self._take("I")[0])
        infos = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"general.alignment is {alignment!r}")
        start = -(-self._at // alignment) * alignment
        tensors = {each.name: replace(each, offset=start + each.offset) for each in infos}
        if len(tensors) < num_tensors:
            raise ValueError("two tensors have one name")
        self._check_places(tensors.values())
        return GgufFile(self._path, metadata, tensors)

    def _check_places(self, tensors: Iterable[TensorInfo]) -> None:
        """Raise ValueError unless each tensor has bytes of the file for itself."""
        end = 0
        for each in sorted(tensors, key=lambda each: (each.offset, each.num_bytes)):
            if each.offset < end:
                raise ValueError(f"{each.name} begins within another tensor")
            end = each.offset + each.num_bytes
            if end > len(self._data):
                raise ValueError(f"{each.name} ends beyond the file")

    def _take(self, form: str) -> tuple[Any, ...]:
        found = struct.unpack_from(f"<{form}", self._data, self._at)
        self._at += struct.calcsize(f"<{form}")
        return found

    def _string(self) -> str:
        (size,) = self._take("Q")
        if size > len(self._data) - self._at:
            raise ValueError(f"a string of {size} bytes")
        self._at += size
        # Some vocabularies have tokens that are no UTF-8.
        return self._data[self._at - size : self._at].decode(errors="replace")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array()
        (value,) = self._take(_SCALARS[kind])
        return shortest(value) if kind == _FLOAT32 else value

    def _array(self) -> list[Any]:
        kind, size = self._take("IQ")
        if size > len(self._data) - self._at:
            raise ValueError(f"an array of {size} values")
        if kind in _SCALARS:
            return list(self._take(f"{size}{_SCALARS[kind]}"))
        return [self._value(kind) for _ in range(size)]

    def _tensor(self) -> TensorInfo:
        name = self._string()
        (num_dims,) = self._take("I")
        if not 1 <= num_dims <= _MAX_DIMS:
            raise ValueError(f"{name} has {num_dims} dimensions")
        shape = tuple(reversed(self._take(f"{num_dims}Q")))
        number, offset = self._take("IQ")
        if number not in _BY_NUMBER:
            raise UnsupportedModel(
                f"{self._path}: tensor {name!r} is of type {number}: {', '.join(BLOCK_TYPES)} are "
                "read; use a file of these types"
            )
        kind = _BY_NUMBER[number]
        if shape[-1] % kind.num_values:
            raise ValueError(f"{name} is {list(shape)} of {kind.name}")
        return TensorInfo(name, kind, shape, offset)
