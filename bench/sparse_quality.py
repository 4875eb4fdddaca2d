"""What sparse decode costs in quality: retrieval and perplexity of a model, by kind of choice.

    python -m bench.sparse_quality [MODEL] [--cases 6] [--tokens 1500] [--json FILE] [--write]

The model, a folder or a GGUF file (the bundled one if none is given), reads a prompt with full
attention, and then a continuation of known tokens, one a step, with each --attention-backend.
Tasks, made of text that was held out from the training of the bundled model:

    needle     one constant is assigned somewhere in the prompt, and printed at its end
    keys       eight constants are assigned, and one of them is printed
    repeat     a piece of the prompt comes again
    text       the text goes on

For the first three, the share of continuation tokens that are the likeliest; perplexity for all.
"""

from __future__ import annotations

import argparse
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from baton.types import Sampling
from bench.machine import BUNDLED_MODEL, ROOT, document_of, now, publish
from bench.suite.markdown import about, replaced, table
from bench.train_short import texts_of, tokenizer_of
from engine.checkpoint import resolve_checkpoint
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelChoice
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.load import load_engine
from engine.torch.engine import TorchEngine

PAGE = ROOT / "docs" / "long_context.md"
BACKENDS = ("auto", "sink-window:512", "pages:512", "sink-window:128", "pages:128")
_WORDS = ("socket", "window", "index", "parser", "thread", "buffer", "module", "signal", "header")
_BLOCK_SIZE, _NUM_REPEATED, _NUM_TEXT = 16, 24, 96


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, and the tokens that follow it."""

    task: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Quality:
    """Mean over the continuation's tokens of all cases of a task."""

    backend: str
    task: str
    likeliest: float
    perplexity: float


def cases_of(num_cases: int, num_tokens: int, model: str = BUNDLED_MODEL) -> Iterator[Case]:
    """Cases of each task, with prompts of about num_tokens tokens of the model's folder."""
    tokenizer = tokenizer_of(model)
    rng = random.Random(0)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    for text in texts_of(num_cases, num_tokens + _NUM_TEXT, tokenizer):
        filler, after = text[:num_tokens], text[num_tokens:]
        yield Case("text", tuple(filler), tuple(after))
        at = rng.randrange(num_tokens // 8, num_tokens // 2)
        piece = filler[at : at + _NUM_REPEATED + 16]
        cue, again = piece[:16], piece[16:]
        yield Case("repeat", tuple(filler + cue), tuple(again))
        for task, num_keys in (("needle", 1), ("keys", 8)):
            names = [f"KEY_{rng.randrange(10**4):04}" for _ in range(num_keys)]
            values = {name: f'"{rng.choice(_WORDS)}_{rng.choice(_WORDS)}"\n' for name in names}
            prompt, places = [], sorted(rng.randrange(num_tokens) for _ in names)
            for name, start, end in zip(names, [0, *places], places, strict=False):
                prompt += filler[start:end] + encode(f"\n{name} = {values[name]}")
            prompt += filler[places[-1] :]
            wanted = rng.choice(names)
            cue, whole = encode(f"\n{wanted} ="), encode(f"\n{wanted} = {values[wanted]}")
            yield Case(task, tuple(prompt + cue), tuple(whole[len(cue) :]))


def load(backend: str, num_tokens: int, model: str = BUNDLED_MODEL) -> TorchEngine:
    choice = ModelChoice(model, attention_backend=backend)
    cache = CacheConfig(_BLOCK_SIZE, num_blocks=-(-num_tokens // _BLOCK_SIZE))
    return load_engine(EngineConfig(choice, cache, device=DeviceConfig(num_threads=1)))


def scores(engine: TorchEngine, case: Case) -> tuple[int, float]:
    """Likeliest tokens among the answer's, and the sum of their losses in nats."""
    blocks, prompt = tuple(range(engine.spec.num_blocks)), case.prompt
    tokens = (*prompt, *case.answer)
    num_right, nats = 0, 0.0
    start, end = 0, len(prompt)
    for expected in case.answer:
        row = SampleRow(end - start - 1, Sampling(), tokens[:end], len(prompt))
        part = SequenceSlice(tokens[start:end], start, blocks, (row,), len(prompt))
        logits = engine.logits(Batch((part,)))[0]
        num_right += int(logits.argmax()) == expected
        nats -= float(logits.log_softmax(-1)[expected])
        start, end = end, end + 1
    return num_right, nats


def measure(
    backends: Sequence[str],
    cases: Sequence[Case],
    load: Callable[[str, int], TorchEngine] = load,
) -> Iterator[Quality]:
    """Quality of each backend and task. Raises ConfigError for a backend that is not known."""
    longest = max(len(case.prompt) + len(case.answer) for case in cases)
    for backend in backends:
        engine = load(backend, longest)
        for task in dict.fromkeys(case.task for case in cases):
            some = [case for case in cases if case.task == task]
            found = [scores(engine, case) for case in some]
            num_tokens = sum(len(case.answer) for case in some)
            right, nats = (sum(values) for values in zip(*found, strict=True))
            yield Quality(backend, task, right / num_tokens, math.exp(nats / num_tokens))


def table_of(found: Sequence[Quality]) -> str:
    """Markdown: a line for each backend."""
    tasks = list(dict.fromkeys(each.task for each in found))
    by_key: Mapping[tuple[str, str], Quality] = {(q.backend, q.task): q for q in found}
    headings = ["--attention-backend"]
    headings += [f"{task}: {what}" for task in tasks for what in _columns(task)]
    rows = []
    for backend in dict.fromkeys(each.backend for each in found):
        row = [f"`{backend}`"]
        for task in tasks:
            each = by_key[backend, task]
            shown = {"likeliest": f"{each.likeliest:.0%}", "perplexity": f"{each.perplexity:.2f}"}
            row += [shown[what] for what in _columns(task)]
        rows.append(row)
    return table(headings, rows)


def _columns(task: str) -> tuple[str, ...]:
    return ("perplexity",) if task == "text" else ("likeliest", "perplexity")


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default=BUNDLED_MODEL)
    parser.add_argument("--backends", nargs="+", default=BACKENDS)
    parser.add_argument("--cases", type=int, default=6, help="of each task")
    parser.add_argument("--tokens", type=int, default=1500, help="of a prompt")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    started, found = now(), []
    torch.manual_seed(0)
    model = str(resolve_checkpoint(given.model))
    cases = list(cases_of(given.cases, given.tokens, model))
    for each in measure(given.backends, cases, partial(load, model=model)):
        print(each, flush=True)
        found.append(each)
    document = document_of(
        "bench.sparse_quality", started, {"quality": [asdict(each) for each in found]}
    )
    publish(document, given.json, lambda _: table_of(found))
    if given.write:
        body = f"{about(document)}\n\n{table_of(found)}"
        PAGE.write_text(replaced(PAGE.read_text(), "sparse", body))


if __name__ == "__main__":
    main()
