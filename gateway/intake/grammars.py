"""Compiles the structured outputs of requests to grammars for the tiers, in another process, with a
cache."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.errors import BatonError, EngineFault, FieldViolation, InvalidRequest, Overloaded
from baton.types import DEFAULT_MAX_WHITESPACE
from baton.v1 import sampling_pb2
from gateway.intake.child import ChildDied, ChildProcess, ChildSpec

_log = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 5.0

#: Maximum requests with different grammars waiting for the compiler.
MAX_WAITING = 64

#: Number of cached grammars, valid and invalid.
NUM_KEPT = 1024

_TOO_BIG = "takes too much memory to compile, or is nested too deep"


@dataclass(frozen=True, slots=True)
class _Outcome:
    """Result of one compilation: the canonical form, the grammar's fault, or the reason that
    neither is known.

    is_lasting: whether another try would give the same result.
    """

    grammar: bytes = b""
    violation: FieldViolation | None = None
    fault: str = ""
    is_lasting: bool = True


class GrammarCompiler:
    """Owns one compiler process, started with the first grammar, one grammar at a time. Belongs to
    one event loop.

    Requests with the same grammar share one compilation, which continues if they are cancelled.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_whitespace: int = DEFAULT_MAX_WHITESPACE,
        compile_timeout_s: float = COMPILE_TIMEOUT_S,
        max_waiting: int = MAX_WAITING,
        num_kept: int = NUM_KEPT,
    ) -> None:
        """folder: contains the model's tokenizer.json. max_whitespace: see Grammar."""
        self._folder = folder
        self._timeout_s = compile_timeout_s
        self._max_waiting = max_waiting
        self._num_kept = num_kept
        self._known: OrderedDict[bytes, _Outcome] = OrderedDict()
        self._compiling: dict[bytes, asyncio.Task[_Outcome]] = {}
        self.process = ChildProcess(
            ChildSpec(
                "grammar compiler",
                "gateway.intake.grammar_compiler",
                {"folder": str(folder), "max_whitespace": max_whitespace},
                compile_timeout_s,
            )
        )

    async def compile(self, output: sampling_pb2.StructuredOutput) -> bytes:
        """Compile a checked StructuredOutput to its canonical form.

        Raises InvalidRequest, naming the field and its fault, and Overloaded while too many others
        wait.
        """
        question = _question(output)
        key = hashlib.blake2b(json.dumps(question).encode(), digest_size=32).digest()
        outcome = self._known.get(key)
        if outcome is None:
            outcome = await self._wait(key, question)
        else:
            self._known.move_to_end(key)
        if outcome.violation:
            raise InvalidRequest.of(outcome.violation)
        if outcome.fault:
            raise EngineFault(outcome.fault)
        return outcome.grammar

    async def close(self) -> None:
        """End the process and its compilation."""
        for task in self._compiling.values():
            task.cancel()
        await asyncio.gather(*self._compiling.values(), return_exceptions=True)
        await self.process.close()

    async def _wait(self, key: bytes, question: Mapping[str, Any]) -> _Outcome:
        task = self._compiling.get(key)
        if task is None:
            if len(self._compiling) >= self._max_waiting:
                raise Overloaded(
                    f"{len(self._compiling)} grammars wait to be compiled; try again later"
                )
            task = asyncio.create_task(self._compile(question))
            self._compiling[key] = task
            task.add_done_callback(lambda done: self._keep(key, done))
        return await asyncio.shield(task)

    async def _compile(self, question: Mapping[str, Any]) -> _Outcome:
        """Compile. Returns failures as values, because all callers may have been cancelled."""
        field = str(question["field"])
        try:
            answer = await self.process.ask(question)
        except TimeoutError:
            # Not lasting: the machine may be slow.
            description = f"takes more than {self._timeout_s:g} s to compile; simplify it"
            return _Outcome(violation=_violation(field, description), is_lasting=False)
        except BatonError as error:
            if isinstance(error, ChildDied) and error.is_of_its_question:
                return _Outcome(violation=_violation(field, _TOO_BIG))
            return _Outcome(fault=error.message, is_lasting=False)
        if "grammar" in answer:
            return _Outcome(grammar=str(answer["grammar"]).encode())
        if (self._folder / "tokenizer.json").is_file():
            return _Outcome(violation=_violation(field, str(answer["error"])))
        await self.process.close()  # the next one reads the files that are there by then
        fault = f"{self._folder.name}: tokenizer.json is gone; put the model's files back"
        _log.error("no structured output: %s", fault)
        return _Outcome(fault=fault, is_lasting=False)

    def _keep(self, key: bytes, task: asyncio.Task[_Outcome]) -> None:
        del self._compiling[key]
        if task.cancelled():
            return
        outcome = task.result()
        if outcome.is_lasting:
            self._known[key] = outcome
            if len(self._known) > self._num_kept:
                self._known.popitem(last=False)


def _question(output: sampling_pb2.StructuredOutput) -> Mapping[str, Any]:
    """See grammar_compiler."""
    field = str(output.WhichOneof("kind"))
    value = list(output.choice.values) if field == "choice" else getattr(output, field)
    free_text = None
    if output.HasField("free_text"):
        free = output.free_text
        free_text = {
            "begin": free.begin,
            "end": free.end,
            "has_begun": free.has_begun,
            "may_be_all": free.may_be_all,
            "instead": list(free.instead),
            "max_tokens": free.max_tokens if free.HasField("max_tokens") else None,
        }
    return {"field": field, "value": value, "free_text": free_text}


def _violation(field: str, description: str) -> FieldViolation:
    return FieldViolation(f"sampling.structured_output.{field}", description)
