"""A checkpoint of each architecture, made once, with what transformers says to some prompts."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.torch.engine import TorchEngine
from tests.support.architectures import VOCAB_SIZE, make_checkpoint
from tests.support.engines import load_engine

NUM_TOKENS = 8
#: One token; some; more than a window of 8 and a block of 16.
PROMPT_LENGTHS = (1, 7, 30)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(0, VOCAB_SIZE, (n,), generator=generator).tolist() for n in PROMPT_LENGTHS
    ]


def load(path: Path, **options: Any) -> TorchEngine:
    """An engine, by transformers' code if no other is asked for, quietly. A sequence's states, if
    it has any, are in the slot of its first block's number: tests name blocks as they like."""
    quiet = {"progress": lambda _: None, "on_plan": lambda _: None}
    defaults = {"model_impl": "transformers", "num_blocks": 32}
    engine = load_engine(str(path), **{**defaults, **quiet, **options})
    for table in engine.kv.slot_tables.values():
        table.of_block[:] = array("q", range(engine.spec.num_blocks))
    return engine


@dataclass(frozen=True, slots=True)
class Case:
    """expected: NUM_TOKENS greedy tokens for each of `prompts`, by transformers' generate."""

    path: Path
    expected: list[list[int]]
    engine: TorchEngine


@pytest.fixture(scope="session")
def case_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """The case of an architecture."""

    @cache
    def make(name: str) -> Case:
        path = make_checkpoint(tmp_path_factory.mktemp(name), name)
        return Case(path, _generate(path), load(path))

    return make


def _generate(path: Path) -> list[list[int]]:
    """One prompt after the other, with no padding; in a batch positions of some would be others."""
    from transformers import AutoModelForCausalLM

    read: Any = AutoModelForCausalLM.from_pretrained
    model = read(path, dtype=torch.float32)
    options = {"max_new_tokens": NUM_TOKENS, "do_sample": False, "pad_token_id": 0}
    outputs = []
    for prompt in prompts():
        mask = torch.ones(1, len(prompt), dtype=torch.int64)
        ids = model.generate(torch.tensor([prompt]), attention_mask=mask, **options)
        outputs.append(ids[0, len(prompt) :].tolist())
    return outputs
