"""Greedy outputs of transformers' generate, which outputs of engines and of whole systems must
equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def greedy_outputs(
    path: Path, prompts: Sequence[Sequence[int]], num_tokens: int
) -> list[list[int]]:
    """num_tokens ids behind each prompt, computed in float32; no token ends an output."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return [greedy_output(model, prompt, num_tokens) for prompt in prompts]


def greedy_output(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """num_tokens ids behind a prompt, by a model of transformers."""
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    ids: list[int] = output[0, len(prompt) :].tolist()
    return ids
