"""Options of prefill workers, and those common to all workers."""

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
    Count,
    NonEmpty,
    PeerNames,
    Port,
    Seconds,
    Transport,
)
from baton.config.kv_tier_options import KvTierOptions
from baton.config.options import (
    LivenessOptions,
    NumericsOptions,
    Options,
    RegistryOptions,
    ServiceOptions,
    SloOptions,
    TlsOptions,
)
from baton.kv_transports import AUTO, REMOTE
from baton.types import Tier

#: Hosts that listen on all interfaces and are not addresses to connect to.
_ALL_ADDRESSES = frozenset({"0.0.0.0", "[::]", "::"})

_TRANSPORT_HELP = (
    "How KV travels between workers; auto takes the first of these that both have. "
    + "; ".join(f"{each.name}: {each.summary}" for each in REMOTE)
    + "."
)


class PeerOptions(TlsOptions):
    """Which peers a worker accepts."""

    ssl_peer_names: PeerNames = ()
    """Accepted DNS names or URIs (subjectAltName) in certificates of gateways and other workers;
    repeat the option or separate with commas for several. If not given, any certificate signed by
    --ssl-ca-certs is accepted."""

    @model_validator(mode="after")
    def _check_peer_names(self) -> Self:
        if self.ssl_peer_names and self.ssl_ca_certs is None:
            raise ValueError("--ssl-peer-names: goes with --ssl-ca-certs; give both")
        return self


class HandoffOptions(Options):
    """KV transfer between workers."""

    kv_transport: Annotated[Transport, Field(description=_TRANSPORT_HELP)] = AUTO
    kv_num_lanes: Annotated[int, Field(ge=1, le=16)] = 1
    """Maximum connections from one worker to another, shared by concurrent transfers. One is enough
    if a single stream saturates the network."""
    ticket_lease_s: Seconds = 30.0
    """Seconds without a message from a sender after which its KV reservation expires."""
    ticket_offer_s: Seconds = 10.0
    """Seconds that a KV reservation waits for its sender to connect. A sender connects when it
    receives a prompt, before it computes it."""
    kv_secret_file: NonEmpty | None = None
    """File of a secret shared by all workers, for example from openssl rand -hex 32: KV transfers
    require it, and are authenticated with it."""
    kv_secret: SecretStr | None = Field(default=None, json_schema_extra={**HIDDEN, **SECRET})
    """The secret itself, instead of its file."""


class SchedulingOptions(Options):
    """Scheduling of steps."""

    async_scheduling: bool | None = None
    """Launch a step before processing the results of the previous one, so that the device never
    idles in between. Default: on for GPUs, except decode workers with speculation; those need
    --speculative-method none."""


class NodeOptions(Options):
    """Several hosts that run one worker. Under torchrun --nproc-per-node 1 its environment gives
    these options, with the port after its own."""

    nnodes: Count = 1
    """Hosts that run this worker, each with an equal number of its processes. All get the same
    command, with another --node-rank."""
    node_rank: Annotated[int, Field(ge=0)] = 0
    """Number of this host: 0 serves, the others compute with it."""
    master_addr: NonEmpty = "127.0.0.1"
    """Address of host 0, at which it awaits the others."""
    master_port: Port = 29500
    """Port of host 0, for the others."""
    nodes_timeout_s: Seconds = 300.0
    """Seconds that hosts wait for each other at the start."""

    @model_validator(mode="after")
    def _check_nodes(self) -> Self:
        if self.node_rank >= self.nnodes:
            raise ValueError(
                f"--node-rank={self.node_rank}: --nnodes={self.nnodes} counts hosts from 0; give "
                f"at most {self.nnodes - 1}"
            )
        return self


class WorkerOptions(
    NodeOptions,
    EngineOptions,
    SchedulingOptions,
    KvTierOptions,
    HandoffOptions,
    RegistryOptions,
    LivenessOptions,
    NumericsOptions,
    PeerOptions,
    ServiceOptions,
    SloOptions,
):
    """Options of a worker of either tier."""

    tier: ClassVar[Tier]

    host: NonEmpty = "127.0.0.1"
    """Address to listen on."""
    port: Port = 0
    """Port to listen on; 0 takes a free one."""
    worker_id: NonEmpty | None = None
    """Worker name, unique among all; tier-hostname-pid if not given."""
    kv_host: NonEmpty = "127.0.0.1"
    """Address that the KV channel listens on; also the address for other workers if
    --kv-advertise-address is not given."""
    kv_port: Port = 0
    """Port of the KV channel over TCP; 0 takes a free one."""
    kv_advertise_address: Address | None = None
    """Address, host:port, at which other workers reach this KV channel, if a NAT or proxy stands
    before --kv-host and --kv-port."""
    advertise_host: NonEmpty | None = None
    """Host published in the registry; if not given, --host, or this machine's name if that is
    0.0.0.0."""

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
        """advertise_host, or its default."""
        fallback = socket.gethostname() if self.host in _ALL_ADDRESSES else self.host
        return self.advertise_host or fallback


class PrefillTierOptions(Options):
    """How prefill workers compute prompts."""

    context_parallel_size: Count = 1
    """Processes that share the tokens of a long prompt, each with the whole model or, with
    --tensor-parallel-size, a group of so many with a part each; in prefill workers only."""


class PrefillOptions(WorkerOptions, PrefillTierOptions):
    """Options of `baton prefill`."""

    tier: ClassVar[Tier] = Tier.PREFILL
