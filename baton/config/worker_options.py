"""The options of prefill workers, and what decode workers have in common with them."""

from __future__ import annotations

import os
import socket
from typing import Annotated, ClassVar, Self

from pydantic import Field, SecretStr, model_validator

from baton.config.engine_options import EngineOptions
from baton.config.fields import (
    HIDDEN,
    SECRET,
    Address,
    NonEmpty,
    PeerNames,
    Port,
    Seconds,
    Transport,
)
from baton.config.options import (
    LivenessOptions,
    NumericsOptions,
    Options,
    RegistryOptions,
    ServiceOptions,
    TlsOptions,
)
from baton.kv_transports import AUTO, REMOTE
from baton.types import Tier

#: Hosts to listen on that nobody can connect to from elsewhere.
_ALL_ADDRESSES = frozenset({"0.0.0.0", "[::]", "::"})

_TRANSPORT_HELP = (
    "How KV travels between workers; auto takes the first of these that both have. "
    + "; ".join(f"{each.name}: {each.summary}" for each in REMOTE)
    + "."
)


class PeerOptions(TlsOptions):
    """Whom workers work with."""

    ssl_peer_names: PeerNames = ()
    """Name that certificates of gateways and of other workers carry, as DNS name or URI of
    subjectAltName; repeat the option or separate with commas for several. Who shows none of them is
    refused; if none is given, every certificate that comes from --ssl-ca-certs will do."""

    @model_validator(mode="after")
    def _check_peer_names(self) -> Self:
        if self.ssl_peer_names and self.ssl_ca_certs is None:
            raise ValueError("--ssl-peer-names: goes with --ssl-ca-certs; give both")
        return self


class HandoffOptions(Options):
    """How workers pass sequences on."""

    kv_transport: Annotated[Transport, Field(description=_TRANSPORT_HELP)] = AUTO
    kv_num_lanes: Annotated[int, Field(ge=1, le=16)] = 1
    """Most connections from one worker to another. Handoffs that are under way at the same time
    share them out: one connection is enough where one stream fills the network."""
    ticket_lease_s: Seconds = 30.0
    """Silence of a sender, in seconds, after which its reservation is given up."""
    ticket_offer_s: Seconds = 10.0
    """How long a reservation waits for its sender to come, in seconds. A sender comes when it is
    given a prompt, not when the prompt's turn has come."""
    kv_secret_file: NonEmpty | None = None
    """File of a secret that all workers share, such as openssl rand -hex 32 makes: KV goes only
    between workers that have it, and carries digests under it."""
    kv_secret: SecretStr | None = Field(default=None, json_schema_extra={**HIDDEN, **SECRET})
    """The secret itself, in place of its file."""


class SchedulingOptions(Options):
    """When workers launch steps."""

    async_scheduling: bool | None = None
    """Launch a step before the results of the one before are handed out, so that a device does not
    wait for that. If not given, on a GPU; on decode workers without drafts. There it goes with
    --speculative-method none."""


class WorkerOptions(
    EngineOptions,
    SchedulingOptions,
    HandoffOptions,
    RegistryOptions,
    LivenessOptions,
    NumericsOptions,
    PeerOptions,
    ServiceOptions,
):
    """What a worker of either tier takes."""

    tier: ClassVar[Tier]

    host: NonEmpty = "127.0.0.1"
    """Address to listen on."""
    port: Port = 0
    """Port to listen on; 0 takes a free one."""
    worker_id: NonEmpty | None = None
    """Name of the worker, unique among all; tier-hostname-pid if not given."""
    kv_host: NonEmpty = "127.0.0.1"
    """Address that this worker's KV channel listens on, and under which other workers reach it if
    --kv-advertise-address is not given."""
    kv_port: Port = 0
    """Port of the KV channel over TCP; 0 takes a free one."""
    kv_advertise_address: Address | None = None
    """Address, host:port, under which other workers reach this one's KV channel, where a NAT or a
    proxy stands before --kv-host and --kv-port."""
    advertise_host: NonEmpty | None = None
    """Host that the registry names this worker by; if not given, --host, or for 0.0.0.0 this
    machine's name."""

    @model_validator(mode="after")
    def _check_exposed(self) -> Self:
        if self.tls is None:
            what = "have prompts computed, drain the worker and read what it does"
            self._refuse_exposed("host", self.host, what, "--ssl-certfile and what goes with it")
        has_secret = self.kv_secret_file is not None or self.kv_secret is not None
        if not has_secret and self.tls is None:
            what = "hold up the KV channel, and write KV by a ticket"
            self._refuse_exposed("kv-host", self.kv_host, what, "--kv-secret-file, or --ssl-*")
        self._refuse_exposed_metrics(self.host)
        return self

    @property
    def worker_name(self) -> str:
        """worker_id, or the name of this process."""
        return self.worker_id or f"{self.tier.name.lower()}-{socket.gethostname()}-{os.getpid()}"

    @property
    def advertised_host(self) -> str:
        """advertise_host, or what stands in for it."""
        fallback = socket.gethostname() if self.host in _ALL_ADDRESSES else self.host
        return self.advertise_host or fallback


class PrefillOptions(WorkerOptions):
    """Options of `baton prefill`."""

    tier: ClassVar[Tier] = Tier.PREFILL
