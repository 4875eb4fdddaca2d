"""One distillation run, from options to a folder for `--speculative-model`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn

from baton.config.distill_options import DistillOptions
from baton.errors import ConfigError, ModelError
from distill.eagle import (
    EagleStudent,
    TargetStates,
    draft_vocabulary,
    eagle_figures,
    eagle_loss,
    shape_for,
    write_eagle,
)
from distill.medusa import MedusaStudent, medusa_figures, medusa_loss, write_medusa
from distill.student import (
    distillation_loss,
    draft_figures,
    new_student,
    round_weights,
    student_config,
)
from distill.text import read_documents, token_stream
from distill.training import LossFn, Progress, Schedule, train
from engine.checkpoint import find_shards, resolve_checkpoint

#: Share of the text, at its end, held out for evaluation, and the maximum number of held-out
#: windows.
_HELD_OUT = 0.02
_MAX_HELD_OUT_WINDOWS = 32

#: Possible files of a tokenizer.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def distill(
    options: DistillOptions,
    clock: Callable[[], float],
    on_step: Callable[[Progress, float], None],
) -> dict[str, float]:
    """Train and write the draft model; return its metrics on held-out text. Raises ConfigError and
    ModelError."""
    if options.num_threads is not None:
        torch.set_num_threads(options.num_threads)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    folder = resolve_checkpoint(options.target)
    find_shards(folder)
    documents = read_documents(options.data)
    if not (folder / "tokenizer.json").is_file():
        raise ModelError(f"{options.target}: it has no tokenizer.json, which the draft must share")
    target = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ends = _end_ids(target.config.eos_token_id)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stream = token_stream(tokenizer, documents, ends[0] if ends else None)
    trained, held_out = _split(stream, options)
    match options.method:
        case "eagle":
            method = _eagle(options, target, trained)
        case "medusa":
            method = _medusa(options, target, trained)
        case "draft":
            method = _draft(options, target, ends)
    done = train(method.student, method.loss, trained, _schedule(options, clock), on_step)
    round_weights(method.student)
    figures = method.figures(held_out)
    method.write(options.output)
    _write_beside(options, folder, {**asdict(done), **figures})
    return figures


@dataclass(frozen=True, slots=True)
class _Method:
    """A draft model and its training. figures: metrics on held-out windows [tokens]. write: writes
    the checkpoint to a folder."""

    student: nn.Module
    loss: LossFn
    figures: Callable[[list[Tensor]], dict[str, float]]
    write: Callable[[Path], object]


def _draft(
    options: DistillOptions, target: transformers.PreTrainedModel, ends: list[int]
) -> _Method:
    given = target.config
    student = new_student(
        student_config(
            given.vocab_size,
            given.max_position_embeddings,
            options.hidden_size or _half(given.hidden_size),
            options.num_layers,
            ends,
        ),
        options.seed,
    )
    return _Method(
        student,
        distillation_loss(target, student),
        partial(draft_figures, target, student),
        lambda folder: student.bfloat16().save_pretrained(folder),
    )


def _eagle(
    options: DistillOptions, target: transformers.PreTrainedModel, trained: Tensor
) -> _Method:
    given = target.config
    if given.model_type != "llama":
        raise ConfigError.of(
            "target", options.target, f"an EAGLE head is trained for llama, not {given.model_type}"
        )
    states = TargetStates(target)
    shape = shape_for(target)
    tokens = draft_vocabulary(trained, given.vocab_size)
    student = EagleStudent(shape, len(states.layers), tokens, options.seed)
    student.begin_as(target)
    return _Method(
        student,
        eagle_loss(target, states, student, options.seed),
        partial(eagle_figures, target, states, student),
        partial(write_eagle, student, shape, states.layers),
    )


def _medusa(
    options: DistillOptions, target: transformers.PreTrainedModel, trained: Tensor
) -> _Method:
    vocab_size = target.config.vocab_size
    student = MedusaStudent(target, draft_vocabulary(trained, vocab_size), options.seed)
    return _Method(
        student,
        medusa_loss(target, student),
        partial(medusa_figures, target, student),
        partial(write_medusa, student, vocab_size),
    )


def _schedule(options: DistillOptions, clock: Callable[[], float]) -> Schedule:
    num_windows = max(1, options.tokens_per_step // options.context)
    return Schedule(options.minutes * 60, options.context, num_windows, options.seed, clock)


def _split(stream: Tensor, options: DistillOptions) -> tuple[Tensor, list[Tensor]]:
    """Training stream and held-out windows."""
    num_held_out = max(options.context, int(_HELD_OUT * len(stream)))
    trained, rest = stream[:-num_held_out], stream[-num_held_out:]
    if len(trained) <= options.context:
        raise ConfigError.of(
            "data",
            options.data,
            f"it has {len(stream)} tokens; give at least {2 * options.context + 1}, or a smaller "
            "--context",
        )
    return trained, list(torch.split(rest, options.context))[:_MAX_HELD_OUT_WINDOWS]


def _end_ids(given: int | list[int] | None) -> list[int]:
    if given is None:
        return []
    return [given] if isinstance(given, int) else list(given)


def _half(hidden_size: int) -> int:
    """Half of a width, rounded to whole heads."""
    return max(64, hidden_size // 64 * 32)


def _write_beside(options: DistillOptions, target: Path, record: dict[str, float]) -> None:
    """Write the tokenizer and a record of the training to the output folder."""
    output = options.output
    for name in _TOKENIZER_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, output / name)
    facts = {
        "target": options.target,
        "options": options.model_dump(mode="json"),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        **record,
    }
    (output / "distill.json").write_text(json.dumps(facts, indent=2) + "\n")
