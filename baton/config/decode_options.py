"""Options of decode workers."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from baton.config.fields import Count, KvDtype, NonEmpty
from baton.config.options import Options
from baton.config.worker_options import SchedulingOptions, WorkerOptions
from baton.types import Tier


class SpeculationOptions(Options):
    """Speculative decoding."""

    speculative_method: Literal["auto", "none", "ngram", "draft", "eagle", "medusa", "mtp"] = "auto"
    """How decode workers draft tokens for verification in one step. ngram: the tokens that followed
    an earlier occurrence of the last ones; draft: the model --speculative-model; eagle, medusa:
    heads over MODEL's hidden states, in --speculative-model; mtp: MODEL's own multi-token
    prediction layer; none: no drafts. auto: none on a GPU, because steps with drafts are not
    scheduled ahead; ngram otherwise. The output tokens are the same for all."""
    speculative_model: NonEmpty | None = None
    """Draft model, with MODEL's tokenizer, EAGLE head or Medusa heads: a local directory, or a
    Hugging Face Hub id."""
    num_speculative_tokens: Count = 8
    """Maximum tokens drafted per sequence and step; fewer if more would not pay off."""
    speculative_tree: NonEmpty | None = None
    """Candidates per position of a head, such as 3,2: three for the first draft, two for the
    second, one for each after. All are verified in one step, which raises the chance that one is
    accepted. Each candidate costs one row of the step per token on its path."""

    @property
    def tree_widths(self) -> tuple[int, ...]:
        """Widths of --speculative-tree; empty for one candidate per position."""
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
    """Scheduling, memory and graphs of decode workers."""

    max_local_prefill_tokens: Annotated[int, Field(ge=0)] | None = None
    """Maximum uncached prompt tokens that a decode worker computes itself while a prefill worker
    could; if not given, chosen by measured speed."""
    colocated: bool = False
    """Decode workers compute all prompts themselves, without prefill workers."""
    swap_space: Annotated[float, Field(ge=0)] = 1.0
    """Host memory, in GiB, for the KV of preempted sequences; KV that does not fit is
    recomputed."""
    kv_transfer_dtype: KvDtype = "auto"
    """Data type of KV in transfers to decode workers; auto takes the narrower of the two workers'
    types. fp8 and int8 include scales and halve the bytes of 16-bit types, at some cost in
    quality."""
    enforce_eager: bool = False
    """On a GPU, run decode steps eagerly instead of replaying CUDA graphs. Saves the graphs' memory
    and capture time."""
    max_cudagraph_capture_size: Count = 512
    """Maximum new tokens of a decode step captured as a CUDA graph: one for each sequence, and one
    for each draft that is verified; larger steps run eagerly."""

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
    def max_graph_tokens(self) -> int | None:
        """Maximum new tokens of a captured step; None without capture."""
        if self.enforce_eager:
            return None
        # Steps run eagerly while a head reads their states, so its drafts are in no graph.
        has_drafts = self.speculative_method in ("ngram", "draft")
        per_sequence = 1 + (self.num_speculative_tokens if has_drafts else 0)
        return min(self.max_cudagraph_capture_size, per_sequence * self.max_num_seqs)
