"""Human-readable timing of a request."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.client import Timing, Usage


def render_timing(timing: Timing, usage: Usage) -> str:
    """One line per tier, one for the handoff, one for the total."""
    decode = timing.decode_worker or "nobody"
    num_decoded = max(0, usage.completion_tokens - 1)
    per_token = f", {timing.decode_ms / num_decoded:.1f} ms a token" if num_decoded else ""
    lines = (
        f"gateway   tokenize {timing.tokenize_ms:.1f} ms, queue {timing.queue_ms:.1f} ms, "
        f"reserve {timing.reserve_ms:.1f} ms",
        *_prefill_lines(timing, usage),
        f"decode    {usage.completion_tokens} tokens, {timing.decode_ms:.1f} ms{per_token}, "
        f"on {decode}",
        f"total     first token after {timing.time_to_first_token_ms:.1f} ms, "
        f"last after {timing.total_ms:.1f} ms",
    )
    resumes = f"\nresumed   {timing.num_resumes} times" if timing.num_resumes else ""
    return "\n".join(lines) + resumes


def _prefill_lines(timing: Timing, usage: Usage) -> tuple[str, ...]:
    """Where the prompt was computed. A decode worker computes a prompt among its other steps:
    without a handoff, and the time shown is the gateway's wait, including the step's other
    sequences."""
    if not timing.prefill_worker:
        return (
            f"prefill   {usage.prompt_tokens} tokens ({usage.decode_cached_tokens} cached), "
            f"computed in a step of the decode worker in {timing.first_token.prefill_ms:.1f} ms, "
            f"on {timing.decode_worker or 'nobody'}",
            "handoff   none: the prompt was computed where it is decoded",
        )
    return (
        f"prefill   {usage.prompt_tokens} tokens ({usage.cached_tokens} cached), "
        f"queue {timing.prefill_queue_ms:.1f} ms, compute {timing.prefill_ms:.1f} ms, "
        f"on {timing.prefill_worker}",
        f"handoff   {timing.transfer_bytes / 1024:.0f} KiB, "
        f"{timing.transfer_exposed_ms:.1f} ms not hidden by compute",
    )
