"""A training loop bounded by wall time: the elapsed share of it sets the learning rate."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from baton_kernels.linear import onednn_has_bfloat16

MUON_LR = 0.02
ADAM_LR = 3e-3
WARMUP = 0.02
DECAY_FROM = 0.4

#: Names of layer parameters: of models, Medusa heads, and EAGLE heads.
_OF_LAYER = re.compile(r"\.layers\.|\.h\.|^midlayer\.|^fc\.")

#: (inputs, next ids), both int64 [windows, context] -> scalar loss. Called within mixed_precision;
#: compiled functions must not enter it themselves, which would break their graph.
LossFn = Callable[[Tensor, Tensor], Tensor]


@dataclass
class Progress:
    """Progress of a training; `elapsed_s` is training time over all resumed runs."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


def mixed_precision() -> torch.autocast:
    """bfloat16 products on CPUs that have them, else float32: torch's bfloat16 is dozens of times
    slower there (1.9 s against 0.024 s for [1024, 256] x [256, 2048], Zen 3, torch 2.13)."""
    return torch.autocast("cpu", torch.bfloat16, enabled=onednn_has_bfloat16())


def learning_rate_scale(progress: float) -> float:
    """Linear warm-up, a plateau, then linear to zero; `progress` in [0, 1]."""
    decay = (1 - progress) / (1 - DECAY_FROM)
    return max(0.0, min(1.0, decay, (progress + 1e-3) / WARMUP))


def sample_batch(
    stream: Tensor, context: int, num_windows: int, seed: int, step: int
) -> tuple[Tensor, Tensor]:
    """Windows at random offsets of `stream` [tokens]; the same (seed, step) gives the same
    batch."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(stream) - context, (num_windows, 1), generator=generator)
    windows = stream[starts + torch.arange(context + 1)]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embeddings and the norms."""
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.ndim == 2 and _OF_LAYER.search(n)]
    others = [p for n, p in named if p.ndim != 2 or not _OF_LAYER.search(n)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.1, momentum=0.95),
        torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for group in (g for o in optimizers for g in o.param_groups):
        group["peak_lr"] = group["lr"]
    return optimizers


def update(model: nn.Module, optimizers: list[torch.optim.Optimizer], scale: float) -> None:
    """One step of all optimizers at `scale` times their peak rates; clears gradients."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * scale
        optimizer.step()
        optimizer.zero_grad()


@dataclass(frozen=True, slots=True)
class Schedule:
    """seconds: duration of the training. context, num_windows: shape of each batch. clock: returns
    seconds."""

    seconds: float
    context: int
    num_windows: int
    seed: int
    clock: Callable[[], float]


def train(
    model: nn.Module,
    loss_fn: LossFn,
    stream: Tensor,
    schedule: Schedule,
    on_step: Callable[[Progress, float], None],
) -> Progress:
    """Train `model` in place until the time is over; on_step gets the loss of each step."""
    optimizers, done = make_optimizers(model), Progress()
    begin_s = schedule.clock()
    while done.elapsed_s < schedule.seconds:
        inputs, expected = sample_batch(
            stream, schedule.context, schedule.num_windows, schedule.seed, done.step
        )
        with mixed_precision():
            loss = loss_fn(inputs, expected)
        torch.autograd.backward(loss)
        update(model, optimizers, learning_rate_scale(done.elapsed_s / schedule.seconds))
        done.step, done.tokens = done.step + 1, done.tokens + inputs.numel()
        done.elapsed_s = schedule.clock() - begin_s
        on_step(done, loss.item())
    return done
