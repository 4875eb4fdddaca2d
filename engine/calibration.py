"""What a model's linear layers are given when it reads a text: how their inputs go together, layer
by layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer

from baton.errors import ConfigError
from baton_kernels.kv_write import first_rows, head_rows
from baton_kernels.linear import Linear
from baton_kernels.paged_attention import AttentionSlice, plan_attention
from engine.families.config import ModelConfig
from engine.families.layers import describe_layers
from engine.torch.decoder import Decoder, LayerKv, PackedBatch, normed
from engine.torch.load import load_parameters
from engine.torch.packed import PackedLayer
from engine.torch.rope import Rope, make_rope

_CPU = torch.device("cpu")
_BLOCK_TOKENS = 16
#: Tokens that the model reads at once, and in all: more add nothing new.
_PIECE_TOKENS = 512
_MAX_TOKENS = 1 << 15


def read_pieces(folder: Path, text: Path, config: ModelConfig) -> list[list[int]]:
    """Token ids of the beginning of a text, in pieces that the checkpoint in `folder` can read.
    Raises ConfigError."""
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError.of("calibration", str(text), f"give a file of text ({error})") from None
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError.of("calibration", str(text), f"{folder} has no tokenizer.json to read it")
    ids = Tokenizer.from_file(str(path)).encode(content).ids[:_MAX_TOKENS]
    if not ids or max(ids) >= config.vocab_size:
        raise ConfigError.of(
            "calibration", str(text), "it has no text, or tokens unknown to the model"
        )
    size = min(_PIECE_TOKENS, config.derived_max_len)
    return [ids[first : first + size] for first in range(0, len(ids), size)]


def grams(
    folder: Path, config: ModelConfig, pieces: Sequence[Sequence[int]]
) -> Iterator[dict[str, torch.Tensor]]:
    """Of each decoder layer, one after the other: by the names of its linear layers in the
    checkpoint, the sum over all tokens of the outer products of their inputs [num_in, num_in]
    float32. Layers with the same input share one tensor.

    The model runs in its own dtype, on the CPU. What is held at once is the model, the states of
    all tokens, and one layer's sums. Raises ModelError.
    """
    dtype = getattr(torch, config.dtype)
    parameters, _ = load_parameters(folder, config, dtype, _CPU, lambda _: None)
    num_blocks = -(-max(map(len, pieces)) // _BLOCK_TOKENS)
    # Of the one layer that runs.
    heads = (len(config.kv_parts), config.num_kv_heads)
    shape = (num_blocks, 1, *heads, _BLOCK_TOKENS, config.head_dim)
    pool = torch.zeros(shape, dtype=dtype)
    rope = make_rope(config, config.derived_max_len, _CPU)
    batches = [_batch(ids, config, rope, pool) for ids in pieces]
    embed = Decoder(config, parameters).embed
    states = [embed(batch.token_ids) for batch in batches]
    specs = describe_layers(config)
    for spec, layer in zip(specs, parameters.layers, strict=True):
        watched = [_Watched(linear) for linear in layer.linears]
        seen: PackedLayer = layer.with_linears(watched)
        decoder = _OneLayer(config, replace(parameters, layers=(seen,)))
        with torch.inference_mode():
            states = [
                decoder.next_states(state, batch, pool)
                for state, batch in zip(states, batches, strict=True)
            ]
        linears = zip(spec.linears, watched, strict=True)
        quantizable = [(one, linear) for one, linear in linears if one.is_quantizable]
        yield {name: linear.gram for one, linear in quantizable for name in one.names}


class _OneLayer(Decoder):
    """A decoder of which one layer is run."""

    def next_states(
        self, states: torch.Tensor, batch: PackedBatch, pool: torch.Tensor
    ) -> torch.Tensor:
        """What the layer makes of the states [tokens, hidden] of the batch."""
        layer = self._parameters.layers[0]
        kv = LayerKv(pool, None, 0, head_rows(batch.first_rows, pool))
        x = normed(layer.before_attention, states)
        mixed = self._attention(0, layer, x, batch, kv, None)
        states = self._add(layer.attention.output, mixed, states, layer.after_attention)
        return self._mlp(0, layer, states)


class _Watched:
    """A linear layer, and the sum of its inputs' outer products [num_in, num_in] float32."""

    def __init__(self, linear: Linear) -> None:
        self._linear = linear
        self.gram = torch.zeros(linear.num_in, linear.num_in)

    @property
    def num_in(self) -> int:
        return self._linear.num_in

    @property
    def num_out(self) -> int:
        return self._linear.num_out

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        out_dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See Linear."""
        wide = x.float()
        self.gram.addmm_(wide.t(), wide)
        return self._linear(x, residual, out_dtype)


def _batch(ids: Sequence[int], config: ModelConfig, rope: Rope, pool: torch.Tensor) -> PackedBatch:
    """One sequence from its beginning, in the pool's first blocks."""
    positions = torch.arange(len(ids))
    lengths = torch.full_like(positions, len(ids))
    rotations = rope.tables(positions, lengths, len(ids), pool.dtype)
    part = AttentionSlice(0, len(ids), 0, range(len(pool)))
    scale = config.traits.attention_scale
    plans = {
        window: plan_attention([part], pool, config.num_heads, scale, window, pool.dtype)
        for window in set(config.windows)
    }
    return PackedBatch(torch.tensor(ids), rotations, first_rows(positions, pool), plans, None)
