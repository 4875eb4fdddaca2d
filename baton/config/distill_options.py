"""Options of `baton distill`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from baton.config.fields import Count, NonEmpty
from baton.config.options import Options


class DistillOptions(Options):
    """Options of a distillation."""

    target: NonEmpty
    """Target model to distill: a local directory, or a Hugging Face Hub id."""
    data: Path
    """Training text similar to the target's expected output: a text file, or JSON lines with a
    field "text"."""
    output: Path
    """Output directory of the draft model."""
    method: Literal["draft", "eagle", "medusa"] = "draft"
    """draft: a separate small model, for --speculative-method=draft; eagle: an EAGLE-3 head over
    the target's hidden states, for --speculative-method=eagle; medusa: four Medusa heads, for
    --speculative-method=medusa."""
    minutes: Annotated[float, Field(gt=0)] = 15.0
    """Training time in minutes."""
    num_layers: Count = 2
    """Layers of the draft model."""
    hidden_size: Annotated[int, Field(ge=32, multiple_of=32)] | None = None
    """Width of the draft model; about half of the target's if not given."""
    context: Annotated[int, Field(ge=8)] = 256
    """Tokens per training window."""
    tokens_per_step: Count = 4096
    """Tokens per training step: windows of --context tokens, at least one."""
    num_threads: Count | None = None
    """CPU threads; all cores if not given."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of initial weights and batches."""
