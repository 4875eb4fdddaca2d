"""Chooses the code that runs a checkpoint's layers: Baton's own, or transformers'."""

from __future__ import annotations

import logging
from pathlib import Path

from baton.errors import UnsupportedModel
from engine.families.overrides import NO_OVERRIDES, ConfigOverrides
from engine.families.read import choose_implementation, read_config
from engine.model_source import ModelSource
from engine.native_source import NativeModel

_log = logging.getLogger(__name__)


def model_source(
    folder: Path, model_impl: str, overrides: ConfigOverrides = NO_OVERRIDES
) -> ModelSource:
    """ModelSource of the checkpoint in `folder`. model_impl: see choose_implementation. Raises
    ModelError."""
    chosen = choose_implementation(folder, model_impl, overrides)
    if chosen.name == "baton":
        return NativeModel(folder, read_config(folder, overrides))
    # Imported here, because it imports transformers, which is slow.
    from engine.transformers.source import TransformersModel

    if not chosen.refusal:
        return TransformersModel(folder, overrides)
    try:
        source = TransformersModel(folder, overrides)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{chosen.refusal}. By transformers: {error.message}") from error
    _log.warning("transformers' code runs the layers: Baton's own do not (%s)", chosen.refusal)
    return source
