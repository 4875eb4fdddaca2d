"""Training of Medusa heads (Medusa-1, arXiv 2401.10774: the target is frozen), with a checkpoint in
vLLM's format.

Head k gets the target's last state at position t and learns the target's distribution at t + 1 + k,
without the tokens in between. The paper trains on the text's own tokens; here the labels are the
target's predictions. Later heads have smaller weights, as in the paper.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.training import LossFn
from engine.torch.medusa import ARCHITECTURE, MODEL_TYPE

#: Number of heads, with one layer each; and the weight of each head's loss relative to the one
#: before.
NUM_HEADS = 4
_DECAY = 0.8


class _Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(size, size)])

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        result: Tensor = x + F.silu(self.layers[0](x))
        return result


class MedusaStudent(nn.Module):
    """The heads. Parameter names are those of the checkpoint."""

    def __init__(self, target: PreTrainedModel, tokens: Tensor, seed: int) -> None:
        """tokens int64 [draft vocabulary]. Heads are initialised to the target's output layer."""
        super().__init__()
        torch.manual_seed(seed)
        size = target.config.hidden_size
        self.tokens = tokens
        self.blocks = nn.ModuleList([_Block(size) for _ in range(NUM_HEADS)])
        heads = [nn.Linear(size, len(tokens), bias=False) for _ in range(NUM_HEADS)]
        self.lm_heads = nn.ModuleList(heads)
        with torch.no_grad():
            for parameter in self.blocks.parameters():
                parameter.zero_()
            for head in heads:
                head.weight.copy_(target.lm_head.weight[tokens])

    def forward(self, states: Tensor) -> list[Tensor]:
        """states [windows, places, hidden] -> logits [windows, places, draft vocabulary] of each
        head."""
        pairs = zip(self.blocks, self.lm_heads, strict=True)
        return [head(block(states)) for block, head in pairs]


@torch.no_grad()
def _read(target: PreTrainedModel, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """inputs int64 [windows, context] -> the target's last states [windows, context, hidden], and
    logits [windows, context, vocab]."""
    found = target(input_ids=inputs, use_cache=False, output_hidden_states=True)
    return found.hidden_states[-1], found.logits


def medusa_loss(target: PreTrainedModel, student: MedusaStudent) -> LossFn:
    """Cross entropy with the target's distribution, restricted to the heads' vocabulary; ignores
    the next ids."""

    def loss(inputs: Tensor, _: Tensor) -> Tensor:
        states, logits = _read(target, inputs)
        wanted = logits.float().softmax(-1)[..., student.tokens]
        found = student(states)
        total = torch.zeros(())
        for head, each in enumerate(found):
            log_probs = each[:, : -1 - head].float().log_softmax(-1)
            total = total - _DECAY**head * (wanted[:, 1 + head :] * log_probs).sum(-1).mean()
        return total / sum(_DECAY**head for head in range(NUM_HEADS))

    return loss


@torch.inference_mode()
def medusa_figures(
    target: PreTrainedModel, student: MedusaStudent, windows: Sequence[Tensor]
) -> dict[str, float]:
    """Metrics over held-out windows [tokens]. top1_agreement_K: share of places where the likeliest
    token of head K (counted from 1) is the target's; top3_agreement_K: where the target's is among
    the head's three likeliest; acceptance: mean of sum(min(p, q)) for the first head at temperature
    1."""
    right: dict[str, float] = {}
    accepted = num_places = 0.0
    for window in windows:
        states, logits = _read(target, window[None])
        best = logits.argmax(-1)
        found = student(states)
        for head, each in enumerate(found):
            likeliest = student.tokens[each[:, : -1 - head].topk(3).indices]
            agreed = likeliest == best[:, 1 + head :, None]
            for num, name in ((1, "top1"), (3, "top3")):
                share = float(agreed[..., :num].any(-1).float().mean())
                key = f"{name}_agreement_{head + 1}"
                right[key] = right.get(key, 0.0) + share / len(windows)
        p, q = logits[:, 1:].softmax(-1)[..., student.tokens], found[0][:, :-1].softmax(-1)
        accepted += float(torch.minimum(p, q).sum())
        num_places += p.shape[1]
    return {"acceptance": accepted / num_places, **right}


def write_medusa(student: MedusaStudent, vocab_size: int, folder: Path) -> None:
    """Write config.json and model.safetensors to `folder`, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().bfloat16().contiguous() for name, p in student.named_parameters()}
    if len(student.tokens) < vocab_size:
        tensors["token_map"] = student.tokens
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    content = {
        "architectures": [ARCHITECTURE],
        "model_type": MODEL_TYPE,
        "hidden_size": tensors["lm_heads.0.weight"].shape[1],
        "vocab_size": vocab_size,
        "truncated_vocab_size": len(student.tokens),
        "num_heads": NUM_HEADS,
        "num_hidden_layers": 1,
        "medusa_fc_bias": True,
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
