"""A training loop bounded by its threads' processor time, so that pauses and other work on the
machine cost no training.

The share of the minutes spent sets the learning rate and the window length.
"""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from distill.training import (
    LossFn,
    Progress,
    learning_rate_scale,
    make_optimizers,
    mixed_precision,
    sample_batch,
    update,
)

TOKENS_PER_STEP = 4096
CHECKPOINT_EVERY_S = 180.0
LOG_EVERY_STEPS = 20


@dataclass(frozen=True)
class Plan:
    """`contexts`: (share of the time from which it applies, window length), shares ascending."""

    minutes: float
    seed: int
    contexts: tuple[tuple[float, int], ...]
    checkpoint: Path


def context_at(progress: float, contexts: tuple[tuple[float, int], ...]) -> int:
    """The window length at `progress`."""
    return [length for share, length in contexts if share <= progress][-1]


def save_checkpoint(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], done: Progress
) -> None:
    """Replace `path` by one rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    states = [o.state_dict() for o in optimizers]
    torch.save({"model": model.state_dict(), "optimizers": states, "done": vars(done)}, partial)
    partial.replace(path)


def load_checkpoint(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]
) -> Progress:
    """Load weights and optimizer state in place."""
    saved = torch.load(path, weights_only=True)
    model.load_state_dict(saved["model"])
    for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
        optimizer.load_state_dict(state)
    return Progress(**saved["done"])


def report(done: Progress, progress: float, context: int, loss: float) -> None:
    """Print one line; `loss` is of one batch."""
    rate = done.tokens / done.elapsed_s
    line = f"{progress:6.1%} step {done.step} context {context} loss {loss:.3f}"
    print(f"{line} {rate:.0f} tokens/s", flush=True)


def processor_time_s() -> float:
    """Processor time of this process, averaged over torch's threads, which all compute or spin."""
    return time.process_time() / torch.get_num_threads()


def train(model: nn.Module, loss_fn: LossFn, stream: Tensor, plan: Plan, resume: bool) -> Progress:
    """Train `model` in place until its minutes are spent."""
    optimizers = make_optimizers(model)
    done = load_checkpoint(plan.checkpoint, model, optimizers) if resume else Progress()
    started, saved_s = processor_time_s() - done.elapsed_s, done.elapsed_s
    while (progress := done.elapsed_s / (plan.minutes * 60)) < 1:
        context = context_at(progress, plan.contexts)
        num_windows = TOKENS_PER_STEP // context
        inputs, expected = sample_batch(stream, context, num_windows, plan.seed, done.step)
        with mixed_precision():
            loss = loss_fn(inputs, expected)
        torch.autograd.backward(loss)
        update(model, optimizers, learning_rate_scale(progress))
        done.step, done.tokens = done.step + 1, done.tokens + inputs.numel()
        done.elapsed_s = processor_time_s() - started
        if done.step % LOG_EVERY_STEPS == 0:
            report(done, progress, context, loss.item())
        if done.elapsed_s - saved_s > CHECKPOINT_EVERY_S:
            save_checkpoint(plan.checkpoint, model, optimizers, done)
            saved_s = done.elapsed_s
    save_checkpoint(plan.checkpoint, model, optimizers, done)
    return done
