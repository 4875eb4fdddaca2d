"""Train short, test long: perplexity by length of models that read beyond their training.

    python -m bench.train_short [--windows 3] [--minutes 1] [--json FILE] [--write]

Rotary models: the bundled draft model, trained on up to 2,048 tokens, reads 8,192 with each way to
stretch it by 4. ALiBi: a small model with ALiBi and one with RoPE are trained for 128 tokens here,
for --minutes of processor time each, and read 1,024. Perplexity at a length is that of the last
tokens of a prompt of it, 255 or 63 of them, the same at each length, in text that was held out from
training. --write: renews the table of docs/long_context.md and docs/figures/train_short.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from baton.types import Sampling
from bench.machine import BUNDLED_MODEL, ROOT, document_of, now, publish
from bench.suite.markdown import about, number, replaced, table
from engine.config import CacheConfig, DeviceConfig, EngineConfig, ModelChoice
from engine.families.overrides import NO_OVERRIDES, ConfigOverrides
from engine.interface import Batch, SampleRow, SequenceSlice
from engine.load import load_engine
from engine.torch.engine import TorchEngine
from models.corpus import encode_documents, read_corpus, training_stream

PAGE, PICTURE = ROOT / "docs" / "long_context.md", ROOT / "docs" / "figures" / "train_short.png"
ROTARY_MODEL = f"{BUNDLED_MODEL}-draft"
_CHUNK, _BLOCK_SIZE = 1024, 64


@dataclass(frozen=True, slots=True)
class Lengths:
    """trained: longest window of the training. read: lengths of the prompts; num_scored:
    tokens at their end that perplexity is of."""

    trained: int
    read: tuple[int, ...]
    num_scored: int


ROTARY = Lengths(2048, (512, 1024, 2048, 3072, 4096, 8192), 255)
TRAINED_HERE = Lengths(128, (64, 128, 256, 512, 1024), 63)
_FACTOR = ROTARY.read[-1] // ROTARY.trained
#: Of the bundled draft model.
_HEAD_DIM, _THETA = 32, 10_000.0


def stretches() -> dict[str, ConfigOverrides]:
    """Ways to stretch the bundled draft model, by name."""
    longer = {"max_position_embeddings": ROTARY.read[-1]}
    original = {"original_max_position_embeddings": ROTARY.trained}
    ntk = _THETA * _FACTOR ** (_HEAD_DIM / (_HEAD_DIM - 2))
    pairs = _HEAD_DIM // 2
    # From 1 for the fastest pair to the factor for the slowest.
    factors = [_FACTOR ** (i / (pairs - 1)) for i in range(pairs)]
    longrope = {"short_factor": [1.0] * pairs, "long_factor": factors}
    return {
        "none": ConfigOverrides(longer),
        "linear": _scaled("linear", factor=_FACTOR),
        "NTK": ConfigOverrides(longer, {"rope_type": "default", "rope_theta": ntk}),
        "dynamic NTK": _scaled("dynamic", factor=_FACTOR),
        "YaRN": _scaled("yarn", factor=_FACTOR, **original),
        "dynamic YaRN": _scaled("dynamic_yarn", factor=_FACTOR, **original),
        "longrope": ConfigOverrides(
            longer, {"rope_type": "longrope", "factor": _FACTOR, **longrope, **original}
        ),
    }


def _scaled(rope_type: str, **parameters: object) -> ConfigOverrides:
    return ConfigOverrides({}, {"rope_type": rope_type, **parameters})


@dataclass(frozen=True, slots=True)
class Curve:
    """Perplexity by length of one model."""

    name: str
    trained: int
    perplexity: Mapping[int, float]


def curve(name: str, engine: TorchEngine, texts: Sequence[Sequence[int]], of: Lengths) -> Curve:
    """Perplexity over texts of the longest length. The scored tokens are the last ones at each
    length: longer prompts begin earlier."""
    losses = {n: sum(_loss(engine, text[-n:], of.num_scored) for text in texts) for n in of.read}
    num_scored = len(texts) * of.num_scored
    return Curve(name, of.trained, {n: math.exp(x / num_scored) for n, x in losses.items()})


def _loss(engine: TorchEngine, prompt: Sequence[int], num_scored: int) -> float:
    """Sum of the losses of a prompt's last tokens, in nats."""
    blocks, end = tuple(range(-(-len(prompt) // _BLOCK_SIZE))), len(prompt)
    bounds = [*range(0, end - num_scored - 1, _CHUNK), end - num_scored - 1, end - 1]
    for start, stop in pairwise(bounds):
        tokens = prompt[start:stop]
        rows = [SampleRow(i, Sampling(), prompt, end) for i in range(len(tokens))]
        scored = tuple(rows if stop == end - 1 else rows[-1:])
        part = SequenceSlice(tokens, start, blocks, scored, num_prompt_tokens=end)
        logits = engine.logits(Batch((part,)))
    expected = torch.tensor(prompt[-num_scored:])
    return float(F.cross_entropy(logits.float(), expected, reduction="sum"))


def load(model: str, of: Lengths, overrides: ConfigOverrides = NO_OVERRIDES) -> TorchEngine:
    """An engine for the longest length."""
    longest = of.read[-1]
    choice = ModelChoice(model, max_model_len=longest, overrides=overrides)
    cache = CacheConfig(_BLOCK_SIZE, num_blocks=-(-longest // _BLOCK_SIZE))
    return load_engine(EngineConfig(choice, cache, device=DeviceConfig(num_threads=1)))


def trained_models(folder: Path, minutes: float) -> Iterator[tuple[str, Path]]:
    """Train and save a model with RoPE and one with ALiBi, of one size, on the same windows."""
    from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

    from models.loop import Plan, train

    tokenizer = tokenizer_of(BUNDLED_MODEL)
    stream = training_stream(tokenizer, read_corpus().train, seed=0)
    common: dict[str, Any] = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 128,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    rope = LlamaConfig(
        **common,
        intermediate_size=344,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=TRAINED_HERE.read[-1],
    )
    alibi = BloomConfig(**common, n_layer=3, n_head=4)
    builds: dict[str, Callable[[], Any]] = {
        "RoPE": lambda: LlamaForCausalLM(rope),
        "ALiBi": lambda: BloomForCausalLM(alibi),
    }
    for name, build in builds.items():
        torch.manual_seed(0)
        model = build()

        def loss_of(
            inputs: torch.Tensor, expected: torch.Tensor, model: Any = model
        ) -> torch.Tensor:
            logits = model(input_ids=inputs, use_cache=False).logits
            return F.cross_entropy(logits.flatten(0, 1).float(), expected.flatten())

        context = ((0.0, TRAINED_HERE.trained),)
        train(model, loss_of, stream, Plan(minutes, 0, context, folder / f"{name}.pt"), False)
        model.save_pretrained(folder / name)
        yield name, folder / name


def tokenizer_of(model: str) -> Tokenizer:
    """The tokenizer of a model's folder."""
    return Tokenizer.from_file(f"{model}/tokenizer.json")


def texts_of(num_windows: int, num_tokens: int, tokenizer: Tokenizer) -> list[list[int]]:
    """Windows of held-out documents, one after the other."""
    documents = encode_documents(tokenizer, read_corpus().validation)
    stream = torch.cat([document.long() for document in documents])
    return [
        stream[i * num_tokens : (i + 1) * num_tokens].tolist()
        for i in range(min(num_windows, len(stream) // num_tokens))
    ]


def curves(num_windows: int, minutes: float) -> Iterator[Curve]:
    """All curves, first those of the bundled draft model. minutes: 0 trains nothing."""
    tokenizer = tokenizer_of(BUNDLED_MODEL)
    texts = texts_of(num_windows, ROTARY.read[-1], tokenizer)
    for name, overrides in stretches().items():
        yield curve(name, load(ROTARY_MODEL, ROTARY, overrides), texts, ROTARY)
    if not minutes:
        return
    short = texts_of(8 * num_windows, TRAINED_HERE.read[-1], tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        for name, model in trained_models(Path(folder), minutes):
            yield curve(name, load(str(model), TRAINED_HERE), short, TRAINED_HERE)


def tables_of(found: Sequence[Curve]) -> str:
    """Markdown: one table for each length of training."""
    parts = []
    for trained in dict.fromkeys(each.trained for each in found):
        some = [each for each in found if each.trained == trained]
        heads = [f"{n:,}" for n in some[0].perplexity]
        rows = [[each.name, *map(number, each.perplexity.values())] for each in some]
        parts.append(table((f"Trained on {trained:,} tokens", *heads), rows))
    return "\n\n".join(parts)


def draw(found: Sequence[Curve], path: Path) -> None:
    """Write a PNG: a panel for each length of training. Needs matplotlib."""
    from matplotlib.figure import Figure

    lengths = list(dict.fromkeys(each.trained for each in found))
    figure = Figure(figsize=(6.5 * len(lengths), 5), layout="constrained")
    panels = figure.subplots(1, len(lengths), squeeze=False)[0]
    for axis, trained in zip(panels, lengths, strict=True):
        some = [each for each in found if each.trained == trained]
        for index, each in enumerate(some):
            line = ("-", "--", "-.", ":")[index % 4]
            values = list(each.perplexity.values())
            axis.plot(list(each.perplexity), values, line, marker=".", label=each.name)
        axis.axvline(trained, color="0.5", linewidth=1)
        axis.set(xscale="log", yscale="log", xlabel="length of the prompt, tokens")
        axis.set(ylabel="perplexity of its last tokens", title=f"trained on {trained:,} tokens")
        ticks = list(some[0].perplexity)
        axis.set_xticks(ticks, [f"{n:,}" for n in ticks], fontsize="small")
        axis.xaxis.minorticks_off()
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.grid(alpha=0.3, which="both")
        axis.legend()
    figure.savefig(path, format="png", dpi=90)


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--windows", type=int, default=3, help="texts of 8,192 tokens")
    parser.add_argument("--minutes", type=float, default=1.0, help="of training each; 0: none")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    started, found = now(), []
    for each in curves(given.windows, given.minutes):
        print(each.name, *(f"{value:.2f}" for value in each.perplexity.values()), flush=True)
        found.append(each)
    data = {"curves": [dataclasses.asdict(each) for each in found]}
    document = document_of("bench.train_short", started, data)
    publish(document, given.json, lambda _: tables_of(found))
    if given.write:
        draw(found, PICTURE)
        body = f"{about(document)}\n\n{tables_of(found)}"
        PAGE.write_text(replaced(PAGE.read_text(), "train-short", body))


if __name__ == "__main__":
    main()
