"""Log probabilities in OpenAI's two forms: of completions, by token text; of chats, with bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from baton.v1 import sampling_pb2
from gateway.intake.token_bytes import text_of

#: Returns the bytes of a token id.
BytesOf = Callable[[int], bytes]

Positions = Sequence[sampling_pb2.PositionLogprobs]


def chat_logprobs(positions: Positions, num_top: int, bytes_of: BytesOf) -> dict[str, Any]:
    """Log probabilities in the form of chats. num_top: maximum alternatives; negative for all that
    were reported, and the chosen one."""
    content = []
    for position in positions:
        top = [*position.top[:num_top]] if num_top >= 0 else [*position.top]
        if num_top < 0 and all(e.token_id != position.chosen.token_id for e in top):
            top.append(position.chosen)
        content.append(
            {
                **_entry(position.chosen, bytes_of),
                "top_logprobs": [_entry(entry, bytes_of) for entry in top],
            }
        )
    return {"content": content, "refusal": None}


def _entry(entry: sampling_pb2.TokenLogprob, bytes_of: BytesOf) -> dict[str, Any]:
    raw = bytes_of(entry.token_id)
    return {"token": text_of(raw), "logprob": _finite(entry.logprob), "bytes": list(raw)}


def completion_logprobs(
    positions: Iterable[sampling_pb2.PositionLogprobs | int], bytes_of: BytesOf, offset: int
) -> tuple[dict[str, Any], int]:
    """Log probabilities in the form of completions, and the text offset after the last position.

    positions: a bare token id, the first of an echoed prompt, has no log probability. offset:
    characters before the first position.
    """
    tokens: list[str] = []
    logprobs: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for position in positions:
        if isinstance(position, int):
            text = text_of(bytes_of(position))
            logprobs.append(None)
            tops.append(None)
        else:
            chosen = position.chosen
            text = text_of(bytes_of(chosen.token_id))
            logprobs.append(_finite(chosen.logprob))
            # If several tokens have the same text, keep the most probable.
            top: dict[str, float] = {}
            for entry in (*position.top, chosen):
                top.setdefault(text_of(bytes_of(entry.token_id)), _finite(entry.logprob))
            tops.append(top)
        tokens.append(text)
        offsets.append(offset)
        offset += len(text)
    document = {
        "tokens": tokens,
        "token_logprobs": logprobs,
        "top_logprobs": tops,
        "text_offset": offsets,
    }
    return document, offset


def prompt_logprobs(positions: Positions, bytes_of: BytesOf) -> list[dict[str, Any] | None]:
    """Log probabilities in vLLM's form: by token id, None for the first token."""
    ranked: list[dict[str, Any] | None] = [None]
    for position in positions:
        entries: dict[str, Any] = {}
        for rank, entry in enumerate(position.top, start=1):
            entries[str(entry.token_id)] = _ranked(entry, rank, bytes_of)
        chosen = position.chosen
        own = _ranked(chosen, position.rank or None, bytes_of)
        entries.setdefault(str(chosen.token_id), own)
        ranked.append(entries)
    return ranked


def _ranked(
    entry: sampling_pb2.TokenLogprob, rank: int | None, bytes_of: BytesOf
) -> dict[str, Any]:
    text = text_of(bytes_of(entry.token_id))
    return {"logprob": _finite(entry.logprob), "rank": rank, "decoded_token": text}


def _finite(logprob: float) -> float:
    """Bound a log probability: JSON has no infinity, and OpenAI uses this minimum."""
    return max(logprob, -9999.0)
