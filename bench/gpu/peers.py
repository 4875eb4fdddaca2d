"""transformers' continuous batching, the alternative for users, compared with Baton's engine on the
same work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from baton.types import Sampling
from bench.gpu.engine_speed import BLOCK_SIZE, model_config
from bench.gpu.graph_speed import load_replayed
from bench.gpu.interpreter import on_kernels
from bench.gpu.setting import Result, Setting
from engine.interface import Batch, SampleRow, SequenceSlice


def _work(setting: Setting) -> tuple[int, int, int]:
    """Number of sequences, prompt tokens and output tokens per sequence."""
    return setting.pick(64, 2), setting.pick(512, 12), setting.pick(64, 3)


def _prompts(num_seqs: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    return [
        [(13 * i + 7 * j) % (vocab_size - 10) for j in range(num_tokens)] for i in range(num_seqs)
    ]


def _result(num_seqs: int, num_out: int, seconds: float) -> Result:
    return {"ms": seconds * 1000, "output_tokens_per_s": num_seqs * num_out / seconds}


def baton(setting: Setting) -> Result:
    """Greedy: prompts in steps of at most 8K tokens, then all sequences decode together with
    graphs."""
    found = load_replayed(setting)
    model, engine = found.model, found.engine
    num_seqs, num_prompt, num_out = _work(setting)
    prompts = _prompts(num_seqs, num_prompt, model.config.vocab_size)
    width = -(-(num_prompt + num_out) // BLOCK_SIZE)
    greedy = Sampling(temperature=0.0)

    def part(index: int, tokens: list[int], start: int) -> SequenceSlice:
        blocks = tuple(range(index * width, (index + 1) * width))
        row = SampleRow(len(tokens) - start - 1, greedy, tokens, num_prompt)
        return SequenceSlice(tokens[start:], start, blocks, (row,), num_prompt)

    def run() -> None:
        sequences = [list(prompt) for prompt in prompts]
        at_once = max(1, 8192 // num_prompt)
        for first in range(0, num_seqs, at_once):
            some = range(first, min(num_seqs, first + at_once))
            step = Batch(tuple(part(i, sequences[i], 0) for i in some))
            for i, (sample,) in zip(some, engine.forward(step), strict=True):
                sequences[i].append(sample.token_id)
        for _ in range(num_out - 1):
            step = Batch(tuple(part(i, s, len(s) - 1) for i, s in enumerate(sequences)))
            for sequence, (sample,) in zip(sequences, engine.forward(step), strict=True):
                sequence.append(sample.token_id)

    with on_kernels(setting):
        return _result(num_seqs, num_out, _seconds(run, setting))


def transformers_batching(setting: Setting) -> Result:
    """transformers' generate_batch with the same shapes and work."""
    if setting.is_dry:
        return {"skipped": "on a CPU it takes most of the memory for its cache"}
    import transformers

    num_seqs, num_prompt, num_out = _work(setting)
    config = transformers.LlamaConfig.from_dict(model_config(setting))
    with torch.device(setting.device):
        model: Any = transformers.LlamaForCausalLM(config)
    model = model.to(setting.half).eval()
    model.set_attn_implementation("paged|sdpa")
    prompts = _prompts(num_seqs, num_prompt, config.vocab_size)
    make_rules: Any = transformers.GenerationConfig
    rules = make_rules(max_new_tokens=num_out, do_sample=False, eos_token_id=None, pad_token_id=0)

    def run() -> None:
        model.generate_batch(inputs=prompts, generation_config=rules)

    return _result(num_seqs, num_out, _seconds(run, setting))


def _seconds(run: Callable[[], None], setting: Setting) -> float:
    """Best of two runs, after a first one that compiles."""
    times = []
    for _ in range(setting.pick(3, 1)):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times[-2:])


#: Runs in the process with the engine.
ITEMS: Mapping[str, Callable[[Setting], Result]] = {"64 prompts of 512, 64 tokens each": baton}
#: Run in a process of their own, which needs the GPU's memory.
OTHERS: Mapping[str, Callable[[Setting], Result]] = {
    "the same with transformers' continuous batching": transformers_batching,
}
