"""Training of an EAGLE-3 head: one layer over the target's hidden states (EAGLE-3, arXiv
2503.01840), with a checkpoint in the format of vLLM and SGLang.

At position t the head gets token t + 1 and the target's states at t, and predicts token t + 2.
Later drafts continue from its own outputs, and training does the same ("training-time test" in the
paper): at unrolled step s, the query at position t sees keys from the target's states up to t - s,
and keys from earlier steps for the positions between.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from distill.training import LossFn

#: Unrolled steps in training, and the weight of each relative to the one before.
NUM_UNROLLED = 3
_DECAY = 0.9

#: Context lengths in tokens, one per batch. In a worker the head sees the output alone, which may
#: be short.
CONTEXTS = (2, 8, 32, 128, 4096)

#: Share of the text's tokens that the head's vocabulary covers, and the multiple that its size is
#: rounded up to.
_COVERAGE, _VOCAB_STEP = 0.92, 256

_UNREACHABLE = -1e9


@dataclass(frozen=True, slots=True)
class HeadShape:
    """Shape of the head's single layer. hidden_size and vocab_size equal the target's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    max_tokens: int
    rope_theta: float = 10000.0

    def config(self) -> dict[str, Any]:
        """Contents of config.json."""
        return {
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "max_position_embeddings": self.max_tokens,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": False,
        }


def shape_for(target: PreTrainedModel) -> HeadShape:
    """Shape of a head with an MLP as wide as its hidden states."""
    given = target.config
    return HeadShape(
        given.vocab_size,
        given.hidden_size,
        given.hidden_size,
        given.num_attention_heads,
        given.num_key_value_heads,
        given.head_dim,
        given.rms_norm_eps,
        given.max_position_embeddings,
    )


def aux_layers(num_layers: int) -> tuple[int, ...]:
    """Indices of the layer inputs that the head gets: an early one, a late one, and the output of
    the last layer."""
    return tuple(sorted({min(2, num_layers), max(1, num_layers - 2), num_layers}))


def draft_vocabulary(stream: Tensor, vocab_size: int) -> Tensor:
    """The most frequent tokens of a text [tokens], ascending: int64 [draft vocabulary]."""
    counts = torch.bincount(stream, minlength=vocab_size)
    frequent = counts.argsort(descending=True, stable=True)
    covered = counts[frequent].cumsum(0) >= _COVERAGE * len(stream)
    num_needed = int(covered.nonzero()[0]) + 1
    num_kept = min(vocab_size, -(-num_needed // _VOCAB_STEP) * _VOCAB_STEP)
    return frequent[:num_kept].sort().values


class TargetStates:
    """Training inputs: a target's hidden states and logits."""

    def __init__(self, target: PreTrainedModel) -> None:
        self._target = target
        self._last = torch.empty(0)
        self.layers = aux_layers(target.config.num_hidden_layers)
        target.model.norm.register_forward_pre_hook(self._keep)

    def _keep(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self._last = inputs[0]

    @torch.no_grad()
    def read(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """inputs int64 [windows, context] -> states [windows, context, layers * hidden] and logits
        [windows, context, vocab]."""
        found = self._target(input_ids=inputs, use_cache=False, output_hidden_states=True)
        last = self._target.config.num_hidden_layers
        states = [self._last if i == last else found.hidden_states[i] for i in self.layers]
        return torch.cat(states, -1), found.logits


class _Norm(nn.RMSNorm):
    """RMSNorm in float32, also under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden] float32."""
        return super().forward(x.float())


class _Attention(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        size, dim = shape.hidden_size, shape.head_dim
        heads, kv_heads = shape.num_heads, shape.num_kv_heads
        self.q_proj = nn.Linear(2 * size, heads * dim, bias=False)
        self.k_proj = nn.Linear(2 * size, kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(2 * size, kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(heads * dim, size, bias=False)


class _Mlp(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        size, inner = shape.hidden_size, shape.intermediate_size
        self.gate_proj = nn.Linear(size, inner, bias=False)
        self.up_proj = nn.Linear(size, inner, bias=False)
        self.down_proj = nn.Linear(inner, size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]."""
        result: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return result


class _Layer(nn.Module):
    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        size, eps = shape.hidden_size, shape.eps
        self.self_attn, self.mlp = _Attention(shape), _Mlp(shape)
        self.input_layernorm = _Norm(size, eps)
        self.hidden_norm = _Norm(size, eps)
        self.post_attention_layernorm = _Norm(size, eps)


class EagleStudent(nn.Module):
    """The head. Parameter names are those of the checkpoint."""

    def __init__(self, shape: HeadShape, num_states: int, tokens: Tensor, seed: int) -> None:
        """num_states: number of target states per position; tokens: the head's vocabulary."""
        super().__init__()
        torch.manual_seed(seed)
        self._shape = shape
        self.midlayer = _Layer(shape)
        self.fc = nn.Linear(num_states * shape.hidden_size, shape.hidden_size, bias=False)
        self.norm = _Norm(shape.hidden_size, shape.eps)
        self.lm_head = nn.Linear(shape.hidden_size, len(tokens), bias=False)
        self.tokens = tokens

    @torch.no_grad()
    def begin_as(self, target: PreTrainedModel) -> None:
        """Initialise the head to pass on the target's last state, with the target's output
        layer."""
        size = self._shape.hidden_size
        self.fc.weight.zero_()
        self.fc.weight[:, -size:] = torch.eye(size)
        self.norm.weight.copy_(target.model.norm.weight)
        self.lm_head.weight.copy_(target.lm_head.weight[self.tokens])
        self.midlayer.self_attn.o_proj.weight.mul_(0.1)
        self.midlayer.mlp.down_proj.weight.mul_(0.1)

    def unroll(
        self, embedded: Tensor, states: Tensor, context: int, num_steps: int
    ) -> list[Tensor]:
        """Logits [windows, places, draft vocabulary] of each step; each step has one place less
        than the one before.

        embedded [windows, places, hidden]: token t + 1 at place t. states [windows, places, states
        * hidden]: of the target. context: places back that the head sees.
        """
        shape, layer, attention = self._shape, self.midlayer, self.midlayer.self_attn
        places = embedded.shape[1]
        heads, kv_heads, dim = (
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
        )
        cos, sin = _rotation(places, dim, shape.rope_theta)
        place = torch.arange(places)
        distance = place[:, None] - place[None, :]
        hidden = self.fc(states)
        logits: list[Tensor] = []
        made: list[tuple[Tensor, Tensor]] = []
        for step in range(num_steps):
            # In all tensors here, row t belongs to the sequence with target states up to place t -
            # s.
            x = torch.cat((layer.input_layernorm(embedded), layer.hidden_norm(hidden)), -1)
            query = _heads(attention.q_proj(x), heads, cos, sin)
            key = _heads(attention.k_proj(x), kv_heads, cos, sin)
            value = attention.v_proj(x).view(*x.shape[:-1], kv_heads, dim).transpose(1, 2)
            made.append(
                (
                    key.repeat_interleave(heads // kv_heads, 1),
                    value.repeat_interleave(heads // kv_heads, 1),
                )
            )
            seen = (distance >= step) & (distance < step + context)
            scores = [
                (query @ made[0][0].transpose(-1, -2)).float() * dim**-0.5
                + torch.where(seen, 0.0, _UNREACHABLE)
            ]
            own = [(_back(k, step - j), _back(v, step - j)) for j, (k, v) in enumerate(made) if j]
            scores += [((query * k).sum(-1, keepdim=True)).float() * dim**-0.5 for k, _ in own]
            weights = torch.cat(scores, -1).softmax(-1).to(query.dtype)
            mixed = weights[..., :places] @ made[0][1]
            for i, (_, v) in enumerate(own):
                mixed = mixed + weights[..., places + i, None] * v
            hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
            logits.append(self.lm_head(self.norm(hidden))[:, step:])
            hidden = _back(hidden, 1)
        return logits


def _back(x: Tensor, num: int) -> Tensor:
    """Shift x [..., places, width] by num rows: row t becomes row t - num; the first rows are
    invalid."""
    return x.roll(num, -2) if num else x


def _rotation(places: int, dim: int, theta: float) -> tuple[Tensor, Tensor]:
    inverse = theta ** (-torch.arange(0, dim, 2).float() / dim)
    angles = torch.arange(places).float()[:, None] * inverse
    return torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()


def _heads(x: Tensor, heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """x [windows, places, heads * dim] -> rotated [windows, heads, places, dim]."""
    x = x.view(*x.shape[:-1], heads, -1).transpose(1, 2)
    first, second = x.chunk(2, -1)
    turned = torch.cat((-second, first), -1)
    return x * cos.to(x.dtype) + turned * sin.to(x.dtype)


def eagle_loss(
    target: PreTrainedModel, states: TargetStates, student: EagleStudent, seed: int
) -> LossFn:
    """Cross entropy with the target's distribution, restricted to the head's vocabulary, over the
    unrolled steps; ignores the next ids."""
    generator = torch.Generator().manual_seed(seed)

    def loss(inputs: Tensor, _: Tensor) -> Tensor:
        context = CONTEXTS[int(torch.randint(len(CONTEXTS), (), generator=generator))]
        read, logits = states.read(inputs)
        with torch.no_grad():
            wanted = logits.float().softmax(-1)[..., student.tokens]
            embedded = target.get_input_embeddings()(inputs)
        # Place t has token t + 1 and the states at t; its label is the target's logits at t + 1.
        found = student.unroll(embedded[:, 1:], read[:, :-1], context, NUM_UNROLLED)
        total = torch.zeros(())
        for step, each in enumerate(found):
            log_probs = each.float().log_softmax(-1)
            cross = -(wanted[:, 1 + step :] * log_probs).sum(-1).mean()
            total = total + _DECAY**step * cross
        return total / sum(_DECAY**step for step in range(NUM_UNROLLED))

    return loss


@torch.inference_mode()
def eagle_figures(
    target: PreTrainedModel, states: TargetStates, student: EagleStudent, windows: Sequence[Tensor]
) -> dict[str, float]:
    """Metrics over held-out windows [tokens]. top1_agreement_1, _2, ...: share of places where the
    head's first, second, ... draft is the target's likeliest token; the target reads the text, so
    later drafts are compared at all places. acceptance: mean of sum(min(p, q)) for the first draft
    at temperature 1. Suffix _8: the head sees 8 places back."""
    right: dict[str, float] = {}
    accepted = num_places = 0.0
    for window in windows:
        inputs = window[None]
        read, logits = states.read(inputs)
        embedded = target.get_input_embeddings()(inputs)
        best = logits.argmax(-1)
        for context, suffix in ((4096, ""), (8, "_8")):
            found = student.unroll(embedded[:, 1:], read[:, :-1], context, NUM_UNROLLED)
            for step, each in enumerate(found):
                name = f"top1_agreement_{step + 1}{suffix}"
                agreed = (student.tokens[each.argmax(-1)] == best[:, 1 + step :]).float().mean()
                right[name] = right.get(name, 0.0) + float(agreed) / len(windows)
            if not suffix:
                p, q = logits[:, 1:].softmax(-1)[..., student.tokens], found[0].softmax(-1)
                accepted += float(torch.minimum(p, q).sum())
                num_places += p.shape[1]
    return {"acceptance": accepted / num_places, **right}


def write_eagle(
    student: EagleStudent, shape: HeadShape, layers: Sequence[int], folder: Path
) -> None:
    """Write config.json and model.safetensors to `folder`, in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: p.detach().bfloat16().contiguous() for name, p in student.named_parameters()}
    is_drafted = torch.zeros(shape.vocab_size, dtype=torch.bool)
    is_drafted[student.tokens] = True
    tensors["d2t"] = student.tokens - torch.arange(len(student.tokens))
    tensors["t2d"] = is_drafted
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    content = {
        **shape.config(),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": len(student.tokens),
        "dtype": "bfloat16",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers)},
    }
    (folder / "config.json").write_text(json.dumps(content, indent=2) + "\n")
