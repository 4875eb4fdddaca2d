"""A training loop bounded by wall time.

Progress, which sets the learning rate and the window length, is the share of the minutes spent.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

TOKENS_PER_STEP = 4096
MUON_LR = 0.02
ADAM_LR = 3e-3
WARMUP = 0.02
DECAY_FROM = 0.4
CHECKPOINT_EVERY_S = 180.0
LOG_EVERY_STEPS = 20

LossFn = Callable[[Tensor, Tensor], Tensor]
"""(inputs, next ids), both int64 [windows, context] -> scalar loss."""


@dataclass(frozen=True)
class Plan:
    """`contexts` has (share of the time from which it holds, window length), shares rising."""

    minutes: float
    seed: int
    contexts: tuple[tuple[float, int], ...]
    checkpoint: Path


@dataclass
class Progress:
    """What a checkpoint counts; `elapsed_s` is training time over all resumed runs."""

    step: int = 0
    tokens: int = 0
    elapsed_s: float = 0.0


def learning_rate_scale(progress: float) -> float:
    """Linear warm-up, a plateau, then linear to zero; `progress` in [0, 1]."""
    decay = (1 - progress) / (1 - DECAY_FROM)
    return max(0.0, min(1.0, decay, (progress + 1e-3) / WARMUP))


def context_at(progress: float, contexts: tuple[tuple[float, int], ...]) -> int:
    """The window length that holds at `progress`."""
    return [length for share, length in contexts if share <= progress][-1]


def sample_batch(stream: Tensor, context: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Windows at random places of `stream` [tokens]; the same (seed, step) gives the same batch."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    num_windows = TOKENS_PER_STEP // context
    starts = torch.randint(len(stream) - context, (num_windows, 1), generator=generator)
    windows = stream[starts + torch.arange(context + 1)]
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def make_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the tied embedding and the norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and ".layers." in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or ".layers." not in n]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.1, momentum=0.95),
        torch.optim.AdamW(others, lr=ADAM_LR, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    for group in (g for o in optimizers for g in o.param_groups):
        group["peak_lr"] = group["lr"]
    return optimizers


def update(model: nn.Module, optimizers: list[torch.optim.Optimizer], scale: float) -> None:
    """One step of all optimizers at `scale` of their peak rates; leaves no gradients behind."""
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * scale
        optimizer.step()
        optimizer.zero_grad()


def save_checkpoint(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], done: Progress
) -> None:
    """Replaces `path` in one rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    states = [o.state_dict() for o in optimizers]
    torch.save({"model": model.state_dict(), "optimizers": states, "done": vars(done)}, partial)
    partial.replace(path)


def load_checkpoint(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> Progress:
    """Loads weights and optimizer state in place."""
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    return Progress(**saved["done"])


def report(done: Progress, progress: float, context: int, loss: float) -> None:
    """One line to stdout; `loss` is of one batch."""
    rate = done.tokens / done.elapsed_s
    line = f"{progress:6.1%} step {done.step} context {context} loss {loss:.3f}"
    print(f"{line} {rate:.0f} tokens/s", flush=True)


def train(model: nn.Module, loss_fn: LossFn, stream: Tensor, plan: Plan, resume: bool) -> Progress:
    """Trains `model` in place until its minutes are spent."""
    optimizers = make_optimizers(model)
    done = load_checkpoint(plan.checkpoint, model, optimizers) if resume else Progress()
    started, saved_s = time.monotonic() - done.elapsed_s, done.elapsed_s
    while (progress := done.elapsed_s / (plan.minutes * 60)) < 1:
        context = context_at(progress, plan.contexts)
        inputs, expected = sample_batch(stream, context, plan.seed, done.step)
        loss = loss_fn(inputs, expected)
        torch.autograd.backward(loss)
        update(model, optimizers, learning_rate_scale(progress))
        done.step, done.tokens = done.step + 1, done.tokens + inputs.numel()
        done.elapsed_s = time.monotonic() - started
        if done.step % LOG_EVERY_STEPS == 0:
            report(done, progress, context, loss.item())
        if done.elapsed_s - saved_s > CHECKPOINT_EVERY_S:
            save_checkpoint(plan.checkpoint, model, optimizers, done)
            saved_s = done.elapsed_s
    save_checkpoint(plan.checkpoint, model, optimizers, done)
    return done
