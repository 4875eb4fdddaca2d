"""Values that cross the borders between Baton's processes and layers. All are immutable; none needs
torch or gRPC."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import NamedTuple

PROTOCOL_VERSION = 1

#: Bytes of one element, by the names that KvLayout.dtype may take.
DTYPE_BYTES: Mapping[str, int] = MappingProxyType(
    {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "fp8": 1, "int64": 8}
)
#: Elements of these are multiples of a float32 scale. fp8 is e4m3 without infinities.
SCALED_DTYPES = frozenset({"int8", "fp8"})
SCALE_BYTES = 4
#: KV of one of these can be handed to a worker that keeps another.
CONVERTIBLE_DTYPES = frozenset({"float32", "bfloat16", "float16"}) | SCALED_DTYPES

#: NumericsClass.level of a CPU without native kernels.
NO_LEVEL = "none"
#: Notice for such a CPU at the start, by `baton doctor` and by `baton status`.
FALLBACK_NOTICE = (
    "no native CPU kernels, torch's operations run instead: several times slower, "
    "and tokens may depend on the batch"
)

#: Maximum white-space characters between two parts of a JSON document with a schema: the default of
#: a gateway, and the limit of its option.
DEFAULT_MAX_WHITESPACE, MAX_WHITESPACE = 16, 1024

#: Default of the prefixes that a gateway remembers.
DEFAULT_MAX_PREFIXES = 131_072


@dataclass(frozen=True, slots=True)
class Slo:
    """Latency targets in seconds; None: no target.

    ttft_s: from arrival to the first token. tpot_s: mean gap between the tokens of one output.
    """

    ttft_s: float | None = None
    tpot_s: float | None = None


NO_SLO = Slo()


#: Sort key of service order, total over the sequences of a gateway: see SequenceSpec.rank.
Rank = tuple[int, int, str, int]


def across_accounts(rank: Rank) -> Rank:
    """Sort key among sequences of several accounts. Clients choose the priority: a positive one
    yields to other accounts; a negative one orders an account's own sequences and counts as 0
    here."""
    return (max(0, rank[0]), *rank[1:])


_NO_BIAS: Mapping[int, float] = MappingProxyType({})

#: KvLayout.parts of most models; and of multi-head latent attention, which has a token's latent and
#: rotated key in one row.
KEY_VALUE, LATENT = ("key", "value"), ("latent",)


class FinishReason(enum.IntEnum):
    """Why an output ended; numbered as in baton.v1.FinishReason, 0 for an output that goes on."""

    NONE = 0
    STOP = 1
    LENGTH = 2


class Tier(enum.IntEnum):
    """Which half of the work a worker does; numbered as in baton.v1.Tier."""

    PREFILL = 1
    DECODE = 2


@dataclass(frozen=True, slots=True)
class Role:
    """What a worker does, for as long as nothing else is ordered.

    is_colocated: whether a decode worker computes all of its prompts; no KV is sent to it.
    num_threads: CPU threads that it computes with; 0: those that it was started with.
    """

    tier: Tier
    is_colocated: bool = False
    num_threads: int = 0


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Times of a worker's steps as it has measured them, in seconds; 0: not yet.

    A step takes `step_s` and `sequence_s` for each sequence that decodes; a prompt adds `prompt_s`
    for each step that it takes part in, and `token_s` for each of its tokens.
    """

    step_s: float = 0.0
    sequence_s: float = 0.0
    prompt_s: float = 0.0
    token_s: float = 0.0


class EarlyStopping(enum.IntEnum):
    """When a beam search with as many finished outputs as it is wide may end; numbered as in
    baton.v1.EarlyStopping."""

    HEURISTIC = 0
    ALWAYS = 1
    NEVER = 2


@dataclass(frozen=True, slots=True)
class BeamParams:
    """A beam search. num_returned: outputs sent, best first; at most `width`."""

    width: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC
    num_returned: int = 1


@dataclass(frozen=True, slots=True)
class Sampling:
    """How a sequence's tokens are chosen: baton.v1.TokenSampling, resolved and validated by the
    gateway."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    min_tokens: int = 0
    max_tokens: int = 16
    stop_token_ids: frozenset[int] = frozenset()
    seed: int = 0
    logprobs: int = -1
    """Alternatives reported per position; -1 reports no log probabilities."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """The last token of each must not follow the others of it."""
    prompt_logprobs: int = -1
    """Alternatives reported per position of the prompt; -1 reports none."""
    grammar: bytes = b""
    """What the output must look like, in the form that engine.grammar reads; empty for anything."""
    beam: BeamParams | None = None
    allowed_token_ids: tuple[int, ...] = ()
    """All that the output may consist of; empty for any."""
    logprob_token_ids: tuple[int, ...] = ()
    """Reported per position instead of the likeliest alternatives."""

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, of equals the one with the lowest id."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


class KvSource(enum.IntEnum):
    """Where a worker gets the KV that a sequence lacks; numbered as in baton.v1.KvSource.

    PREFILL: by a ticket, from a worker that computes the prompt, unless so little is missing that
    it is computed at once. LOCAL: computed here, however much it is. HANDOFF: by a ticket, from a
    worker on which the sequence ran and which holds the KV of all tokens but the last.
    """

    PREFILL = 1
    LOCAL = 2
    HANDOFF = 3


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities at one position: of the chosen token, and of the best ones, or
    those asked for, best first. rank: of a prompt's token, the number of tokens at least as
    probable; 0 if not known."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


class Sample(NamedTuple):
    """One chosen token. Made for each token at each border, so it is of the immutable kind that
    costs least."""

    token_id: int
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """Everything about a sequence but its KV: enough to go on with it on any worker."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    output_token_ids: tuple[int, ...] = ()
    choice: int = 0
    tenant: bytes = b""
    priority: int = 0
    arrival_ns: int = 0
    traceparent: str = ""
    """W3C trace context of the request's span at the gateway; empty if there is none. Changes
    nothing but telemetry."""
    tracestate: str = ""
    """W3C tracestate beside it; empty if there is none."""
    num_choices: int = 1
    """Choices that share the prompt and part at the first token: choice, choice + 1, ...; 1 once
    there is output."""
    adapter: str = ""
    """Name of the LoRA adapter that computes it; empty for the model alone."""
    slo: Slo | None = None
    """Targets of its class, one at least; None: the deployment's."""

    @property
    def prefix_key(self) -> bytes:
        """Key of cached prefixes: sequences share KV only if theirs are equal. Digest of tenant and
        adapter, 16 bytes; empty for the shared tenant without an adapter."""
        if not self.adapter:
            return self.tenant
        name = self.adapter.encode()
        return hashlib.blake2b(name, digest_size=16, key=self.tenant, person=b"adapter").digest()

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def width(self) -> int:
        """Places in a batch that it takes, or its choices or beams will take."""
        return self.sampling.beam.width if self.sampling.beam else self.num_choices

    @property
    def is_single(self) -> bool:
        """Whether it stays one sequence: no choices part from it, and no beams, be it one."""
        return self.num_choices == 1 and self.sampling.beam is None

    @property
    def rank(self) -> Rank:
        """Sort key of service order: priority, then arrival, then tie-breakers that make it
        total."""
        return (self.priority, self.arrival_ns, self.request_id, self.choice)

    def choice_alone(self, offset: int, token_ids: tuple[int, ...] = ()) -> SequenceSpec:
        """The `offset`-th of the sequence's choices, as a sequence of its own, after `token_ids`
        were produced."""
        if self.num_choices == 1 and not offset and not token_ids:
            return self
        output = self.output_token_ids + token_ids
        choice = self.choice + offset
        return replace(self, choice=choice, num_choices=1, output_token_ids=output)


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape, numerics and identity of a worker's KV pool.

    A pool is one tensor [blocks, num_layers, parts, num_kv_heads, block_size, head_dim] of `dtype`:
    a token has a row of head_dim elements for each part and KV head of a layer. `parts` names them,
    in order. If `dtype` is one of SCALED_DTYPES, each row has a scale, and a block's scales
    [block_size] of a layer, part and head lie behind its rows: a block is still one piece of
    memory, and so are its layers and its heads within a layer. `fingerprint` digests the weights
    and every setting that changes what KV means; block size is not among them.

    windowed_layers, ascending, attend to the last `window` tokens, including the new one; older KV
    is neither read nor sent. window is the longest of these layers; 0 without any.

    Layers with a state are counted apart, in the model's order: a sequence has one state of
    state_layer_bytes for each, after the last token computed. States are float32 and never
    converted.
    """

    fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_size: int
    parts: tuple[str, ...] = KEY_VALUE
    window: int = 0
    windowed_layers: tuple[int, ...] = ()
    num_state_layers: int = 0
    state_layer_bytes: int = 0

    @property
    def num_parts(self) -> int:
        return len(self.parts)

    @property
    def token_bytes(self) -> int:
        """Bytes of KV of one token over all layers."""
        return self.num_layers * self.token_layer_bytes

    @property
    def token_layer_bytes(self) -> int:
        """Bytes of KV of one token in one layer."""
        scale_bytes = SCALE_BYTES if self.dtype in SCALED_DTYPES else 0
        row_bytes = self.head_dim * DTYPE_BYTES[self.dtype] + scale_bytes
        return self.num_parts * self.num_kv_heads * row_bytes

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def difference(self, other: KvLayout) -> tuple[str, str, str] | None:
        """(field, own value, other's value) of the first field that forbids sending KV between the
        two."""
        if self == other:
            return None
        for name in (
            *("fingerprint", "num_layers", "parts", "num_kv_heads", "head_dim"),
            *("window", "windowed_layers", "num_state_layers", "state_layer_bytes"),
        ):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return name, str(ours), str(theirs)
        if self.dtype != other.dtype and not {self.dtype, other.dtype} <= CONVERTIBLE_DTYPES:
            return "dtype", self.dtype, other.dtype
        return None


@dataclass(frozen=True, slots=True)
class NumericsClass:
    """What decides how results are rounded. Workers of one class give the same tokens; those of two
    may choose differently where two tokens are nearly as likely.

    Neither the number of threads or ranks nor the type of KV is part of it: see
    docs/adr/0004-numerics-and-equality.md.
    """

    device: str = ""
    """Kind of device: "cpu", "cuda", or "oracle" for the engine without a model. Empty: not
    known."""
    level: str = ""
    """Level of a CPU's native kernels, NO_LEVEL if torch's operations run instead; or a GPU's
    compute capability."""
    dtype: str = ""
    """Type of weights and activations."""
    kernels: str = ""
    """Version of the kernels, and of the torch beside them."""

    def __str__(self) -> str:
        """For people: "cpu avx512 bfloat16 1+torch2.13.0.avx512"."""
        return " ".join(filter(None, (self.device, self.level, self.dtype, self.kernels)))

    @property
    def is_fallback(self) -> bool:
        """Whether a CPU has no native kernels: results may depend on the batch, and steps take
        several times as long."""
        return self.level == NO_LEVEL

    def difference(self, other: NumericsClass) -> tuple[str, str, str] | None:
        """(field, own value, other's value) of the first field in which the two differ."""
        for name in ("device", "level", "dtype", "kernels"):
            ours, theirs = getattr(self, name), getattr(other, name)
            if ours != theirs:
                return f"numerics.{name}", ours or "unknown", theirs or "unknown"
        return None


UNKNOWN_NUMERICS = NumericsClass()


@dataclass(frozen=True, slots=True)
class NumericsRule:
    """How a worker rounds, and whether it works with such as round differently."""

    numerics: NumericsClass = UNKNOWN_NUMERICS
    is_strict: bool = False

    def refuses(self, peer: NumericsClass) -> tuple[str, str, str] | None:
        """(field, own value, the peer's) of what keeps the two from exchanging KV."""
        return self.numerics.difference(peer) if self.is_strict else None


ANY_NUMERICS = NumericsRule()


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """Identity of a worker. `generation` is drawn at each start and distinguishes boots."""

    worker_id: str
    generation: int


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Where a pool's blocks are, or its window slots. free + cached + leased == total at every
    moment."""

    free: int
    cached: int
    leased: int

    @property
    def total(self) -> int:
        return self.free + self.cached + self.leased

    @property
    def available(self) -> int:
        """Blocks that can be had now: cached ones are given up when they are needed."""
        return self.free + self.cached


@dataclass(frozen=True, slots=True)
class TierLoad:
    """A tier of KV below a worker's device. Counts are since the start, in blocks."""

    name: str
    """host, disk or store."""
    off_reason: str = ""
    """Why the tier is switched off; empty if it is on."""
    pays: bool = False
    """Whether reading from it is faster, as measured, than computing the same tokens. If not, it is
    neither read nor written."""
    num_bytes: int = 0
    """Bytes held now; 0 for a store that workers share."""
    num_hits: int = 0
    """Blocks that prompts lacked and the tier had."""
    num_misses: int = 0
    """Blocks that prompts lacked and the tier did not have."""
    num_evictions: int = 0
    saved_ms: float = 0.0
    """Estimated time of computing the blocks that were read, less the time of reading them, where
    that was a gain."""
    lost_ms: float = 0.0
    """The same where it was a loss."""

    @property
    def is_used(self) -> bool:
        return self.pays and not self.off_reason


@dataclass(frozen=True, slots=True)
class WorkerLoad:
    """A worker's load at one moment, as its engine loop saw it."""

    num_steps: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_pending_tokens: int = 0
    """Prompt tokens not yet computed, of running and waiting sequences."""
    blocks: BlockCounts = BlockCounts(0, 0, 0)
    window_slots: BlockCounts = BlockCounts(0, 0, 0)
    """For windowed layers' KV; none where blocks have the KV of all layers."""
    num_open_tickets: int = 0
    num_orphan_sequences: int = 0
    """Sequences ended since the start because their gateway did not know them any more. 0, or a
    fault."""
    num_orphan_blocks: int = 0
    """Leased blocks that belong to no sequence, prompt or ticket: lost until the worker starts
    anew. 0, or a fault."""
    is_draining: bool = False
    num_swaps: int = 0
    """Times that a sequence was sent to host memory, since the start."""
    local_prefill_threshold: int = 0
    """Most missing tokens of a prompt that a decode worker would compute by itself now."""
    role: Tier | None = None
    """The tier that it serves now; None before the engine loop's first step."""
    prefill_tokens_per_s: int = 0
    """Prompt tokens that it would compute now, beside the sequences that decode there; 0 until it
    has measured."""
    kv_tiers: tuple[TierLoad, ...] = ()
    """Tiers of KV below the device, fastest first; none unless given by options."""
    num_host_blocks: int = 0
    """Blocks of KV that may arrive in host memory before they have blocks; 0 while a sequence waits
    there."""
    is_colocated: bool = False
    """Whether it computes all prompts of the sequences that it decodes."""
    num_threads: int = 0
    """CPU threads that it computes with now; 0 if they cannot change while it runs."""
    costs: StepCosts = StepCosts()
    """Of steps with this many threads."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """What a worker reports of itself once per boot."""

    identity: WorkerIdentity
    tier: Tier
    """That it was started for; WorkerLoad.role is the one that it serves now."""
    model: str
    layout: KvLayout
    vocab_size: int
    max_model_len: int
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_local_prefill_tokens: int = 0
    """Most missing tokens of a prompt that a decode worker ever computes by choice."""
    numerics: NumericsClass = UNKNOWN_NUMERICS
    min_protocol_version: int = PROTOCOL_VERSION
    max_protocol_version: int = PROTOCOL_VERSION
    software_version: str = ""
    metrics_port: int = 0
    """Port of its Prometheus page, on the host of its address; 0 if there is none."""
    adapters: tuple[str, ...] = ()
    """Names of its LoRA adapters; layout.fingerprint includes their digest."""
    num_threads: int = 0
    """CPU threads that it was started with; 0 if they cannot change while it runs."""


#: Size of a tenant's key; at most 64, the key size of the digest for adapters' prefixes.
TENANT_BYTES = 16


def tenant_of(cache_salt: str) -> bytes:
    """The tenant key of a cache salt; none for the salt that everyone shares."""
    if not cache_salt:
        return b""
    return hashlib.blake2b(cache_salt.encode(), digest_size=TENANT_BYTES).digest()


def finish_reason(
    token_id: int, num_output_tokens: int, num_tokens: int, sampling: Sampling, max_model_len: int
) -> FinishReason:
    """Whether an output ends with `token_id`, its `num_output_tokens`-th token, at `num_tokens` in
    all."""
    if token_id in sampling.stop_token_ids and num_output_tokens > sampling.min_tokens:
        return FinishReason.STOP
    if num_output_tokens >= sampling.max_tokens or num_tokens >= max_model_len:
        return FinishReason.LENGTH
    return FinishReason.NONE
