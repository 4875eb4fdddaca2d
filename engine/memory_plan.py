"""Plans a worker's memory before loading. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.types import DTYPE_BYTES, KvLayout
from engine.families.config import ModelConfig
from engine.families.layers import describe_layers, describe_norm
from engine.kv.layout import groups_of
from engine.kv.part import KvPart
from engine.ranks.mesh import ONE_RANK, Degrees, Stage, stage_layers


@dataclass(frozen=True, slots=True)
class HeadMemory:
    """Bytes of what stands beside the model's KV: weights, and so many per block. name: a draft
    head, or summaries of keys."""

    weight_bytes: int = 0
    block_bytes: int = 0
    name: str = "draft head"


NO_HEAD = HeadMemory()

#: By default, a worker on a CPU has KV for so many sequences of the model's length, of which so
#: many tokens count; and for at least one of the whole length.
DEFAULT_NUM_SEQS, DEFAULT_MAX_LEN = 16, 8192
#: Default KV at most, as a part of the memory that is available at the start.
DEFAULT_PART = 4
_DEFAULT_RULE = (
    f"for {DEFAULT_NUM_SEQS} sequences of up to {DEFAULT_MAX_LEN} tokens, in at most a quarter of "
    "the memory that was free; --kv-cache-memory-bytes gives more"
)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory of one rank by use, in bytes, and the capacity of the KV blocks. layout: of the whole
    model.

    num_window_slots: slots of slot_bytes each for the KV of windowed layers apart from the blocks;
    block_bytes then excludes these layers. 0 if blocks hold the KV of all layers.
    """

    weight_bytes: int
    activation_bytes: int
    block_bytes: int
    num_blocks: int
    layout: KvLayout
    max_model_len: int
    max_num_seqs: int
    dtype: str
    degrees: Degrees = ONE_RANK
    graph_bytes: int = 0
    transfer_bytes: int = 0
    head: HeadMemory = NO_HEAD
    num_window_slots: int = 0
    slot_bytes: int = 0
    state_bytes: int = 0
    """States of max_num_seqs sequences."""
    num_sharing: int = 1
    """Ranks that have their KV blocks together."""
    is_kv_default: bool = False
    """The default of a CPU set the size of the KV cache, not an option."""

    @property
    def head_bytes(self) -> int:
        """See HeadMemory: its weights, and its bytes of all blocks."""
        most = self.max_num_seqs * -(-self.max_model_len // self.layout.block_size)
        return self.head.weight_bytes + min(self.num_blocks, most) * self.head.block_bytes

    @property
    def kv_bytes(self) -> int:
        return self.block_bytes * self.num_blocks + self.slot_bytes * self.num_window_slots

    @property
    def rank_bytes(self) -> int:
        """All that one rank may come to use."""
        used = (self.weight_bytes, self.activation_bytes, self.state_bytes, self.transfer_bytes)
        return sum(used) + self.graph_bytes + self.head_bytes + self.kv_bytes

    @property
    def num_kv_tokens(self) -> int:
        return self.num_blocks * self.layout.block_size

    @property
    def longest_context(self) -> int:
        """Longest sequence that can be served, in tokens."""
        return min(self.max_model_len, self.num_kv_tokens)

    @property
    def num_longest_seqs(self) -> int:
        """Sequences of the longest context that fit at once while decoding."""
        return self.num_blocks // groups_of(self.layout).num_held_blocks(self.longest_context)

    def rows(self) -> tuple[tuple[str, str], ...]:
        """(use, amount) pairs for people."""
        num_ranks = self.degrees.num_ranks
        ranks = (("ranks", f"{num_ranks}, each with:"),) if num_ranks > 1 else ()
        transfers = (("KV on its way", f"up to {format_bytes(self.transfer_bytes)}"),)
        slots = (
            f"; {self.num_window_slots} window slots, {format_bytes(self.slot_bytes)} each"
            if self.num_window_slots
            else ""
        )
        sharing = f", shared by {self.num_sharing} ranks" if self.num_sharing > 1 else ""
        states = f"{format_bytes(self.state_bytes)}, of {self.max_num_seqs} sequences"
        graphs = (("CUDA graphs", f"about {format_bytes(self.graph_bytes)}"),)
        return (
            *ranks,
            ("weights", f"{format_bytes(self.weight_bytes)} ({self.dtype})"),
            ("activations", f"up to {format_bytes(self.activation_bytes)}"),
            *(graphs if self.graph_bytes else ()),
            *(transfers if self.transfer_bytes else ()),
            *((("states", states),) if self.state_bytes else ()),
            *(((self.head.name, format_bytes(self.head_bytes)),) if self.head_bytes else ()),
            (
                "KV cache",
                f"{format_bytes(self.kv_bytes)}: {self.num_blocks} blocks of "
                f"{self.layout.block_size} tokens, {format_bytes(self.block_bytes)} each "
                f"({self.layout.dtype}){slots}{sharing}",
            ),
            *((("KV cache by default", _DEFAULT_RULE),) if self.is_kv_default else ()),
            ("longest context", f"{self.longest_context} tokens"),
            (
                "sequences at that length",
                f"{self.num_longest_seqs} (at most {self.max_num_seqs} run)",
            ),
        )

    def render(self) -> str:
        """The plan as a plain-text table, one row per line."""
        rows = self.rows()
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)


def format_bytes(num_bytes: int) -> str:
    """Format in the largest binary unit with a value of at least 1."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def num_linear_weights(config: ModelConfig) -> int:
    """Number of weights in the decoder layers' linear layers."""
    linears = (linear for layer in describe_layers(config) for linear in layer.linears)
    return sum(linear.num_in * linear.num_out for linear in linears)


def quantized_weights(config: ModelConfig, *, has_output: bool = True) -> Iterator[tuple[str, int]]:
    """Layers that are quantised in the checkpoint, each with its number of weights. has_output:
    count the output layer."""
    stored = config.quantization
    if stored is None:
        return
    if stored.output_layer is not None and not config.is_tied and has_output:
        yield "lm_head", config.vocab_size * config.hidden_size
    for layer in describe_layers(config):
        for linear in layer.linears:
            if linear.is_quantizable and all(map(stored.is_quantized, linear.names)):
                # Layers that are packed together take what the largest of them takes.
                largest = max(linear.names, key=stored.loaded_bytes)
                yield largest, linear.num_in * linear.num_out


def num_quantized_weights(config: ModelConfig) -> int:
    """Number of weights that are quantised in the checkpoint."""
    return sum(count for _, count in quantized_weights(config))


def num_parameters(config: ModelConfig) -> int:
    """Number of parameters in the checkpoint; tied embeddings count once."""
    beside = describe_norm(config).weight.size
    for layer in describe_layers(config):
        beside += sum(linear.num_out for linear in layer.linears if linear.has_bias)
        beside += sum(vector.size for vector in layer.vectors)
    embeddings = config.vocab_size * config.hidden_size * (1 if config.is_tied else 2)
    return num_linear_weights(config) + embeddings + beside


def weight_bytes(
    config: ModelConfig, dtype: str, keeps_levels: bool, degrees: Degrees = ONE_RANK
) -> int:
    """Bytes of the packed weights of the rank with the most; with tied embeddings the output layer
    is a copy.

    keeps_levels: quantised layers stay quantised. During loading, each level takes a byte
    regardless of its bits, and each scale of float8 is float32.
    """
    stages = (Stage(number, degrees.pipeline) for number in range(degrees.pipeline))
    found = max(
        _stage_bytes(config, dtype, keeps_levels, degrees.tensor, stage) for stage in stages
    )
    return found - _bytes_elsewhere(config, dtype, keeps_levels, degrees)


def _bytes_elsewhere(config: ModelConfig, dtype: str, keeps_levels: bool, degrees: Degrees) -> int:
    """Bytes of the experts that only ranks outside the tensor-parallel group have; at most half a
    byte is counted of a quantised weight."""
    experts, num_groups = config.traits.experts, degrees.num_expert_ranks // degrees.tensor
    if num_groups <= 1 or experts is None:
        return 0
    num_matrices = 3 * sum(experts.layers) * experts.num_experts
    num_weights = num_matrices * config.hidden_size * experts.intermediate_size
    num_elsewhere = num_weights - num_weights // num_groups
    is_quantized = keeps_levels and config.quantization is not None
    return num_elsewhere // 2 if is_quantized else num_elsewhere * DTYPE_BYTES[dtype]


def _stage_bytes(
    config: ModelConfig, dtype: str, keeps_levels: bool, num_ranks: int, stage: Stage
) -> int:
    """Bytes of the packed weights of each of a stage's ranks."""
    size, config = DTYPE_BYTES[dtype], config.of_layers(stage.layers(config.num_layers))
    embeddings = config.vocab_size * config.hidden_size
    head = embeddings if config.is_tied else 0
    saved, stored = 0, config.quantization
    if keeps_levels and stored is not None:
        saved = sum(
            int(count * (size - stored.loaded_bytes(name)))
            for name, count in quantized_weights(config, has_output=stage.is_first)
        )
    shared = (num_parameters(config) + head) * size - saved
    if not stage.is_first:
        shared -= 2 * embeddings * size
    return -(-shared // num_ranks)


def token_bytes(config: ModelConfig, element_bytes: int) -> int:
    """Upper estimate of a step's bytes per token: the widest layer, by operation or inside
    baton_kernels.cpu.layers.NativeLayers, and inputs as products read them: widened to float32, or
    quantised to integers with sums per group of 8 or more."""
    hidden, inter, experts = config.hidden_size, config.intermediate_size, config.traits.experts
    if experts is not None:
        # One row per chosen expert, gathered and scattered.
        chosen = experts.num_chosen * (2 * experts.intermediate_size + hidden)
        inter = max(inter, chosen + experts.shared_size)
    q = config.num_heads * config.head_dim
    heads = q + config.num_kv_heads * config.head_dim
    width = 3 * inter + max(4 * hidden + 2 * heads, 2 * hidden + 3 * heads)
    prepared = 4 * max(hidden, inter, q) + 128
    return element_bytes * width + prepared


def activation_bytes(
    config: ModelConfig, dtype: str, max_num_batched_tokens: int, max_num_seqs: int, max_len: int
) -> int:
    """Upper estimate of a step's bytes: its widest layer, its gathered KV, and its logits in
    float32."""
    tokens = max_num_batched_tokens * token_bytes(config, DTYPE_BYTES[dtype])
    gathered = 2 * max(max_len, 8192) * config.num_kv_heads * config.head_dim * DTYPE_BYTES[dtype]
    logits = 3 * max_num_seqs * config.vocab_size * 4
    return tokens + gathered + logits


def plan_blocks(
    layout: KvLayout,
    *,
    dtype: str,
    weights: int,
    activations: int,
    graphs: int,
    max_model_len: int,
    max_num_seqs: int,
    available_bytes: int,
    degrees: Degrees,
    kv_cache_memory_bytes: int | None,
    num_blocks: int | None,
    transfers: int = 0,
    head: HeadMemory = NO_HEAD,
    max_window_slots: int = 0,
    states: int = 0,
    default_kv_bytes: int | None = None,
    num_sharing: int = 1,
) -> MemoryPlan:
    """Plan the number of KV blocks: `num_blocks`, else what fits in `kv_cache_memory_bytes`, else
    enough for max_num_seqs sequences of max_model_len tokens within the rest of `available_bytes`.

    default_kv_bytes: bounds that last case, then also limited to default_kv_tokens; None on a GPU.

    max_window_slots: maximum slots of running sequences, see LayerGroups.max_slots; 0 if groups
    cannot lie apart. They lie apart only if there are more blocks than slots; sequences then never
    lack slots, and admission, scheduling and routing count blocks only.

    layout: of the whole model. weights, activations, graphs, states, transfers: bytes of one rank.
    head: has KV for each block, within the same budget. Other byte counts are totals of all ranks,
    which share them equally; num_sharing of them have their KV blocks together.

    Raises ConfigError if not even one block fits, or the weights do not.
    """
    block_size = layout.block_size
    heads = max(1, layout.num_kv_heads // degrees.tensor)
    stages = stage_layers(layout.num_layers, degrees.pipeline)
    parts = [KvPart(own.start, len(own), 0, heads).layout(layout) for own in stages]
    block_bytes = max(own.block_bytes for own in parts)
    # Bytes of a block, with the draft head's KV of its tokens.
    whole_bytes = block_bytes + head.block_bytes
    slot_bytes = max(groups_of(own).apart_block_bytes for own in parts)
    full_bytes = max(own.block_bytes - groups_of(own).apart_block_bytes for own in parts)
    available_bytes //= degrees.num_ranks
    if weights + head.weight_bytes > available_bytes:
        raise ConfigError.of(
            "dtype",
            dtype,
            f"the weights need {format_bytes(weights + head.weight_bytes)}, and "
            f"{format_bytes(available_bytes)} is free; use a smaller dtype, a smaller model or "
            "another machine",
        )
    if states and weights + head.weight_bytes + states > available_bytes:
        raise ConfigError.of(
            "max_num_seqs",
            max_num_seqs,
            f"the states of so many sequences need {format_bytes(states)} beside the weights' "
            f"{format_bytes(weights)}, and {format_bytes(available_bytes)} is free; lower it",
        )
    num_apart, is_default = num_blocks or 0, False
    if num_blocks is None:
        others = weights + activations + graphs + states + transfers + head.weight_bytes
        if kv_cache_memory_bytes is None:
            budget = max(0, available_bytes - others) * num_sharing
            most = max_num_seqs * -(-max_model_len // block_size)
            if is_default := default_kv_bytes is not None:
                most = min(most, -(-default_kv_tokens(max_model_len) // block_size))
                budget = min(budget, default_kv_bytes * num_sharing // degrees.num_ranks)
        else:
            budget = kv_cache_memory_bytes * num_sharing // degrees.num_ranks
            most = budget // (full_bytes or whole_bytes)
        num_blocks = min(most, budget // whole_bytes)
        left = budget - max_window_slots * slot_bytes
        num_apart = min(most, left // (full_bytes + head.block_bytes)) if full_bytes else 0
    is_apart = 0 < max_window_slots < num_apart
    if is_apart:
        num_blocks, block_bytes = num_apart, full_bytes
    if num_blocks < 1:
        raise ConfigError.of(
            "kv_cache_memory_bytes",
            kv_cache_memory_bytes,
            f"no KV block fits; one block of {block_size} tokens needs "
            f"{format_bytes(whole_bytes)}, and the weights take {format_bytes(weights)} of "
            f"{format_bytes(available_bytes)}; give more memory, or a smaller --block-size",
        )
    return MemoryPlan(
        weight_bytes=weights,
        activation_bytes=activations,
        block_bytes=block_bytes,
        num_blocks=num_blocks,
        layout=layout,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        dtype=dtype,
        degrees=degrees,
        graph_bytes=graphs,
        transfer_bytes=transfers,
        head=head,
        num_window_slots=max_window_slots if is_apart else 0,
        slot_bytes=slot_bytes if is_apart else 0,
        state_bytes=states,
        num_sharing=num_sharing,
        is_kv_default=is_default,
    )


def default_kv_tokens(max_model_len: int) -> int:
    """Tokens of KV that a worker on a CPU has by default, where memory allows."""
    return max(DEFAULT_NUM_SEQS * min(max_model_len, DEFAULT_MAX_LEN), max_model_len)
