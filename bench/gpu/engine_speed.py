"""Engine with an 8B Llama of random weights: prompts and verification compared with their floors,
and a mixed load.

Floors (docs/kernels.md): minimum bytes of a step over the copy roof, operations over the matmul
roof.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache, partial

import torch

from baton.types import KvLayout, Sampling
from bench.gpu.setting import Result, Setting, time_eager_ms, time_ms
from bench.measure import percentile
from engine.families.config import ModelConfig
from engine.families.read import parse_config
from engine.interface import Batch, EngineSpec, SampleRow, SequenceSlice
from engine.kv.tensors.paged import TorchKvPool
from engine.ranks.followers import NoFollowers
from engine.torch.decoder import Decoder
from engine.torch.engine import TorchEngine
from engine.torch.packed import pack_parameters
from engine.torch.parameters import empty_parameters
from engine.torch.rope import Rope, make_rope
from engine.torch.step import pack_batch
from engine.torch.step_runner import EagerSteps, StepModel

BLOCK_SIZE = 16
LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 60}
_SMALL_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "dtype": "float16"}
#: Config of a tiny Llama, for items that test what steps compute, not how fast.
SMALL: Mapping[str, object] = {**LLAMA_8B, **_SMALL, **_SMALL_HEADS}


def model_config(setting: Setting) -> dict[str, object]:
    """config.json of the measured model."""
    if setting.is_rehearsal and not setting.is_dry:
        # One layer compiles the same kernels as all.
        return {**LLAMA_8B, "num_hidden_layers": 1}
    return dict(SMALL if setting.is_dry else LLAMA_8B)


class Model:
    """A decoder of random weights, its pool, and an engine over both."""

    def __init__(
        self, setting: Setting, config: ModelConfig, num_blocks: int, std: float = 0.02
    ) -> None:
        """std: of the weights."""
        self.config = config
        device = setting.device
        parameters = empty_parameters(config, setting.half, device)
        for _, target in parameters.targets():
            target.tensor.normal_(std=std, generator=setting.generator())
        self.decoder = Decoder(config, pack_parameters(parameters))
        self.rope: Rope = make_rope(config, device)
        dtype = str(setting.half).removeprefix("torch.")
        layout = KvLayout(
            *("bench", config.num_layers, config.num_kv_heads, config.head_dim, dtype, BLOCK_SIZE),
            parts=config.kv_parts,
        )
        self.kv = TorchKvPool(layout, num_blocks, device)
        # Blocks that no step wrote hold numbers, as if a prompt had.
        self.kv.tensor.normal_(generator=setting.generator())
        spec = EngineSpec(
            "bench", layout, num_blocks, config.vocab_size, config.max_position_embeddings
        )
        followers = NoFollowers()
        steps = EagerSteps(StepModel(config, self.decoder, self.rope, self.kv), followers)
        self.engine = TorchEngine(spec, self.kv, steps, 4, followers, torch.cuda.synchronize)

    @property
    def num_weights(self) -> int:
        """Weights read by each step: all but the embeddings."""
        c = self.config
        attention = c.hidden_size * c.head_dim * 2 * (c.num_heads + c.num_kv_heads)
        return (
            c.num_layers * (attention + 3 * c.hidden_size * c.intermediate_size)
            + c.hidden_size * c.vocab_size
        )

    def batch(self, num_seqs: int, cached: int, new: int) -> Batch:
        """Sequences with blocks of their own, each drawing one greedy token."""
        width = -(-(cached + new) // BLOCK_SIZE)
        return Batch(tuple(self.part(i * width, cached, new) for i in range(num_seqs)))

    def part(self, first_block: int, cached: int, new: int) -> SequenceSlice:
        """One sequence on consecutive blocks."""
        width = -(-(cached + new) // BLOCK_SIZE)
        tokens = [(7 * i) % self.config.vocab_size for i in range(new)]
        row = SampleRow(new - 1, Sampling(temperature=0.0), tokens, 1)
        return SequenceSlice(
            tokens, cached, tuple(range(first_block, first_block + width)), (row,), cached + new
        )

    def step_floor(
        self, num_seqs: int, cached: int, new: int, weight_bytes: int = 2
    ) -> dict[str, float]:
        """Minimum bytes and operations of a step. weight_bytes: bytes per weight."""
        c = self.config
        per_token = 2 * c.num_layers * c.num_kv_heads * c.head_dim * 2
        num_tokens = num_seqs * new
        pairs = num_tokens * (cached + (new + 1) / 2)
        head = c.hidden_size * c.vocab_size
        return {
            "bytes": float(weight_bytes * self.num_weights + num_seqs * (cached + new) * per_token),
            "flops": 2.0 * (self.num_weights - head) * num_tokens
            + 2.0 * head * num_seqs
            + 4.0 * c.num_layers * c.num_heads * c.head_dim * pairs,
        }


@cache
def load_model(setting: Setting, num_tokens: int = 264_000) -> Model:
    """The model of this process, loaded once: 16 GB, and a pool, by default of 35 GB, for 256
    sequences of 1K tokens."""
    config = parse_config(model_config(setting))
    return Model(setting, config, setting.pick(num_tokens, 400) // BLOCK_SIZE)


def _step(num_seqs: int, cached: int, new: int, setting: Setting) -> Result:
    """ms: the forward in a CUDA graph. eager_ms: the forward launched by Python. engine_ms:
    Engine.forward, with sampling and host work. plan_ms: its host time before the device starts."""
    model = load_model(setting)
    num_seqs, cached, new = (
        (min(num_seqs, 2), min(cached, 20), min(new, 9))
        if setting.is_dry
        else (num_seqs, cached, new)
    )
    batch = model.batch(num_seqs, cached, new)
    start = time.perf_counter()
    packed = pack_batch(batch, model.config, model.rope, model.kv.tensor, model.kv.tensor.dtype)
    plan_ms = (time.perf_counter() - start) * 1000

    def forward() -> torch.Tensor:
        states = model.decoder.forward(packed, model.kv.tensor)
        return model.decoder.logits(states)

    return {
        "ms": time_ms(forward, setting),
        "eager_ms": time_eager_ms(forward, setting),
        "engine_ms": time_eager_ms(lambda: model.engine.forward(batch), setting),
        "plan_ms": plan_ms,
        **model.step_floor(num_seqs, cached, new),
    }


def step_times(model: Model, batch: Batch, count: int) -> list[float]:
    """Milliseconds of `count` steps."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        model.engine.forward(batch)
        times.append((time.perf_counter() - start) * 1000)
    return times


def inter_token(times: list[float], prefill_tokens_per_s: float) -> Result:
    ordered = sorted(times)
    return {
        "itl_p50_ms": percentile(ordered, 0.5),
        "itl_p99_ms": percentile(ordered, 0.99),
        "prefill_tokens_per_s": prefill_tokens_per_s,
    }


def _colocated(chunk: int, setting: Setting) -> Result:
    """Steps of 32 decoding sequences and one chunk of a prompt of 8K tokens."""
    model = load_model(setting)
    num_seqs, cached, chunk = setting.pick(32, 1), setting.pick(1023, 9), setting.pick(chunk, 8)
    decoding = model.batch(num_seqs, cached, 1)
    first = len(decoding.slices) * len(decoding.slices[0].block_table)
    batches = [
        Batch((*decoding.slices, model.part(first, start, chunk)))
        for start in range(0, setting.pick(8192, 16), chunk)
    ]
    for batch in batches:
        model.engine.forward(batch)
    times = [
        t
        for _ in range(setting.pick(4, 1))
        for batch in batches
        for t in step_times(model, batch, 1)
    ]
    return inter_token(times, chunk * len(times) / sum(times) * 1000)


def check_engine(setting: Setting) -> Result:
    """Compare a small float32 model on this device's kernels with its CPU twins: a mixed batch over
    KV that it computed itself."""
    config = parse_config(dict(SMALL))
    length = 40
    results = []
    for device in (torch.device("cpu"), setting.device):
        parameters = empty_parameters(config, torch.float32, device)
        source = torch.Generator().manual_seed(setting.seed)
        for _, target in parameters.targets():
            target.fill(torch.randn(target.shape, generator=source) * 0.2)
        decoder = Decoder(config, pack_parameters(parameters))
        layout = KvLayout("check", 1, config.num_kv_heads, config.head_dim, "float32", BLOCK_SIZE)
        pool = TorchKvPool(layout, 8, device).tensor
        rope = make_rope(config, device)
        for start, new in ((0, length - 1), (length - 1, 1)):
            slices = tuple(_check_slice(i, start, new) for i in range(2))
            packed = pack_batch(Batch(slices), config, rope, pool, pool.dtype)
            results.append(decoder.logits(decoder.forward(packed, pool)).double().cpu())
    wanted, got = torch.cat(results[:2]), torch.cat(results[2:])
    error = float((got - wanted).norm() / wanted.norm())
    return {"error": error, "tolerance": 1e-4, "verdict": "right" if error <= 1e-4 else "WRONG"}


def _check_slice(index: int, start: int, new: int) -> SequenceSlice:
    tokens = [(5 * index + 3 * (start + i)) % 60 for i in range(new)]
    row = SampleRow(new - 1, Sampling(temperature=0.0), tokens, 1)
    return SequenceSlice(tokens, start, range(4 * index, 4 * index + 4), (row,), start + new)


ITEMS: Mapping[str, Callable[[Setting], Result]] = {
    "check engine": check_engine,
    "engine verify 64 x 1K, 5 tokens": partial(_step, 64, 1019, 5),
    "engine prefill 2K": partial(_step, 1, 0, 2048),
    "engine prefill 8K": partial(_step, 1, 0, 8192),
    "engine prefill 32K": partial(_step, 1, 0, 32768),
    "mixed load, one engine, chunks of 2K": partial(_colocated, 2048),
    "mixed load, one engine, chunks of 256": partial(_colocated, 256),
}
