"""Fills a decoder's parameters from a checkpoint's safetensors or GGUF file, with threads that read
and digest ahead."""

from __future__ import annotations

import logging
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from baton.errors import MissingTensor, ModelError, TensorMismatch
from baton.gguf.folder import SUFFIX
from baton.start_log import report_phase
from engine.checkpoint import find_shards
from engine.memory_plan import format_bytes
from engine.quantization.config import QuantizationConfig
from engine.quantization.decode import layer_of_scheme
from engine.quantization.pending import PLAIN, PendingLayers
from engine.quantization.weight import StoredWeight, stack
from engine.torch.gguf_tensors import gguf_tensors
from engine.torch.parameters import Fillable, Target
from engine.torch.stacked_experts import StackedExperts

_log = logging.getLogger(__name__)

#: Unused tensors of old checkpoints.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$|attn\.masked_bias$")

#: Reader threads: disks serve parallel reads faster.
NUM_READERS = 8
#: Maximum bytes read ahead. Mapped files use no memory of their own, but page-locked copies do.
_AHEAD_BYTES = 4 << 30
_REPORT_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class ShardProgress:
    """Progress of loading: `done_bytes` of `num_bytes` of shard `index` (from 0) of
    `num_shards`."""

    name: str
    index: int
    num_shards: int
    done_bytes: int
    num_bytes: int


ProgressHook = Callable[[ShardProgress], None]


def no_progress(_: ShardProgress) -> None:
    """For ranks other than 0: that one reports progress."""


class Keeper(Protocol):
    """Receives quantised weights as stored, instead of a Fillable's memory."""

    @property
    def keeps(self) -> Callable[[StoredWeight], bool]:
        """Whether it keeps such a weight; others are dequantised."""
        ...

    def keep(self, layer: str, weight: StoredWeight) -> None:
        """Receive a rank's part of the weight of a checkpoint's layer."""
        ...

    def on_filled(self, name: str) -> None:
        """Called when the tensor has been read, into the Fillable's memory or by `keep`."""
        ...


def load_weights(
    folder: Path,
    parameters: Fillable,
    progress: ProgressHook | None = None,
    quantization: QuantizationConfig | None = None,
    keeper: Keeper | None = None,
    is_elsewhere: Callable[[str], bool] = lambda _: False,
) -> str:
    """Fill `parameters` from `folder`. Quantised weights are dequantised, unless `keeper` keeps
    them. Returns the digest of all tensors read, by name, type and bytes. is_elsewhere: by name,
    tensors that are read for the digest only.

    Raises MissingTensor, TensorMismatch, UnsafeCheckpoint, ModelError.
    """
    filling = _Filling(parameters, quantization, keeper)
    pins = parameters.device.type == "cuda"

    def taker_of(name: str, tensor: torch.Tensor, path: Path) -> Take | None:
        return _discard if is_elsewhere(name) else filling.taker_of(name, tensor, path)

    digest = _read_shards(folder, taker_of, progress, pins)
    filling.finish(folder)
    return digest


def digest_checkpoint(folder: Path, progress: ProgressHook | None = None) -> str:
    """The digest of load_weights, over all tensors in `folder`. Raises UnsafeCheckpoint,
    ModelError."""

    return _read_shards(folder, lambda *_: _discard, progress)


def read_dequantized(
    folder: Path,
    quantization: QuantizationConfig,
    dtype: torch.dtype,
    transposed: AbstractSet[str],
    progress: ProgressHook | None = None,
) -> tuple[dict[str, torch.Tensor], str]:
    """Tensors of a checkpoint in dense form, by name: quantised weights dequantised to `dtype`,
    others unchanged; and the digest of load_weights.

    transposed: suffixes of layers with dense weights [in, out]. Raises MissingTensor,
    TensorMismatch, UnsafeCheckpoint, ModelError.
    """
    names = (stored.name for stored in _stored_tensors(list(find_shards(folder))))
    layers = frozenset(filter(None, (layer_of_scheme(name, quantization) for name in names)))
    pending, dense = PendingLayers(quantization, layers), dict[str, torch.Tensor]()

    def take(name: str, path: Path, tensor: torch.Tensor) -> None:
        whole = _add_piece(pending, name, path, tensor)
        if whole is not None:
            layer, weight = whole
            wide = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
            is_transposed = layer.rpartition(".")[2] in transposed
            own = wide.t().contiguous() if is_transposed else wide
            dense[f"{layer}.weight"] = own.to(dtype)

    def keep(name: str, path: Path, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point() or name.endswith(".weight"):
            _check_dtype(name, tensor, path)
        dense[name] = tensor

    def taker_of(name: str, tensor: torch.Tensor, path: Path) -> Take | None:
        if pending.takes(name, tensor.dtype):
            return partial(take, name, path)
        return None if pending.is_unused(name) else partial(keep, name, path)

    digest = _read_shards(folder, taker_of, progress)
    _refuse_unfinished(folder, pending)
    return dense, digest


#: Consumer of a tensor that was read.
Take = Callable[[torch.Tensor], None]


def _discard(_: torch.Tensor) -> None:
    """Accept a tensor of which only the digest is needed."""


#: From (name, mapped tensor, shard path): the tensor's consumer; None for a tensor to skip.
TakerOf = Callable[[str, torch.Tensor, Path], Take | None]
#: Reads a mapped tensor into memory; returns it and its digest.
Read = Callable[[torch.Tensor], tuple[torch.Tensor, str]]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A mapped tensor of shard `index` at `path`."""

    index: int
    path: Path
    name: str
    tensor: torch.Tensor


def _read_shards(
    folder: Path, taker_of: TakerOf, progress: ProgressHook | None, pins: bool = False
) -> str:
    """Pass each wanted tensor to its consumer, in order, while threads read and digest later ones.
    pins: read into page-locked memory, for GPU copies at full link speed. Returns the digest of all
    tensors read."""
    shards = list(find_shards(folder))
    sizes = [path.stat().st_size for path in shards]
    done = [0] * len(shards)
    digests: dict[str, str] = {}
    read = partial(_read, pins=pins)
    at = 0

    def show(index: int) -> None:
        if progress:
            path = shards[index]
            progress(ShardProgress(path.name, index, len(shards), done[index], sizes[index]))

    def finish(end: int) -> None:
        for index in range(at, end):
            done[index] = sizes[index]
            show(index)

    for stored, take, (tensor, digest) in read_ahead(_stored_tensors(shards), taker_of, read):
        finish(stored.index)
        at = stored.index
        take(tensor)
        digests[stored.name] = digest
        done[at] += tensor.nbytes
        show(at)
    finish(len(shards))
    return _total(digests)


def _stored_tensors(shards: Sequence[Path]) -> Iterator[StoredTensor]:
    """All tensors of the shards, mapped. Raises ModelError."""
    for index, path in enumerate(shards):
        if path.suffix == SUFFIX:
            for name, tensor in gguf_tensors(path):
                yield StoredTensor(index, path, name, tensor)
            continue
        try:
            with safe_open(path, framework="pt", device="cpu") as shard:
                for name in sorted(shard.keys()):
                    yield StoredTensor(index, path, name, shard.get_tensor(name))
        except SafetensorError as error:
            raise ModelError(
                f"{path}: not a whole safetensors file ({error}); fetch it again"
            ) from error


def read_ahead(
    stored: Iterable[StoredTensor], taker_of: TakerOf, read: Read
) -> Iterator[tuple[StoredTensor, Take, tuple[torch.Tensor, str]]]:
    """Wanted tensors in order, each with the tensor read and its digest. read: called in one of
    several threads."""
    waiting: deque[tuple[StoredTensor, Take, Future[tuple[torch.Tensor, str]]]] = deque()
    num_bytes = 0
    readers = ThreadPoolExecutor(NUM_READERS, "reads-weights")
    try:
        for each in stored:
            take = taker_of(each.name, each.tensor, each.path)
            if take is None:
                continue
            waiting.append((each, take, readers.submit(read, each.tensor)))
            num_bytes += each.tensor.nbytes
            while num_bytes > _AHEAD_BYTES:
                first, take, done = waiting.popleft()
                num_bytes -= first.tensor.nbytes
                yield first, take, done.result()
        for first, take, done in waiting:
            yield first, take, done.result()
    finally:
        readers.shutdown(cancel_futures=True)


def _read(mapped: torch.Tensor, pins: bool) -> tuple[torch.Tensor, str]:
    tensor = mapped.pin_memory() if pins else mapped
    return tensor, _digest(tensor)


def _total(digests: Mapping[str, str]) -> str:
    """Digest of all tensors, from the digest of each."""
    total = xxhash.xxh3_128()
    for name in sorted(digests):
        total.update(f"{name}={digests[name]};".encode())
    return total.hexdigest()


class _Filling:
    """Destinations of a checkpoint's tensors, and the set of those already read."""

    def __init__(
        self,
        parameters: Fillable,
        quantization: QuantizationConfig | None,
        keeper: Keeper | None,
    ) -> None:
        self._targets: dict[str, list[Target]] = {}
        for name, target in parameters.targets():
            self._targets.setdefault(name, []).append(target)
        self._ignores = parameters.ignores
        self._keeper = keeper
        self._linears = parameters.linear_names()
        self._pending = None
        if quantization is not None:
            others = (name for name in quantization.layers if f"{name}.weight" in self._targets)
            self._pending = PendingLayers(quantization, self._linears.union(others))
        self._stacked = StackedExperts() if parameters.has_stacked_experts else None
        self._filled: set[str] = set()

    def taker_of(self, name: str, tensor: torch.Tensor, path: Path) -> Take | None:
        """See TakerOf. Raises TensorMismatch for a tensor without a destination; its consumer does
        so for one that does not fit."""
        pending, stacked = self._pending, self._stacked
        if pending is not None and pending.takes(name, tensor.dtype):
            return partial(self._take_quantized, pending, name, path)
        if pending is not None and self._is_idle(pending, name, tensor):
            return None
        if stacked is not None and stacked.takes(name):
            return partial(self._take_stacked, stacked, name, path)
        return partial(self._fill, name, path) if self._targets_of(name, path) else None

    def _is_idle(self, pending: PendingLayers, name: str, tensor: torch.Tensor) -> bool:
        """Whether a quantised checkpoint has it without use: older GPTQ tools wrote zero biases for
        layers without one."""
        is_bias = name not in self._targets and pending.is_bias(name)
        return pending.is_unused(name) or (is_bias and not tensor.any())

    def _take_quantized(
        self, pending: PendingLayers, name: str, path: Path, tensor: torch.Tensor
    ) -> None:
        whole = _add_piece(pending, name, path, tensor)
        if whole is not None:
            self._put(*whole, path)

    def _take_stacked(
        self, stacked: StackedExperts, name: str, path: Path, tensor: torch.Tensor
    ) -> None:
        try:
            for piece, part in stacked.pieces(name, tensor):
                if isinstance(part, torch.Tensor):
                    self._fill(piece, path, part)
                elif self._targets_of(piece, path):
                    self._put(piece.removesuffix(".weight"), part, path)
        except ValueError as error:
            raise TensorMismatch(f"{path.name}: {name!r}: {error}") from error

    def _fill(self, name: str, path: Path, tensor: torch.Tensor) -> None:
        targets = self._targets_of(name, path)
        for target in targets:
            _check(name, tensor, target, path)
            target.fill(tensor)
        if targets:
            self._on_filled(name)

    def _targets_of(self, name: str, path: Path) -> Sequence[Target]:
        """Destinations; empty for a tensor to skip. Raises TensorMismatch for an unknown tensor."""
        targets = self._targets.get(name, ())
        if not targets and not (_IGNORED.search(name) or self._ignores(name)):
            fix = "the config and the weights must be of one model"
            if self._stacked is not None and ".experts." in name:
                fix = (
                    "each layer's experts are read from one tensor, or one by one with gate and up "
                    "in one gate_up_proj; of this checkpoint's model use the one in mxfp4, or an "
                    "unquantised one"
                )
            raise TensorMismatch(
                f"{path.name}: tensor {name!r} has no place in the model that config.json "
                f"describes; {fix}"
            )
        return targets

    def _put(self, layer: str, weight: StoredWeight | torch.Tensor, path: Path) -> None:
        name = f"{layer}.weight"
        targets = self._targets[name]
        if weight.shape != targets[0].shape:
            raise _wrong_shape(name, weight.shape, targets[0], path)
        keeper = self._keeper
        if (
            keeper
            and not isinstance(weight, torch.Tensor)
            and len(targets) == 1
            and layer in self._linears
            and keeper.keeps(weight)
            and keeper.keeps(own := stack([weight.part(s.take) for s in targets[0].sources]))
        ):
            keeper.keep(layer, own)
        else:
            whole = weight if isinstance(weight, torch.Tensor) else weight.dequantize()
            for target in targets:
                target.fill(whole)
        self._on_filled(name)

    def _on_filled(self, name: str) -> None:
        self._filled.add(name)
        if self._keeper:
            self._keeper.on_filled(name)

    def finish(self, folder: Path) -> None:
        """Check completeness after all tensors. Raises MissingTensor."""
        if self._pending is not None:
            _refuse_unfinished(folder, self._pending)
        if self._stacked is not None and (halves := self._stacked.missing):
            raise MissingTensor(
                f"{folder}: {len(halves)} tensors are missing, the first {halves[0]!r}; the "
                "checkpoint is not whole"
            )
        _refuse_missing(folder, self._targets, self._filled)


def _check(name: str, tensor: torch.Tensor, target: Target, path: Path) -> None:
    if tensor.shape != target.shape:
        raise _wrong_shape(name, tensor.shape, target, path)
    _check_dtype(name, tensor, path)


def _check_dtype(name: str, tensor: torch.Tensor, path: Path) -> None:
    if tensor.dtype not in PLAIN:
        raise TensorMismatch(
            f"{path.name}: tensor {name!r} is of {tensor.dtype}; "
            "float32, bfloat16 and float16 are read"
        )


def _wrong_shape(name: str, found: torch.Size, target: Target, path: Path) -> TensorMismatch:
    return TensorMismatch(
        f"{path.name}: tensor {name!r} is {list(found)}, but config.json makes it "
        f"{list(target.shape)}; the config and the weights must be of one model"
    )


def _add_piece(
    pending: PendingLayers, name: str, path: Path, tensor: torch.Tensor
) -> tuple[str, StoredWeight | torch.Tensor] | None:
    """See PendingLayers.add. Raises TensorMismatch."""
    try:
        return pending.add(name, tensor)
    except (ValueError, RuntimeError, IndexError) as error:
        raise TensorMismatch(
            f"{path.name}: {name!r} does not fit quantization_config: {error}"
        ) from error


def _refuse_unfinished(folder: Path, pending: PendingLayers) -> None:
    if parts := pending.missing():
        layer = min(parts)
        raise MissingTensor(
            f"{folder}: {len(parts)} quantised layers lack tensors, the first {layer!r}: "
            f"{', '.join(parts[layer])}"
        )


def _refuse_missing(
    folder: Path, targets: Mapping[str, Sequence[Target]], found: AbstractSet[str]
) -> None:
    missing = [name for name in targets if name not in found]
    if missing:
        shape = list(targets[missing[0]][0].shape)
        raise MissingTensor(
            f"{folder}: {len(missing)} tensors are missing, the first {missing[0]!r} {shape}; "
            "the checkpoint is not whole, or not of the architecture in config.json"
        )


def _digest(tensor: torch.Tensor) -> str:
    data = tensor.contiguous().flatten().view(torch.uint8).numpy().data
    return f"{tensor.dtype}{list(tensor.shape)}{xxhash.xxh3_128_hexdigest(data)}"


@contextmanager
def terminal_progress() -> Iterator[ProgressHook]:
    """Progress bar per shard on stderr if that is a terminal, else a log line per shard."""
    if not sys.stderr.isatty():
        yield _reporter()
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


def _reporter(clock: Callable[[], float] = time.monotonic) -> ProgressHook:
    """Logs once per second, for large checkpoints, with the bytes per second of all shards so far;
    and once per shard."""
    started = last = clock()
    done_bytes: dict[int, int] = {}

    def report(step: ShardProgress) -> None:
        nonlocal last
        done_bytes[step.index] = step.done_bytes
        now = clock()
        if step.done_bytes == step.num_bytes:
            _log.info(
                "loaded shard %d/%d %s (%s)",
                step.index + 1,
                step.num_shards,
                step.name,
                format_bytes(step.num_bytes),
            )
        elif now - last >= _REPORT_EVERY_S:
            last = now
            rate = format_bytes(int(sum(done_bytes.values()) / (now - started)))
            of_shard = f"{format_bytes(step.done_bytes)} of {format_bytes(step.num_bytes)}"
            report_phase(
                f"loading weights ({of_shard}, file {step.index + 1} of {step.num_shards}, "
                f"{rate}/s)"
            )

    return report
