"""Places experts on ranks by their measured load: tokens per expert, kept in a file from one start
of a worker to the next."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import NonNegativeInt, TypeAdapter, ValidationError

from baton.errors import ConfigError
from engine.families.config import ModelConfig

#: By layer, a number for each expert; empty for a layer without experts.
PerExpert = tuple[tuple[int, ...], ...]

_FILE = TypeAdapter(dict[str, tuple[tuple[NonNegativeInt, ...], ...]])
_OPTION = "expert_load_file"


def place_experts(loads: PerExpert, size: int) -> PerExpert:
    """The rank of each expert. Each of `size` ranks has as many experts of a layer. The expert with
    the largest load is placed first, each on the rank with the smallest sum that has room (Graham,
    1969); without loads, experts alternate."""
    return tuple(_place(layer, size) for layer in loads)


def _place(loads: Sequence[int], size: int) -> tuple[int, ...]:
    room, sums, ranks = [len(loads) // size] * size, [0] * size, [0] * len(loads)
    for expert in sorted(range(len(loads)), key=lambda i: -loads[i]):
        rank = min((r for r in range(size) if room[r]), key=lambda r: (sums[r], -room[r]))
        ranks[expert] = rank
        room[rank] -= 1
        sums[rank] += loads[expert]
    return tuple(ranks)


def read_loads(path: Path | None, config: ModelConfig) -> PerExpert:
    """The loads in a file; zeros without a file. Raises ConfigError for a file of another model,
    and for one that could not be written."""
    experts = config.traits.experts
    none = tuple((0,) * experts.num_experts * has for has in experts.layers) if experts else ()
    if path is not None and not path.parent.is_dir():
        raise ConfigError.of(_OPTION, path, "is in no folder; make it, or name another")
    if path is None or not path.exists():
        return none
    try:
        loads = _FILE.validate_json(path.read_bytes())["tokens"]
    except (OSError, ValidationError, KeyError) as error:
        raise ConfigError.of(_OPTION, path, f"cannot be read ({error}); remove it") from error
    if [len(layer) for layer in loads] != [len(layer) for layer in none]:
        raise ConfigError.of(_OPTION, path, "is of a model with other experts; give another file")
    return loads


def write_loads(path: Path, loads: PerExpert, counted: Mapping[int, Sequence[int]]) -> None:
    """Replace the file. loads: as read. counted: by layer, of this run; layers that computed
    nothing, or that another rank computes, keep what was read. Without counts nothing is written.
    Raises OSError."""
    if not counted:
        return
    now = [
        list(counted[index]) if any(counted.get(index, ())) else layer
        for index, layer in enumerate(loads)
    ]
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps({"tokens": now}))
    part.replace(path)
