"""From options to speculation."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from baton.cache.pool import BlockPool
from baton.config import DecodeOptions
from baton.engine.interface import Engine
from baton.model.checkpoint import resolve_checkpoint
from baton.worker.build import build_decode_engine
from worker_core.speculation.draft_model import DraftModelProposer
from worker_core.speculation.interface import NoSpeculation, Speculation
from worker_core.speculation.ngram import NgramProposer
from worker_core.speculation.pair import check_specs, check_tokenizers
from worker_core.speculation.speculator import Speculator


def build_speculation(
    options: DecodeOptions, engine: Engine, clock: Callable[[], float]
) -> Speculation:
    """What the options name, for a target that is loaded. Takes as long as loading a draft model;
    raises StartupError."""
    most = options.num_speculative_tokens
    match options.speculative_method:
        case "ngram":
            proposer = NgramProposer(options.prompt_lookup_min, options.prompt_lookup_max)
            return Speculator(proposer, most, clock)
        case "draft":
            return Speculator(_draft_model(options, engine, clock), most, clock)
        case _:
            return NoSpeculation()


def _draft_model(
    options: DecodeOptions, target: Engine, clock: Callable[[], float]
) -> DraftModelProposer:
    draft_options = options.model_copy(
        update={
            "model": options.speculative_model,
            "revision": None,
            "served_model_name": None,
            "max_model_len": None,
            "kv_cache_memory_bytes": None,
            "num_gpu_blocks_override": None,
            # Of this process alone, with the threads that the target's rank here has.
            "tensor_parallel_size": 1,
            "num_threads": None,
        }
    )
    engine = build_decode_engine(draft_options)
    check_specs(target.spec, engine.spec)
    if options.engine == "torch":
        check_tokenizers(
            resolve_checkpoint(options.model, options.revision),
            resolve_checkpoint(draft_options.model, None),
        )
    pool = BlockPool(
        engine.spec.num_blocks,
        engine.spec.layout.block_size,
        secret=secrets.token_bytes(32),
        enable_prefix_caching=False,
    )
    return DraftModelProposer(engine, pool, options.max_num_batched_tokens, clock)
