"""How devices share a model: degrees, which of them divide it, and what ranks exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from baton.errors import ConfigError
from baton.types import DTYPE_BYTES
from engine.plan.devices import Device
from engine.plan.model import ModelSizes

#: Raises ConfigError for a tensor parallel degree that does not divide the model.
CheckTensor = Callable[[int], None]


@dataclass(frozen=True, slots=True, order=True)
class Degrees:
    """tensor: ranks that share each layer; pipeline: stages of consecutive layers; expert: ranks of
    a stage that share the experts as whole ones; 1: each rank has rows of every expert."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1

    @property
    def num_devices(self) -> int:
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        expert = f" EP{self.expert}" if self.expert > 1 else ""
        return f"TP{self.tensor} PP{self.pipeline}{expert}"


@dataclass(frozen=True, slots=True)
class Refused:
    """Degrees that the model cannot have, and why."""

    degrees: Degrees
    reason: str


def candidates(num_devices: int) -> Iterator[Degrees]:
    """Degrees of workers that use all of num_devices devices, alone or as several equal workers."""
    for used in _divisors(num_devices):
        for tensor in _divisors(used):
            yield Degrees(tensor, used // tensor)


def variants(
    model: ModelSizes, degrees: Degrees, check_tensor: CheckTensor
) -> tuple[list[Degrees], Refused | None]:
    """The degrees as they are, and with experts shared as whole ones, as far as the model divides;
    or why it does not."""
    if degrees.pipeline > len(model.layers):
        return [], Refused(degrees, f"the model has {len(model.layers)} layers")
    try:
        check_tensor(degrees.tensor)
    except ConfigError as error:
        return [], Refused(degrees, _reason(error))
    found = [degrees]
    if degrees.tensor > 1 and model.num_experts and model.num_experts % degrees.tensor == 0:
        found.append(Degrees(degrees.tensor, degrees.pipeline, degrees.tensor))
    return found, None


def stage_layers(num_layers: int, num_stages: int) -> tuple[range, ...]:
    """Layers of each stage; the first ones have one more where they do not divide."""
    size, more = divmod(num_layers, num_stages)
    starts = [stage * size + min(stage, more) for stage in range(num_stages + 1)]
    return tuple(range(start, end) for start, end in pairwise(starts))


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a rank receives in one layer. bytes_per_token: of each token of a step; num: how often
    ranks wait for each other."""

    num: int = 0
    bytes_per_token: float = 0.0

    def seconds(self, num_tokens: int, device: Device) -> float:
        moved = num_tokens * self.bytes_per_token / device.link_bytes_per_s
        return self.num * device.link_latency_s + moved


def layer_exchange(
    model: ModelSizes, degrees: Degrees, device: Device, *, has_experts: bool
) -> Exchange:
    """Exchange of tensor parallel ranks in one layer.

    On a CPU four gathers of what each layer puts out (docs/adr/0009); on GPUs two ring all-reduces
    of the hidden state. Experts as whole ones: in place of the second all-reduce, tokens go to the
    ranks of their experts and back.
    """
    size = DTYPE_BYTES[model.storage.dtype]
    others = (degrees.tensor - 1) / degrees.tensor
    if degrees.tensor == 1:
        return Exchange()
    if device.kind == "cpu":
        width = model.attention_width + 2 * model.hidden_size + model.inner_width
        return Exchange(4, others * width * size)
    reduced = 2 * others * model.hidden_size * size
    if degrees.expert == 1 or not has_experts:
        return Exchange(2, 2 * reduced)
    sent = 2 * others * model.num_chosen * model.hidden_size * size / degrees.tensor
    return Exchange(3, reduced + sent)


def stage_exchange(model: ModelSizes, degrees: Degrees) -> Exchange:
    """Hidden states from one stage to the next: each rank sends its part."""
    if degrees.pipeline == 1:
        return Exchange()
    return Exchange(1, model.hidden_size * DTYPE_BYTES[model.storage.dtype] / degrees.tensor)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _reason(error: ConfigError) -> str:
    """The error's text after "tensor_parallel_size=N: "."""
    return error.message.partition(": ")[2] or error.message
