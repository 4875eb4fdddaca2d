"""The rules of StructuredOutput, but for what only compiling it shows. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from baton.errors import FieldViolation
from baton.v1 import sampling_pb2
from gateway.intake.model_facts import ModelFacts
from gateway.intake.violations import Violations, text_violations

MAX_CHOICE_TEXTS = 1024
MAX_CHOICE_CHARS = 1024

#: Characters of each kind, of all choices together: what a worker can follow within its time and
#: memory.
MAX_CHARS = {"json_schema": 65_536, "regex": 8_192, "choice": 65_536, "grammar": 65_536}

_PATH = "sampling.structured_output"


def structured_violations(params: sampling_pb2.SamplingParams, facts: ModelFacts) -> Violations:
    """What is wrong with structured_output, and with what is given beside it."""
    if not params.HasField("structured_output"):
        return
    yield from _kind_violations(params.structured_output)
    if params.ignore_eos:
        yield FieldViolation(
            "sampling.ignore_eos", "true: a structured output ends by an end token; leave it unset"
        )
    elif not facts.eos_token_ids and not params.stop_token_ids:
        yield FieldViolation(
            "sampling.stop_token_ids",
            "[]: this model has no end token, by which a structured output could end; give one",
        )
    if params.min_tokens:
        yield FieldViolation(
            "sampling.min_tokens",
            f"{params.min_tokens}: a structured output that is complete can only end; leave it "
            "unset, and ask for a longer one in structured_output",
        )


def _kind_violations(output: sampling_pb2.StructuredOutput) -> Violations:
    kind = output.WhichOneof("kind")
    match kind:
        case None:
            yield FieldViolation(
                _PATH, "unset; give one of json_schema, json_object, regex, choice or grammar"
            )
        case "json_object":
            if not output.json_object:
                yield FieldViolation(f"{_PATH}.{kind}", "false: set it to true, or leave it out")
        case "choice":
            yield from _choice_violations(output.choice.values)
        case _:
            num_chars = len(getattr(output, kind))
            if not 1 <= num_chars <= MAX_CHARS[kind]:
                yield FieldViolation(
                    f"{_PATH}.{kind}",
                    f"{num_chars} characters: must have 1 to {MAX_CHARS[kind]}",
                )


def _choice_violations(texts: Sequence[str]) -> Violations:
    field = f"{_PATH}.choice.values"
    if not texts:
        yield FieldViolation(field, "[]: empty; give at least one text")
    yield from text_violations(field, texts, MAX_CHOICE_TEXTS, MAX_CHOICE_CHARS, "texts")
    num_chars = sum(map(len, texts))
    if num_chars > MAX_CHARS["choice"]:
        yield FieldViolation(
            field, f"{num_chars} characters in all: give at most {MAX_CHARS['choice']}"
        )
