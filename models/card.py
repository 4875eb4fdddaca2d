"""The record of a training, and the model cards made from it."""

from dataclasses import dataclass

TARGET_STORY = """\
A Llama-architecture model with grouped-query attention (8 query heads, 2 key-value heads), trained
from scratch with Muon and AdamW on windows of 256, then 512, then 2048 tokens."""

DRAFT_STORY = """\
A two-layer Llama-architecture model with the tokenizer of `baton-py-6m`, distilled from it: the
loss is the KL divergence from the target's next-token distribution on the training text.
`acceptance` is the mean of sum(min(p, q)) at temperature 1, the share of drafted tokens that
speculative sampling keeps; `top1_agreement` is its greedy counterpart."""


@dataclass(frozen=True)
class TrainingRecord:
    """The content of training.json; `validation` has the metrics of `models.evaluation`."""

    versions: dict[str, str]
    parameters: int
    seed: int
    steps: int
    thread_time_s: int
    tokens_seen: int
    corpus: dict[str, int]
    validation: dict[str, float]


def target_card(record: TrainingRecord) -> str:
    """README.md of the target."""
    return _card("baton-py-6m", "target", TARGET_STORY, record)


def draft_card(record: TrainingRecord) -> str:
    """README.md of the draft."""
    return _card("baton-py-6m-draft", "draft", DRAFT_STORY, record)


def _card(name: str, command: str, story: str, record: TrainingRecord) -> str:
    corpus, minutes = record.corpus, round(record.thread_time_s / 60)
    size = f"{record.steps:,} steps, {record.tokens_seen:,} tokens"
    figures = "\n".join(f"| {key} | {value:.4f} |" for key, value in record.validation.items())
    versions = ", ".join(f"{library} {version}" for library, version in record.versions.items())
    return f"""---
license: apache-2.0
language: code
library_name: transformers
pipeline_tag: text-generation
tags: [python, tiny]
---
# {name}

{record.parameters:,} parameters that write something like Python, so that a checkout of Baton can
serve, test and measure a real language model with no download and no GPU.

## How it was made
{story}

{size}, {minutes} minutes of two threads on a 2-core CPU.
Seed {record.seed}; {versions}.
Weights are bf16; the input and output embeddings are tied.

    python -m models.train {command} --minutes {minutes}

The schedule follows the processor's clock: another run gives a model like this one, not the
same weights.

## Data
The source of the Python {record.versions["python"]} standard library without its tests:
{corpus["train_files"]} files, {corpus["train_bytes"]:,} bytes. Its documented functions appear
again as chat exchanges: the docstring asks, the source answers.
The tokenizer is a byte-level BPE of 4,096 tokens trained on the same files; it loses no byte.

## Figures
On {corpus["validation_files"]} files ({corpus["validation_bytes"]:,} bytes), held out by a hash of
their path, in windows of 1,024 tokens:

| figure | value |
|---|---|
{figures}

## What it is not
An assistant, or a tool for writing code. It knows the look of Python and nothing else, repeats
pieces of the standard library, and its code is mostly wrong. Do not run what it writes.

## Licence
Weights: Apache-2.0. Training text: the Python standard library, under the PSF License Version 2.
"""
