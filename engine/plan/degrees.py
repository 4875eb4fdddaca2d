"""How devices share a model: degrees, which of them divide it, and what ranks exchange."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from baton.errors import ConfigError
from baton.types import DTYPE_BYTES
from engine.plan.devices import Device
from engine.plan.model import ModelSizes
from engine.ranks.mesh import Degrees

#: Exchanges of ranks in a layer on a CPU: they gather what each linear layer puts out.
NUM_GATHERS = 4
#: Raises ConfigError for degrees that do not divide the model.
Check = Callable[[Degrees], None]


def name_of(degrees: Degrees) -> str:
    """For people: "TP2 PP4", with EP2 where the two ranks of a stage have whole experts."""
    experts = f" EP{degrees.tensor}" if degrees.whole_experts else ""
    return f"TP{degrees.tensor} PP{degrees.pipeline}{experts}"


@dataclass(frozen=True, slots=True)
class Refused:
    """Degrees that the model cannot have, and why."""

    degrees: Degrees
    reason: str


def candidates(num_devices: int) -> Iterator[Degrees]:
    """Degrees of workers on num_devices devices, equal ones: those that leave no device idle, and
    those of a power of two, which most models divide by."""
    for used in range(1, num_devices + 1):
        if num_devices % used and used.bit_count() > 1:
            continue
        for tensor in _divisors(used):
            yield Degrees(tensor, used // tensor)


def variants(
    model: ModelSizes, degrees: Degrees, check: Check
) -> tuple[list[Degrees], Refused | None]:
    """The degrees as they are, and with whole experts on each rank, as far as the model divides; or
    why it does not."""
    try:
        check(degrees)
    except ConfigError as error:
        return [], Refused(degrees, error.message.partition(": ")[2])
    found = [degrees]
    if degrees.tensor > 1 and model.num_experts and model.num_experts % degrees.tensor == 0:
        found.append(replace(degrees, whole_experts=True))
    return found, None


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a rank receives in one layer. bytes_per_token: of each token of a step; num: how often
    ranks wait for each other, wait_s each time."""

    num: int = 0
    bytes_per_token: float = 0.0
    wait_s: float = 0.0

    def seconds(self, num_tokens: int, device: Device) -> float:
        moved = num_tokens * self.bytes_per_token / device.link_bytes_per_s
        return self.num * self.wait_s + moved


def layer_exchange(
    model: ModelSizes, degrees: Degrees, device: Device, *, has_experts: bool
) -> Exchange:
    """Exchange of tensor parallel ranks in one layer.

    On a CPU four gathers of what each layer puts out (docs/adr/0009); on GPUs two ring all-reduces
    of the hidden state. Experts as whole ones: in place of the second all-reduce, tokens go to the
    ranks of their experts and back.
    """
    size = DTYPE_BYTES[model.storage.dtype]
    others, wait_s = (degrees.tensor - 1) / degrees.tensor, device.host(degrees.tensor).exchange_s
    if degrees.tensor == 1:
        return Exchange()
    if device.kind == "cpu":
        width = model.attention_width + 2 * model.hidden_size + model.inner_width
        return Exchange(NUM_GATHERS, others * width * size, wait_s)
    reduced = 2 * others * model.hidden_size * size
    if not (degrees.whole_experts and has_experts):
        return Exchange(2, 2 * reduced, wait_s)
    sent = 2 * others * model.num_chosen * model.hidden_size * size / degrees.tensor
    return Exchange(3, reduced + sent, wait_s)


def stage_exchange(model: ModelSizes, degrees: Degrees, device: Device) -> Exchange:
    """Hidden states from one stage to the next, between ranks with the same part of each layer."""
    if degrees.pipeline == 1:
        return Exchange()
    size = model.hidden_size * DTYPE_BYTES[model.storage.dtype]
    return Exchange(1, size, device.link_latency_s)


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
