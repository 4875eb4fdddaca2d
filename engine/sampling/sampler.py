"""Samples from sample rows and their logits: drawn on the device, copied to the host
asynchronously.

Order, as in transformers: the edits of engine.sampling.edits, temperature, top_k, top_p, min_p,
draw. A row takes part only in the steps that it asks for, so its result does not depend on other
rows. Log probabilities are the model's, before all edits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from baton.types import Sample, TokenLogprobs
from baton_kernels.host_copy import HostCopy, to_device
from baton_kernels.sampling import NOT_FINITE, Draw, checked_argmax, draw_rows, is_broken
from engine.interface import SampleRow
from engine.sampling.beam_search import num_candidates
from engine.sampling.edits import asks_for_edits, edit
from engine.sampling.logprobs import (
    ChosenLogprobs,
    LikeliestLogprobs,
    likeliest,
    token_logprobs,
)

_MASK = (1 << 64) - 1
#: Values of Draws.verdicts in place of a token.
_BROKEN, _NOTHING = NOT_FINITE, -2


class RowsError(ValueError):
    """No token can be drawn for some rows."""

    def __init__(self, reason: str, rows: Sequence[int]) -> None:
        """rows: indices of the rows."""
        super().__init__(reason)
        self.rows = tuple(rows)


class BrokenRowsError(RowsError):
    """The model's logits are not finite."""


class NothingAllowedError(RowsError):
    """No token is allowed: the restrictions of the request exclude all."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Drawn tokens in transfer from the device.

    chosen: [rows] int64 on the device, in [0, vocab); arbitrary for broken rows.
    verdicts: chosen, _BROKEN or _NOTHING. logprobs: for the rows that ask for some.
    """

    chosen: torch.Tensor
    verdicts: HostCopy
    logprobs: tuple[ChosenLogprobs | LikeliestLogprobs, ...]

    def samples(self) -> list[Sample]:
        """Wait and return one sample per row. Raises BrokenRowsError and NothingAllowedError."""
        verdicts = self.verdicts.wait().tolist()
        if min(verdicts, default=0) < 0:
            _raise_of(verdicts)
        if not self.logprobs:
            return [Sample(token) for token in verdicts]
        reported: dict[int, TokenLogprobs] = {}
        for part in self.logprobs:
            reported |= part.reported(verdicts)
        return [_sample(token, reported.get(row)) for row, token in enumerate(verdicts)]


def _raise_of(verdicts: Sequence[int]) -> None:
    """Raise an error for the rows with a negative verdict."""
    if broken := [row for row, verdict in enumerate(verdicts) if verdict == _BROKEN]:
        raise BrokenRowsError("the model's output is not finite", broken)
    dead = [row for row, verdict in enumerate(verdicts) if verdict == _NOTHING]
    raise NothingAllowedError("no token is left to choose", dead)


def draw(logits: torch.Tensor, rows: Sequence[SampleRow]) -> Draws:
    """One token per row of logits [rows, vocab] float32, which are not changed. Does not wait for
    the device.

    All rows score a given token, or none does.
    """
    if rows and rows[0].scored_token_id is not None:
        scored = [0 if row.scored_token_id is None else row.scored_token_id for row in rows]
        chosen = to_device(torch.tensor(scored), logits.device)
        num_top = {i: row.sampling.prompt_logprobs for i, row in enumerate(rows)}
        scores = token_logprobs(logits, chosen, num_top, has_ranks=True)
        return _draws(logits, logits, chosen, scores)
    edited = edit(logits, rows)
    if all(row.sampling.is_greedy for row in rows):
        chosen, verdicts = checked_argmax(edited)
    else:
        chosen, verdicts = draw_rows(edited, [_draw_of(row) for row in rows])
    reported = _reported(logits, edited, rows, chosen)
    if edited is logits:
        return Draws(chosen, HostCopy(verdicts), tuple(reported))
    return _draws(logits, edited, chosen, reported)


def takes_best(row: SampleRow) -> bool:
    """Whether a row's sample is the likeliest token alone, so that other logits are not needed."""
    sampling = row.sampling
    reports = sampling.logprobs >= 0 or sampling.beam is not None
    is_scored = row.scored_token_id is not None
    return sampling.is_greedy and not (reports or is_scored or asks_for_edits(row))


def take_best(chosen: torch.Tensor, verdicts: torch.Tensor) -> Draws:
    """Draws of rows that `takes_best` accepts, from the results of checked_argmax."""
    return Draws(chosen, HostCopy(verdicts), ())


def _draw_of(row: SampleRow) -> Draw:
    sampling = row.sampling
    key = draw_key(sampling.seed, row.num_output_tokens, row.choice)
    temperature = 0.0 if sampling.is_greedy else sampling.temperature
    return Draw(temperature, sampling.top_k, sampling.top_p, sampling.min_p, key)


def _draws(
    logits: torch.Tensor,
    edited: torch.Tensor,
    chosen: torch.Tensor,
    logprobs: Sequence[ChosenLogprobs | LikeliestLogprobs],
) -> Draws:
    verdicts = chosen
    if edited is not logits:
        # A row that chose a forbidden token had no allowed one.
        is_dead = edited.gather(1, chosen[:, None])[:, 0].isneginf()
        verdicts = verdicts.masked_fill(is_dead, _NOTHING)
    verdicts = verdicts.masked_fill(is_broken(logits), _BROKEN)
    return Draws(chosen, HostCopy(verdicts), tuple(logprobs))


def _reported(
    logits: torch.Tensor, edited: torch.Tensor, rows: Sequence[SampleRow], chosen: torch.Tensor
) -> list[ChosenLogprobs | LikeliestLogprobs]:
    """Log probabilities for the rows that ask for them, and candidates for beams."""
    if not any(row.sampling.logprobs >= 0 or row.sampling.beam is not None for row in rows):
        return []
    beams = {
        i: num_candidates(r.sampling) for i, r in enumerate(rows) if r.sampling.beam is not None
    }
    wanted = {
        i: r.sampling.logprob_token_ids or r.sampling.logprobs
        for i, r in enumerate(rows)
        if r.sampling.logprobs >= 0 and i not in beams
    }
    return [*token_logprobs(logits, chosen, wanted), *likeliest(logits, edited, beams)]


def _sample(token_id: int, logprobs: TokenLogprobs | None) -> Sample:
    return Sample(logprobs.token_id if logprobs else token_id, logprobs)


def draw_key(seed: int, num_output_tokens: int, choice: int) -> tuple[int, int]:
    """Two signed 32-bit words for the draw of one position of one choice: the only input of a draw
    besides the logits.

    Numbers are taken modulo 2^64. Distinct triples give unrelated keys: each number is absorbed by
    a bijective mix.
    """
    state = _mix(seed & _MASK)
    state = _mix(state ^ _mix((num_output_tokens + 0x632BE59BD9B4E019) & _MASK))
    state = _mix(state ^ _mix((choice + 0x9E6C63D0876A9A47) & _MASK))
    return _signed(state & 0xFFFFFFFF), _signed(state >> 32)


def _mix(x: int) -> int:
    """A bijection of 64-bit words that spreads every bit over all others."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word
