"""From options to a worker's tiers of KV."""

from __future__ import annotations

import secrets
import time
from contextlib import ExitStack
from pathlib import Path

from baton.config import WorkerOptions
from baton.errors import ConfigError
from engine.interface import Engine
from engine.kv.tiers.disk import DiskTier, TierFolder
from engine.kv.tiers.host import HostTier
from engine.kv.tiers.interface import Tier
from engine.kv.tiers.record import RecordFormat
from engine.kv.tiers.runner import ThreadRunner
from engine.kv.tiers.stack import Level, TierStack
from kv_transfer.kv_secret import KvSecret, read_kv_secret
from worker_core.nodes import degrees_of

#: Key of chain keys and seals in a shared store, unless workers have a secret.
_NO_SECRET = bytes(32)


def build_tiers(options: WorkerOptions, engine: Engine) -> TierStack | None:
    """Open and measure the tiers that the options name; None without any. Waits for their devices:
    a disk's records are found. Raises ConfigError."""
    if not options.has_kv_tiers:
        return None
    _check(options, engine)
    with ExitStack() as undo:
        folder = None
        secret = secrets.token_bytes(32)
        if options.kv_disk_dir:
            folder = TierFolder(Path(options.kv_disk_dir))
            undo.callback(folder.close)
            secret = folder.secret
        if options.kv_store_url:
            # A secret that `baton serve` draws is another one after a restart.
            secret = _store_secret(read_kv_secret(options.kv_secret_file))
        spec, is_shared = engine.spec, options.kv_store_url is not None
        form = RecordFormat(spec.groups, spec.numerics, secret, is_shared=is_shared)
        tiers: list[Tier] = []
        if options.kv_host_bytes:
            tiers.append(HostTier(options.kv_host_bytes, form.max_bytes))
        if folder and options.kv_disk_bytes:
            sizes = options.kv_disk_bytes, form.max_bytes, form.head_bytes
            tiers.append(DiskTier(folder, *sizes, form.key_of))
        if options.kv_store_url:
            from engine.kv.tiers.redis import RedisTier

            tiers.append(RedisTier(options.kv_store_url, form.context))
        levels = list(map(_level, tiers))
        undo.pop_all()
    stack = TierStack(engine.kv, form, levels, time.monotonic)
    stack.measure()
    return stack


def _level(tier: Tier) -> Level:
    def on_error(error: Exception) -> None:
        level.on_error(error)

    level = Level(tier, ThreadRunner(f"kv-tier-{tier.name}", on_error))
    return level


def _check(options: WorkerOptions, engine: Engine) -> None:
    """Raises ConfigError if the worker's KV cannot be kept in tiers."""
    names = ("kv_host_bytes", "kv_disk_dir", "kv_store_url")
    name = next(name for name in names if getattr(options, name))
    groups = engine.spec.groups
    why = ""
    if degrees_of(options).num_ranks > 1:
        why = "workers of several ranks keep KV on their devices alone"
    elif not options.enable_prefix_caching:
        why = "without --enable-prefix-caching no prefix is reused"
    elif groups.cannot_rewind:
        why = f"{engine.spec.model} shares no prefixes: it has {groups.cannot_rewind}"
    elif not groups.keeps_all_blocks:
        why = f"all layers of {engine.spec.model} are windowed, so prefixes are short"
    if why:
        # The URL may have a password.
        shown = "..." if name == "kv_store_url" else getattr(options, name)
        raise ConfigError.of(name, shown, f"{why}; leave it out")


def _store_secret(kv_secret: KvSecret | None) -> bytes:
    return kv_secret.tier_key() if kv_secret else _NO_SECRET
