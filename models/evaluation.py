"""Metrics on the held-out files."""

from math import log

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import LlamaForCausalLM

from models.corpus import encode_documents

WINDOW_TOKENS = 1024


def windows(tokenizer: Tokenizer, documents: list[str]) -> list[Tensor]:
    """Pieces of up to WINDOW_TOKENS + 1 ids; each id except a document's first is predicted
    once."""
    return [
        ids[start : start + WINDOW_TOKENS + 1]
        for ids in encode_documents(tokenizer, documents)
        for start in range(0, len(ids) - 1, WINDOW_TOKENS)
    ]


def log_probs(model: LlamaForCausalLM, window: Tensor) -> Tensor:
    """float32 [tokens - 1, vocab]: scores for each id of `window` [tokens] after the first."""
    logits: Tensor = model(input_ids=window[None, :-1], use_cache=False).logits
    return logits[0].float().log_softmax(-1)


@torch.inference_mode()
def language_figures(
    model: LlamaForCausalLM, tokenizer: Tokenizer, documents: list[str]
) -> dict[str, float]:
    """How well `model` predicts `documents`."""
    nats = correct = tokens = 0.0
    for window in windows(tokenizer, documents):
        scores, expected = log_probs(model, window), window[1:]
        nats -= float(scores.gather(1, expected[:, None]).sum())
        correct += float((scores.argmax(-1) == expected).sum())
        tokens += len(expected)
    num_bytes = sum(len(text.encode()) for text in documents)
    return {
        "bits_per_byte": nats / log(2) / num_bytes,
        "loss_nats_per_token": nats / tokens,
        "next_token_accuracy": correct / tokens,
        "bytes_per_token": num_bytes / tokens,
    }


@torch.inference_mode()
def acceptance_figures(
    target: LlamaForCausalLM, draft: LlamaForCausalLM, tokenizer: Tokenizer, documents: list[str]
) -> dict[str, float]:
    """`acceptance` is the mean over positions of sum(min(p, q)), at temperature 1."""
    accepted = agreed = tokens = 0.0
    for window in windows(tokenizer, documents):
        p, q = log_probs(target, window), log_probs(draft, window)
        accepted += float(torch.minimum(p, q).exp().sum())
        agreed += float((p.argmax(-1) == q.argmax(-1)).sum())
        tokens += len(p)
    return {"acceptance": accepted / tokens, "top1_agreement": agreed / tokens}
