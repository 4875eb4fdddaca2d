"""Reads which layers are windowed."""

from __future__ import annotations

from collections.abc import Callable

from baton.errors import UnsupportedModel
from engine.families.fields import Settings, lists_or_null

FIELDS = lists_or_null(layer_types=None)


def read_windows(
    settings: Settings,
    has_window: Callable[[int], bool] | None = None,
    *,
    follows_types: bool = True,
) -> tuple[int | None, ...]:
    """Attention window of each layer, see ModelConfig.windows.

    has_window: by layer index, used if config.json has no layer_types; default: all layers have the
    window. follows_types: False if all layers have the window regardless of layer_types. Raises
    UnsupportedModel.
    """
    num_layers: int = settings["num_hidden_layers"]
    is_used = settings.fields.get("use_sliding_window", True)
    window: int | None = settings.fields.get("sliding_window") if is_used else None
    if window is not None and window < 1:
        raise UnsupportedModel(f"sliding_window={window}: must be positive or null")
    layer_types = settings.raw.get("layer_types")
    if layer_types is None:
        layers = range(num_layers)
        return tuple(window if not has_window or has_window(i) else None for i in layers)
    known = ("full_attention", "sliding_attention")
    if not isinstance(layer_types, list):
        raise UnsupportedModel(f"layer_types={layer_types!r}: must be a list")
    unknown = sorted({str(kind) for kind in layer_types} - set(known))
    if unknown or len(layer_types) != num_layers:
        raise UnsupportedModel(
            f"layer_types with {unknown or len(layer_types)}: "
            f"one of {list(known)} per layer is known"
        )
    return tuple(
        window if kind == "sliding_attention" or not follows_types else None for kind in layer_types
    )


def alike(settings: Settings) -> tuple[int | None, ...]:
    """The window, if any, applies to all layers."""
    return read_windows(settings, follows_types=False)


def alternate(settings: Settings) -> tuple[int | None, ...]:
    """The window applies to the first layer and every other one after it."""
    return read_windows(settings, lambda layer: layer % 2 == 0)


def upper(settings: Settings) -> tuple[int | None, ...]:
    """The window, if any, applies to layers from max_window_layers on."""
    return read_windows(settings, lambda layer: layer >= settings["max_window_layers"])
