"""The engine alone on the CPU: time of a decode step and of a prompt, beside transformers and beside the machine's roof.

    python -m bench.engine [MODEL] [--contender NAME ...] [--batch 1 8 32] [--context 500] [--steps 12] [--rounds 3]
                           [--threads N] [--shape LAYERS,HIDDEN,INTERMEDIATE,HEADS,KV_HEADS,VOCAB] [--json FILE]

Contenders are processes of their own that take turns, first to last, then again from the next one, so that a noisy
machine is noisy for all. The table has the median over all steps of all rounds, and the best. Prompts are random tokens; every
contender gets the same. `baton-twins` is Baton without its native kernels, `continuous-batching` is transformers'
generate_batch, whose time is that of prompts and steps together, over the number of steps.

`floor` is the least time that a step can take on this machine by the roof measured in this run: weights and KV read once at
the read roof, or its operations at the bfloat16 roof, whichever is longer. A model that fits the cache can be faster.

With --shape a Llama of that shape with random weights is made in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from baton.model.config import ModelConfig, read_config
from baton.model.memory_plan import num_parameters
from bench.engine_contenders import NAMES
from bench.machine import describe_commit, describe_machine, describe_versions
from bench.roof import Roof, measure_roof

_BOX_MODEL = str(Path(__file__).parents[1] / "models" / "baton-py-6m")
_DEFAULT = ("baton", "baton-twins", "transformers")


@dataclass(frozen=True, slots=True)
class Figure:
    """One contender at one batch: milliseconds of a step, and of a prompt."""

    contender: str
    batch: int
    context: int
    median_ms: float
    best_ms: float
    prompt_ms: float
    floor_ms: float
    prompt_floor_ms: float


def floor_s(config: ModelConfig, batch: int, context: int, roof: Roof) -> float:
    """The least time of a step of `batch` sequences with `context` tokens each, bfloat16."""
    embeddings = config.vocab_size * config.hidden_size
    used = num_parameters(config) - (0 if config.is_tied else embeddings)
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * 2
    read_s = (2 * used + batch * context * per_token) / roof.read_bytes_per_s
    attention = 4 * config.num_layers * config.num_heads * config.head_dim * batch * context
    return max(read_s, (2 * used * batch + attention) / roof.bf16_flops_per_s)


def prompt_floor_s(config: ModelConfig, context: int, roof: Roof) -> float:
    """The least time of a prompt by its operations: causal attention, and logits of the last token alone."""
    embeddings = config.vocab_size * config.hidden_size
    used = num_parameters(config) - embeddings * (1 if config.is_tied else 2)
    attention = 2 * config.num_layers * config.num_heads * config.head_dim * context**2
    return (2 * used * context + attention + 2 * embeddings) / roof.bf16_flops_per_s


@contextmanager
def contender_process(name: str, model: str, num_threads: int) -> Iterator[subprocess.Popen[str]]:
    """A process that answers tasks; ended when its input ends."""
    command = [sys.executable, "-m", "bench.engine_contenders", name, model, str(num_threads)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        yield process
        if process.stdin:
            process.stdin.close()


def ask(process: subprocess.Popen[str], batch: int, context: int, num_steps: int) -> dict[str, Any]:
    """One task's answer. Raises RuntimeError if the process ended."""
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the contender has no pipes")
    task = {"batch": batch, "context": context, "num_steps": num_steps}
    process.stdin.write(json.dumps(task) + "\n")
    process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended")
    answer: dict[str, Any] = json.loads(line)
    return answer


def measure(
    model: str, contenders: Sequence[str], given: argparse.Namespace
) -> tuple[list[Figure], Roof]:
    """All figures of a model."""
    config = read_config(Path(model))
    torch.set_num_threads(given.threads)
    roof = measure_roof()
    figures = []
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(contender_process(name, model, given.threads))
            for name in contenders
        }
        for batch in given.batch:
            answers: dict[str, list[dict[str, Any]]] = {name: [] for name in contenders}
            for turn in range(given.rounds + 1):
                for name in [
                    *contenders[turn % len(contenders) :],
                    *contenders[: turn % len(contenders)],
                ]:
                    answers[name].append(ask(processes[name], batch, given.context, given.steps))
            for name in contenders:
                # The first round warms up.
                steps = [s for answer in answers[name][1:] for s in answer["steps_s"]]
                prompt_s = min(answer["prefill_s"] for answer in answers[name][1:]) / batch
                figures.append(
                    Figure(
                        name,
                        batch,
                        given.context,
                        statistics.median(steps) * 1e3,
                        min(steps) * 1e3,
                        prompt_s * 1e3,
                        floor_s(config, batch, given.context, roof) * 1e3,
                        prompt_floor_s(config, given.context, roof) * 1e3,
                    )
                )
    return figures, roof


def table(figures: Sequence[Figure], roof: Roof) -> Iterator[str]:
    """Markdown."""
    yield (
        f"Roof of this run: {roof.read_bytes_per_s / 1e9:.0f} GB/s read, "
        f"{roof.bf16_flops_per_s / 1e9:.0f} bf16 GFLOP/s."
    )
    yield ""
    yield "| B | contender | step, median ms | best ms | floor ms | floor / best | prompt ms | floor / prompt |"
    yield "|---|---|---|---|---|---|---|---|"
    for f in figures:
        prompt = (
            f"{f.prompt_ms:.1f} | {f.prompt_floor_ms / f.prompt_ms:.2f}" if f.prompt_ms else "| "
        )
        yield (
            f"| {f.batch} | {f.contender} | {f.median_ms:.2f} | {f.best_ms:.2f} | {f.floor_ms:.2f} "
            f"| {f.floor_ms / f.best_ms:.2f} | {prompt} |"
        )


def make_random_model(folder: Path, shape: str) -> str:
    """A bfloat16 Llama of a --shape; returns its path."""
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, intermediate, heads, kv_heads, vocab = map(int, shape.split(","))
    config: Any = LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    torch.set_default_dtype(torch.bfloat16)
    LlamaForCausalLM(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    return str(folder)


def main() -> None:
    """Measure and tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", nargs="?", default=_BOX_MODEL)
    parser.add_argument("--contender", nargs="+", choices=NAMES, default=_DEFAULT)
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--context", type=int, default=500)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shape")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = make_random_model(Path(folder), given.shape) if given.shape else given.model
        figures, roof = measure(model, given.contender, given)
    sys.stdout.write("\n".join(table(figures, roof)) + "\n")
    if given.json:
        told = {
            "machine": describe_machine(),
            "versions": describe_versions(),
            "commit": describe_commit(),
            "options": {key: str(value) for key, value in vars(given).items()},
            "roof": asdict(roof),
            "figures": [asdict(figure) for figure in figures],
        }
        given.json.write_text(json.dumps(told, indent=2) + "\n")


if __name__ == "__main__":
    main()
