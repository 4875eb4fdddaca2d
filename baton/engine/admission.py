"""What a worker checks of a sequence before it touches any state: the last line behind the
gateway's validator."""

from __future__ import annotations

from baton.engine.interface import EngineSpec
from baton.errors import InvalidRequest
from baton.types import SequenceSpec


def refusal(spec: SequenceSpec, engine: EngineSpec) -> InvalidRequest | None:
    """Why this engine can never run the sequence; None if it can."""
    if not spec.prompt_token_ids:
        return InvalidRequest("prompt: no tokens; give at least 1")
    if spec.num_tokens >= engine.max_model_len:
        return InvalidRequest(
            f"prompt: {spec.num_tokens} tokens leave no room for output in this worker's "
            f"{engine.max_model_len}; shorten the prompt"
        )
    largest = max(spec.token_ids)
    if largest >= engine.vocab_size:
        return InvalidRequest(
            f"prompt.token_ids: {largest} is not below the vocabulary's size, {engine.vocab_size}"
        )
    return None
