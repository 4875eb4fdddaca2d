"""Whether a graph can hold the decode steps of a model by transformers' code.

The code runs once without data, with one token of each of several sequences. A graph holds what
the device does by itself, so an operation that reads a result on the host, copies from the host's
memory, or has a result of as many elements as its data asks for, is a reason against it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.families.overrides import NO_OVERRIDES, ConfigOverrides
from engine.torch.sequence_states import SequenceStates
from engine.transformers import states
from engine.transformers.attention import set_attention
from engine.transformers.describe import (
    Description,
    make_model,
    quietly,
    read_transformers_config,
    takes_positions,
)
from engine.transformers.device_experts import reads_them

_META = torch.device("meta")
#: What code raises that needs data.
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)
#: Sequences of the step.
_NUM_ROWS = 3
#: Operations that read data on the host, or have a shape that depends on data.
_OF_DATA = frozenset(
    {
        *("item", "_local_scalar_dense", "is_nonzero", "equal", "bincount"),
        *("nonzero", "masked_select", "unique_dim", "_unique", "_unique2", "unique_consecutive"),
    }
)


def why_not(folder: Path, found: Description, overrides: ConfigOverrides = NO_OVERRIDES) -> str:
    """Why no graph can hold decode steps of the checkpoint in `folder`; empty if one can. Says
    nothing of kernels of other packages, which transformers' code takes where they are."""
    config = read_transformers_config(folder, overrides)
    with torch.inference_mode(), quietly():
        with torch.device("meta"):
            model = make_model(config)
        if not reads_them(model):
            return "torch's grouped product computes its experts, and may read counts on the host"
        return _run(model, found)


def _run(model: nn.Module, found: Description) -> str:
    """The reason that a step finds."""
    body: Any = model.get_submodule(found.body)
    for layer in found.layers:
        set_attention(model.get_submodule(layer.module), _attend)
    rows = torch.empty(_NUM_ROWS, dtype=torch.int64, device=_META)
    places = torch.empty(1, len(found.state_layers), found.state_elements, device=_META)
    step = _Step((SequenceStates(0, _NUM_ROWS, places, rows, rows),))
    states.install(model, found.state_layers, lambda: step)
    arguments = {"input_ids": rows[None], "use_cache": False}
    if takes_positions(body):
        arguments["position_ids"] = rows[None]
    # Before a step is captured it runs once, which makes what the code keeps.
    with suppress(*_FAILURES):
        body(**arguments)
    try:
        with _NoHost():  # type: ignore[no-untyped-call]
            body(**arguments)
    except _NeedsHostError as error:
        return f"its code {error}"
    except _FAILURES as error:
        return f"its code does not run without data ({error!r:.200})"
    return ""


@dataclass(frozen=True, slots=True)
class _Step:
    """See StatesOfStep."""

    states: tuple[SequenceStates, ...]


def _attend(
    module: nn.Module,  # noqa: ARG001
    query: torch.Tensor,
    key: torch.Tensor,  # noqa: ARG001
    value: torch.Tensor,
    mask: torch.Tensor | None,  # noqa: ARG001
    settings: Mapping[str, Any],  # noqa: ARG001
) -> torch.Tensor:
    """See Attention: ours waits for nothing."""
    return query.new_empty(*query.shape[:1], query.shape[2], query.shape[1], value.shape[3])


class _NeedsHostError(Exception):
    """An operation that no graph holds."""


class _NoHost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises _NeedsHostError for operations that no graph holds, of tensors on the meta device in
    place of a GPU's."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if name in _OF_DATA or (
            name == "index" and any(x.dtype == torch.bool for x in tensors[1:])
        ):
            raise _NeedsHostError(f"calls {name}, which depends on data")
        # A single number is passed with a launch.
        if any(x.device != _META and x.dim() > 0 for x in tensors):
            raise _NeedsHostError(f"calls {name} with numbers of the host")
        # Nothing else of torch.tensor is to be seen for this device.
        if name == "detach_" and tensors[0].device == _META:
            raise _NeedsHostError("calls torch.tensor with numbers of the host")
        return func(*args, **(kwargs or {}))
