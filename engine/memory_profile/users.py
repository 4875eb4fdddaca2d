"""Serves a number of users at once, and counts their KV after each step."""

from __future__ import annotations

import random
import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from baton.errors import ConfigError
from baton.types import Sampling
from engine.interface import Batch, Engine, SampleRow, SequenceSlice
from engine.kv.lease import BlockLease
from engine.kv.pool import BlockPool
from engine.memory_profile.recorder import MemoryRecorder, Point


@dataclass(frozen=True, slots=True)
class UserLoad:
    """Requests of `num_users` users, all at once. chunk: most new tokens of a step."""

    num_users: int
    num_input_tokens: int
    num_output_tokens: int
    chunk: int


@dataclass(frozen=True, slots=True)
class KvPoint:
    """KV after a step, in tokens: computed ones, and the room of leased blocks. num_running: users
    in the step."""

    at_s: float
    num_running: int
    num_waiting: int
    num_tokens: int
    leased_tokens: int


@dataclass(frozen=True, slots=True)
class UserRun:
    """memory: of the device; kv: by step."""

    load: UserLoad
    pool_tokens: int
    kv: tuple[KvPoint, ...]
    memory: tuple[Point, ...]


@dataclass(slots=True, eq=False)
class _User:
    tokens: list[int]
    num_computed: int = 0
    lease: BlockLease | None = None


def record_users(engine: Engine, load: UserLoad, recorder: MemoryRecorder) -> UserRun:
    """Serve all users to their end. A user starts when its whole answer has room; its blocks are
    taken as it grows. A step runs all decoding users and a chunk of one prompt. Raises ConfigError
    if not even one user fits."""
    pool = BlockPool(
        engine.spec.num_blocks,
        engine.kv.groups,
        secret=secrets.token_bytes(32),
        allocators=engine.kv.groups.allocators(engine.kv.slot_tables),
        enable_prefix_caching=False,
    )
    total = load.num_input_tokens + load.num_output_tokens
    _check(engine, pool, total)
    rng = random.Random(load.num_users)
    vocabulary = range(engine.spec.vocab_size)
    waiting = deque(
        _User(rng.choices(vocabulary, k=load.num_input_tokens)) for _ in range(load.num_users)
    )
    running: list[_User] = []
    kv: list[KvPoint] = []
    most = max(1, pool.num_blocks // pool.num_blocks_for(total))
    with recorder:
        begun_s = time.monotonic()
        while waiting or running:
            while waiting and len(running) < most:
                running.append(waiting.popleft())
            _step(engine, pool, load, running)
            leased = pool.counts().leased * pool.block_size
            num_running = len(running)
            running = [user for user in running if not _is_done(user, load)]
            computed = sum(user.num_computed for user in running)
            at_s = time.monotonic() - begun_s
            kv.append(KvPoint(at_s, num_running, len(waiting), computed, leased))
    pool_tokens = pool.num_blocks * pool.block_size
    return UserRun(load, pool_tokens, tuple(kv), tuple(recorder.points()))


def _check(engine: Engine, pool: BlockPool, num_tokens: int) -> None:
    most = min(engine.spec.max_model_len, pool.num_blocks * pool.block_size)
    if num_tokens > most:
        fix = f"lower it: {most} tokens, answer included, are what model and KV memory take"
        raise ConfigError.of("input_tokens", num_tokens, fix)


def _step(engine: Engine, pool: BlockPool, load: UserLoad, running: Sequence[_User]) -> None:
    """Compute one new token of each decoding user, and a chunk of the first prompt."""
    parts, users, has_prompt = [], [], False
    for user in running:
        is_prompt = user.num_computed < load.num_input_tokens
        if is_prompt and has_prompt:
            continue
        has_prompt |= is_prompt
        new = user.tokens[user.num_computed :][: load.chunk if is_prompt else None]
        end = user.num_computed + len(new)
        parts.append(_slice(pool, user, new, end, load.num_input_tokens))
        users.append((user, end))
    for (user, end), samples in zip(users, engine.forward(Batch(tuple(parts))), strict=True):
        user.num_computed = end
        user.tokens += [sample.token_id for sample in samples]
        if _is_done(user, load) and user.lease is not None:
            user.lease.release()


def _slice(
    pool: BlockPool, user: _User, new: Sequence[int], end: int, num_prompt_tokens: int
) -> SequenceSlice:
    """The user's part of a step, with blocks for it."""
    if user.lease is None:
        user.lease = pool.lease(b"", user.tokens, end)
    if user.lease is None or user.lease.prepare_write(user.num_computed, end) is None:
        raise RuntimeError("blocks were counted wrongly")
    rows: tuple[SampleRow, ...] = ()
    if end == len(user.tokens):
        row = SampleRow(len(new) - 1, Sampling(), user.tokens, num_prompt_tokens)
        rows = (row,)
    table = user.lease.block_ids
    return SequenceSlice(new, user.num_computed, table, rows, num_prompt_tokens)


def _is_done(user: _User, load: UserLoad) -> bool:
    return user.num_computed == load.num_input_tokens + load.num_output_tokens
