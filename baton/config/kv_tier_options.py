"""Options of tiers of KV below a worker's device."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from baton.config.fields import PRIVATE, ByteSize, NonEmpty, RegistryUrl
from baton.config.options import Options


class KvTierOptions(Options):
    """Where KV of prefixes goes when a worker's KV blocks are needed for others."""

    kv_host_bytes: ByteSize | None = None
    """Host memory of each worker for prefixes that its KV blocks have no room for, such as 4GiB;
    none if not given. Used where reading them back is faster, as measured, than computing them."""
    kv_disk_dir: NonEmpty | None = None
    """Folder for such prefixes, on a local disk: one for each worker, which survives its restart.
    With baton serve, each worker gets a folder in it. Needs --kv-disk-bytes."""
    kv_disk_bytes: ByteSize | None = None
    """Maximum size of each worker's --kv-disk-dir."""
    kv_store_url: RegistryUrl | None = Field(default=None, json_schema_extra=PRIVATE)
    """Redis in which workers of one model share such prefixes, redis://host:port/db; its maxmemory
    bounds them. Set --kv-secret-file if others can write there."""

    @property
    def has_kv_tiers(self) -> bool:
        """Whether any tier is given."""
        return bool(self.kv_host_bytes or self.kv_disk_dir or self.kv_store_url)

    @model_validator(mode="after")
    def _check_disk(self) -> Self:
        if (self.kv_disk_dir is None) != (self.kv_disk_bytes is None):
            raise ValueError(
                f"--kv-disk-dir={self.kv_disk_dir}: goes with --kv-disk-bytes; give both or neither"
            )
        return self
