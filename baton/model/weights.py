"""Fill a decoder's parameters from a checkpoint's safetensors, one shard after the other, and digest what was read."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from baton.errors import MissingTensor, ModelError, TensorMismatch
from baton.model.checkpoint import find_shards
from baton.model.memory_plan import format_bytes
from baton.model.parameters import Parameters

_log = logging.getLogger(__name__)

#: Tensors that old checkpoints hold and nobody reads.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|attn\.masked_bias$")


@dataclass(frozen=True, slots=True)
class ShardProgress:
    """Where loading stands: `done_bytes` of `num_bytes` of shard `index` (from 0) of `num_shards`."""

    name: str
    index: int
    num_shards: int
    done_bytes: int
    num_bytes: int


ProgressHook = Callable[[ShardProgress], None]


def load_weights(folder: Path, parameters: Parameters, progress: ProgressHook | None = None) -> str:
    """Fill `parameters` from `folder`; returns a digest of every tensor read, by name, type and bytes.

    Raises MissingTensor, TensorMismatch, UnsafeCheckpoint, ModelError.
    """
    targets = dict(parameters.targets())
    shards = find_shards(folder)
    digests: dict[str, str] = {}
    for index, path in enumerate(shards):
        size = path.stat().st_size
        done = 0
        try:
            with safe_open(path, framework="pt", device="cpu") as shard:
                for name in sorted(shard.keys()):
                    target = _target_of(name, targets, path, parameters.is_tied)
                    if target is None:
                        continue
                    tensor = shard.get_tensor(name)
                    _check(name, tensor, target, path)
                    target.copy_(tensor)
                    digests[name] = _digest(tensor)
                    done += tensor.nbytes
                    if progress:
                        progress(ShardProgress(path.name, index, len(shards), done, size))
        except SafetensorError as error:
            raise ModelError(
                f"{path}: not a whole safetensors file ({error}); fetch it again"
            ) from error
        if progress:
            progress(ShardProgress(path.name, index, len(shards), size, size))
    _refuse_missing(folder, targets, digests)
    total = xxhash.xxh3_128()
    for name in sorted(digests):
        total.update(f"{name}={digests[name]};".encode())
    return total.hexdigest()


def _target_of(
    name: str, targets: Mapping[str, torch.Tensor], path: Path, is_tied: bool
) -> torch.Tensor | None:
    """Where a tensor goes; None for one that is rightly not read."""
    target = targets.get(name)
    if target is None and not (_IGNORED.search(name) or (is_tied and name == "lm_head.weight")):
        raise TensorMismatch(
            f"{path.name}: tensor {name!r} has no place in the model that config.json describes; "
            "the config and the weights must be of one model"
        )
    return target


def _check(name: str, tensor: torch.Tensor, target: torch.Tensor, path: Path) -> None:
    if tensor.shape != target.shape:
        raise TensorMismatch(
            f"{path.name}: tensor {name!r} is {list(tensor.shape)}, but config.json makes it {list(target.shape)}; "
            "the config and the weights must be of one model"
        )
    if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TensorMismatch(
            f"{path.name}: tensor {name!r} is of {tensor.dtype}; float32, bfloat16 and float16 are read"
        )


def _refuse_missing(
    folder: Path, targets: Mapping[str, torch.Tensor], found: Mapping[str, str]
) -> None:
    missing = [name for name in targets if name not in found]
    if missing:
        shape = list(targets[missing[0]].shape)
        raise MissingTensor(
            f"{folder}: {len(missing)} tensors are missing, the first {missing[0]!r} {shape}; "
            "the checkpoint is not whole, or not of the architecture in config.json"
        )


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().view(torch.uint8).numpy().data
    return f"{tensor.dtype}{list(tensor.shape)}{xxhash.xxh3_128_hexdigest(data)}"


@contextmanager
def terminal_progress() -> Iterator[ProgressHook]:
    """A bar per shard on stderr where that is a terminal, a line of log per shard elsewhere."""
    if not sys.stderr.isatty():
        yield _log_progress
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks = {}

        def show(step: ShardProgress) -> None:
            if step.index not in tasks:
                title = f"{step.name} ({step.index + 1}/{step.num_shards})"
                tasks[step.index] = bars.add_task(title, total=step.num_bytes)
            bars.update(tasks[step.index], completed=step.done_bytes)

        yield show


def _log_progress(step: ShardProgress) -> None:
    if step.done_bytes == step.num_bytes:
        _log.info(
            "loaded shard %d/%d %s (%s)",
            step.index + 1,
            step.num_shards,
            step.name,
            format_bytes(step.num_bytes),
        )
