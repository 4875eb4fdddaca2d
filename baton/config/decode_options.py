"""The options of decode workers."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from baton.config.fields import Count, KvDtype, NonEmpty
from baton.config.options import Options
from baton.config.worker_options import SchedulingOptions, WorkerOptions
from baton.types import Tier


class SpeculationOptions(Options):
    """How decode workers guess tokens ahead, to confirm several in one step."""

    speculative_method: Literal["auto", "none", "ngram", "draft", "eagle", "medusa", "mtp"] = "auto"
    """ngram drafts what followed the last tokens where they occurred before; draft asks
    --speculative-model; eagle asks a head over MODEL's hidden states, and medusa several, which
    --speculative-model is; mtp asks MODEL's own layer for multi-token prediction; none drafts
    nothing. auto: none on a GPU, where steps with drafts are not replayed and not launched ahead;
    else ngram. The tokens of an answer are the same with each."""
    speculative_model: NonEmpty | None = None
    """Draft model, with MODEL's tokenizer, EAGLE head or Medusa heads: a local directory, or a
    Hugging Face Hub id."""
    num_speculative_tokens: Count = 8
    """Most tokens drafted for a sequence in one step; fewer where they are not worth their time."""
    speculative_tree: NonEmpty | None = None
    """Tokens that a head proposes for each place, as 3,2: three for the first draft, two for the
    second, one for each after. All are verified in one step, and one of them may be right where the
    likeliest is not; each takes as many rows of the step as it has tokens before it, and one."""

    @property
    def tree_widths(self) -> tuple[int, ...]:
        """What --speculative-tree says; empty for one token at each place."""
        return tuple(map(int, self.speculative_tree.split(","))) if self.speculative_tree else ()

    @model_validator(mode="after")
    def _check_tree(self) -> Self:
        given = self.speculative_tree
        if given is None:
            return self
        if not all(part.isdecimal() and int(part) > 0 for part in given.split(",")):
            raise ValueError(
                f"--speculative-tree={given}: give numbers from 1 on, one a place, with commas "
                "between, as 3,2"
            )
        if self.speculative_method not in ("eagle", "medusa", "mtp"):
            raise ValueError(
                f"--speculative-tree={given}: goes with --speculative-method=eagle, medusa or mtp, "
                "whose heads propose several tokens; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_speculation(self) -> Self:
        has_model = self.speculative_method in ("draft", "eagle", "medusa")
        if has_model != (self.speculative_model is not None):
            raise ValueError(
                f"--speculative-model={self.speculative_model}: goes with "
                "--speculative-method=draft, eagle or medusa; give both or neither"
            )
        return self


class DecodeTierOptions(SpeculationOptions, SchedulingOptions):
    """How decode workers treat their sequences."""

    max_local_prefill_tokens: Annotated[int, Field(ge=0)] | None = None
    """Missing prompt tokens up to which a decode worker computes by itself; if not given, what is
    measured to be faster."""
    colocated: bool = False
    """Decode workers compute all prompts themselves, and nothing is handed over."""
    swap_space: Annotated[float, Field(ge=0)] = 1.0
    """Host memory, in GiB, for the KV of preempted sequences; what does not fit is computed
    anew."""
    kv_transfer_dtype: KvDtype = "auto"
    """Type that KV travels in to decode workers; auto takes the narrower of the two workers' own.
    fp8 and int8 come with scales and halve the bytes of 16 bits, at some cost in quality."""
    enforce_eager: bool = False
    """On a GPU, launch each decode step operation by operation instead of replaying a CUDA graph of
    it. Saves their memory and the time to capture them."""
    max_cudagraph_capture_size: Count = 512
    """Most sequences of a decode step that is captured as a CUDA graph, of those that
    --max-num-seqs allows; larger ones run operation by operation."""

    @model_validator(mode="after")
    def _check_graphs(self) -> Self:
        if self.enforce_eager and "max_cudagraph_capture_size" in self.model_fields_set:
            raise ValueError(
                f"--max-cudagraph-capture-size={self.max_cudagraph_capture_size}: with "
                "--enforce-eager nothing is captured; leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_async_scheduling(self) -> Self:
        if self.async_scheduling and self.speculative_method not in ("auto", "none"):
            raise ValueError(
                f"--async-scheduling: drafts of --speculative-method={self.speculative_method} "
                "follow the tokens known; give --speculative-method none with it"
            )
        return self


class DecodeOptions(WorkerOptions, DecodeTierOptions):
    """Options of `baton decode`."""

    tier: ClassVar[Tier] = Tier.DECODE

    @property
    def max_graph_seqs(self) -> int | None:
        """Most sequences of a step that is captured; None if none is."""
        if self.enforce_eager:
            return None
        return min(self.max_cudagraph_capture_size, self.max_num_seqs)
