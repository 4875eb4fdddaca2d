"""transformers as a contender: `generate`."""

from __future__ import annotations

import time
from itertools import pairwise
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria

from bench.peers.task import Answer, Task, prompts_of


def _load(model: str, dtype: str) -> Any:
    return AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype))


def _rules(num_tokens: int) -> GenerationConfig:
    """Greedy decoding of exactly num_tokens."""
    rules: Any = GenerationConfig  # its __init__ has no annotations
    config: GenerationConfig = rules(
        max_new_tokens=num_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    return config


class _Clock(StoppingCriteria):
    """Records times; `generate` calls it after each token. Never stops."""

    def __init__(self) -> None:
        self.times_s: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:  # noqa: ARG002
        self.times_s.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


class GenerateContender:
    """All prompts in one batch of equal lengths."""

    def __init__(self, model: str, dtype: str) -> None:
        self._model = _load(model, dtype)

    @torch.inference_mode()
    def run(self, task: Task) -> Answer:
        ids = torch.tensor(prompts_of(task, self._model.config.vocab_size))
        clock = _Clock()
        started = time.perf_counter()
        written = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=_rules(task.num_tokens),
            stopping_criteria=[clock],
        )
        steps = tuple(after - before for before, after in pairwise(clock.times_s))
        tokens = tuple(map(tuple, written[:, task.context :].tolist()))
        return Answer(clock.times_s[0] - started, steps, tokens)
