"""What the SDK returns: immutable values, with nothing of protobuf in them."""

from __future__ import annotations

from dataclasses import dataclass

from baton.types import UNKNOWN_NUMERICS, FinishReason, NumericsClass, TokenLogprobs


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation. role: "system", "user", "assistant" or what else the model's
    template knows."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request; completion_tokens is over all choices."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV the prefill worker had cached."""
    decode_cached_tokens: int = 0
    """Prompt tokens whose KV the decode worker already held, so that they were not sent."""
    draft_tokens: int = 0
    """Tokens that speculation proposed, over all choices."""
    accepted_tokens: int = 0
    """How many of them the model confirmed."""


@dataclass(frozen=True, slots=True)
class TimeToFirstToken:
    """What the time to the first token was spent on; see baton.v1.TimeToFirstToken. The parts add
    up to it."""

    tokenize_ms: float = 0.0
    queue_ms: float = 0.0
    reserve_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_exposed_ms: float = 0.0
    first_step_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Where the time of a request went; see baton.v1.RequestTiming."""

    tokenize_ms: float = 0.0
    queue_ms: float = 0.0
    reserve_ms: float = 0.0
    prefill_queue_ms: float = 0.0
    prefill_ms: float = 0.0
    transfer_exposed_ms: float = 0.0
    time_to_first_token_ms: float = 0.0
    decode_ms: float = 0.0
    total_ms: float = 0.0
    transfer_bytes: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    num_resumes: int = 0
    first_token: TimeToFirstToken = TimeToFirstToken()


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of a stream. Pieces of one choice follow each other without gap or overlap."""

    token_index: int
    """Index in the choice's output of the first of token_ids."""
    token_ids: tuple[int, ...] = ()
    text: str = ""
    """The text that these tokens complete."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token, if asked for."""
    finish_reason: FinishReason | None = None
    """Set in a choice's last piece."""
    stop: str | int | None = None
    """The stop string or stop token id that ended the choice; None if the end-of-sequence token or
    a limit did."""
    usage: Usage | None = None
    """Set in the stream's last piece."""
    timing: Timing | None = None
    """Set in the stream's last piece."""
    choice: int = 0
    request_id: str = ""
    score: float | None = None
    """Set in a choice's last piece: a beam's score, or with best_of the mean log probability that
    chose it."""
    prompt_token_ids: tuple[int, ...] = ()
    """With echo, in each choice's first piece, whose text begins with the prompt's."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """If asked for, in the first piece of choice 0: one entry per token of the prompt but the
    first."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole output; fields as in Chunk."""

    index: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: FinishReason
    stop: str | int | None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. The shortcuts are of its first choice, the only one unless n > 1."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage
    timing: Timing
    prompt_token_ids: tuple[int, ...] = ()
    """With echo."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """If asked for, one entry per token of the prompt but the first."""

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids

    @property
    def finish_reason(self) -> FinishReason:
        return self.choices[0].finish_reason


@dataclass(frozen=True, slots=True)
class Tokenization:
    """A prompt's token ids, and how many tokens, prompt and output together, the model takes."""

    token_ids: tuple[int, ...]
    max_model_len: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker as the gateway sees it; see baton.v1.WorkerStatus."""

    worker_id: str
    address: str
    tier: str
    state: str
    reason: str
    num_running: int
    num_waiting: int
    num_free_blocks: int
    num_cached_blocks: int
    num_leased_blocks: int
    num_blocks: int
    block_size: int
    num_in_flight: int
    local_prefill_threshold: int = 0
    numerics: NumericsClass = UNKNOWN_NUMERICS


@dataclass(frozen=True, slots=True)
class Model:
    """A model served, and the workers that serve it."""

    name: str
    max_model_len: int
    vocab_size: int
    has_chat_template: bool
    workers: tuple[WorkerStatus, ...]
