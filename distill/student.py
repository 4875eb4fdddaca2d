"""The draft model: its shape, its loss, and metrics of its drafts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from distill.training import LossFn

#: Dimensions per head, and the ratio of feed-forward width to model width.
_HEAD_DIM = 32
_FEED_FORWARD = 1.75


def student_config(
    vocab_size: int, max_tokens: int, hidden_size: int, num_layers: int, end_ids: Sequence[int]
) -> LlamaConfig:
    """A small Llama with tied embeddings, which hold most of its parameters."""
    num_heads = hidden_size // _HEAD_DIM
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=int(_FEED_FORWARD * hidden_size),
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=2 if num_heads % 2 == 0 else 1,
        head_dim=_HEAD_DIM,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=list(end_ids) or None,
        pad_token_id=None,
    )


def new_student(config: LlamaConfig, seed: int) -> LlamaForCausalLM:
    """A model with random weights from `seed`."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(config)


def logits_of(model: nn.Module, inputs: Tensor) -> Tensor:
    """inputs int64 [windows, context] -> float32 [windows * context, vocab]."""
    logits: Tensor = model(input_ids=inputs, use_cache=False).logits
    return logits.flatten(0, 1).float()


def distillation_loss(target: nn.Module, student: nn.Module) -> LossFn:
    """KL(target || student) plus the target's entropy (a constant), in nats per token; ignores the
    next ids."""

    def loss(inputs: Tensor, _: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = logits_of(target, inputs).softmax(-1)
        return F.cross_entropy(logits_of(student, inputs), wanted)

    return loss


@torch.no_grad()
def round_weights(model: nn.Module) -> None:
    """Round the weights in place to bfloat16, as they are written."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16())


@torch.inference_mode()
def draft_figures(
    target: nn.Module, student: nn.Module, windows: Sequence[Tensor]
) -> dict[str, float]:
    """Metrics over held-out windows [tokens]: acceptance, the mean of sum(min(p, q)) at temperature
    1, and top1_agreement, the share of places where both models have the same likeliest token."""
    accepted = agreed = num_tokens = 0.0
    for window in windows:
        p = logits_of(target, window[None]).softmax(-1)
        q = logits_of(student, window[None]).softmax(-1)
        accepted += float(torch.minimum(p, q).sum())
        agreed += float((p.argmax(-1) == q.argmax(-1)).sum())
        num_tokens += len(p)
    return {"acceptance": accepted / num_tokens, "top1_agreement": agreed / num_tokens}
