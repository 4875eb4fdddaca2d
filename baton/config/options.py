"""Options of every process and their base class, spelled as vLLM's where it has them.

A field defines an option completely: its name gives the flag, the environment variable and the YAML
key; its type and bounds the validation; its docstring the help text. Constructing a class reads
nothing but its arguments.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from baton.config.fields import (
    HIDDEN,
    PRIVATE,
    FileDescriptor,
    LogLevel,
    Milliseconds,
    NonEmpty,
    Port,
    RegistryUrl,
    Seconds,
)
from baton.rpc.tls import TlsFiles
from baton.types import Slo


def is_loopback(host: str) -> bool:
    """Whether only this machine can connect to the host, judged by its name."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Options(BaseModel):
    """Base class: frozen, rejects unknown names. Only baton.config.load reads environment and
    files."""

    model_config = ConfigDict(
        defer_build=True,
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        validate_default=False,
    )


class TlsOptions(Options):
    """TLS of every gRPC port and channel; plain text by default. Files are read at start."""

    ssl_certfile: NonEmpty | None = None
    """PEM file of this process's certificate, for its port and for calls to workers. Needs
    --ssl-keyfile."""
    ssl_keyfile: NonEmpty | None = None
    """PEM file of the private key of --ssl-certfile, without a password."""
    ssl_ca_certs: NonEmpty | None = None
    """PEM file of the CA certificates that sign peers' certificates. Required for workers with
    --ssl-certfile, which accept only clients with such a certificate."""

    ssl_server_name: NonEmpty | None = None
    """Server name in workers' certificates, if it is not the host of their addresses."""

    @property
    def tls(self) -> TlsFiles | None:
        """TLS files of this process; None for plain text."""
        if not (self.ssl_certfile or self.ssl_keyfile or self.ssl_ca_certs):
            return None
        return TlsFiles(
            self.ssl_ca_certs or "",
            self.ssl_certfile or "",
            self.ssl_keyfile or "",
            self.ssl_server_name or "",
        )

    @model_validator(mode="after")
    def _check_tls(self) -> Self:
        names = ("ssl_certfile", "ssl_keyfile", *self._also_needed_for_tls)
        lacking = [name for name in names if getattr(self, name) is None]
        if self.ssl_server_name is not None and self.ssl_ca_certs is None:
            raise ValueError("--ssl-server-name: goes with --ssl-ca-certs; give both or neither")
        if self.tls and lacking:
            flags = ["--" + name.replace("_", "-") for name in (*names, *lacking[:1])]
            raise ValueError(f"{flags[-1]} is missing: give all of {', '.join(flags[:-1])}")
        return self

    _also_needed_for_tls: ClassVar[tuple[str, ...]] = ("ssl_ca_certs",)


class LivenessOptions(Options):
    """Failure detection."""

    worker_stall_timeout_s: Annotated[float, Field(ge=1)] = 1.5
    """Seconds without a message after which a worker is considered lost and its work moves
    elsewhere. Workers with longer steps extend it themselves."""


class NumericsOptions(Options):
    """Handling of workers with different rounding."""

    numerics: Literal["mixed", "strict"] = "mixed"
    """Whether workers of different numerics classes (device and CPU level, dtype, kernel version)
    may work on one sequence. mixed: allowed, with a warning. strict: each sequence stays within one
    class, and a worker without a partner of its class is refused."""


class ServiceOptions(TlsOptions):
    """Options of every process."""

    insecure: bool = False
    """Allow listening beyond this machine without authentication (TLS, API keys or KV secret) or
    with a metrics port. Only for networks that are isolated otherwise."""
    log_level: LogLevel = "info"
    """Minimum severity of log messages."""
    drain_timeout_s: Seconds = 60.0
    """Seconds for running requests to finish when the process stops."""
    metrics_port: Port = 0
    """Port of the Prometheus exporter, on --host; 0 for none. With baton serve, the first of
    consecutive ports: gateways, prefill workers, decode workers."""
    metrics_compat: Literal["none", "vllm"] = "none"
    """vllm: also publish metrics under vLLM's names, for existing dashboards."""
    ready_fd: FileDescriptor | None = Field(default=None, json_schema_extra=HIDDEN)
    """File descriptor to which one JSON line is written when the process is ready or failed to
    start."""
    parent_fd: FileDescriptor | None = Field(default=None, json_schema_extra=HIDDEN)
    """File descriptor of a pipe from the supervisor; the process stops at its end of file."""

    def _refuse_exposed(self, option: str, host: str, what: str, fix: str) -> None:
        """Raises ValueError for a host that is reachable from other machines without
        authentication, unless --insecure is set."""
        if not (self.insecure or is_loopback(host)):
            raise ValueError(
                f"--{option}={host}: whoever reaches this address could {what}; give {fix}, or "
                "--insecure where the network keeps strangers out, or --"
                f"{option}=127.0.0.1"
            )

    def _refuse_exposed_metrics(self, host: str) -> None:
        if self.metrics_port:
            what = f"read metrics on --metrics-port={self.metrics_port}, which no key guards"
            self._refuse_exposed("host", host, what, "--metrics-port=0")


class SloOptions(Options):
    """Latency targets of a deployment. Without them, a compromise is kept."""

    slo_ttft_ms: Milliseconds | None = None
    """Target of the time to first token."""
    slo_tpot_ms: Milliseconds | None = None
    """Target of the mean time between the tokens of an answer. Workers that decode compute as much
    of waiting prompts in each step as this leaves time for."""

    @property
    def slo(self) -> Slo:
        """Both targets."""
        ttft_ms, tpot_ms = self.slo_ttft_ms, self.slo_tpot_ms
        return Slo(
            None if ttft_ms is None else ttft_ms / 1e3, None if tpot_ms is None else tpot_ms / 1e3
        )


class RegistryOptions(Options):
    """Discovery of workers by gateways."""

    registry: RegistryUrl | None = Field(default=None, json_schema_extra=PRIVATE)
    """Redis through which gateways discover workers, redis://host:port/db; not needed if worker
    addresses are given."""


class ModelOptions(Options):
    """The model."""

    model: NonEmpty
    """Model to serve: a local directory, or a Hugging Face Hub id."""
    revision: NonEmpty | None = None
    """Branch, tag or commit of the Hub id."""
    served_model_name: NonEmpty | None = None
    """Model name in requests; MODEL itself if not given."""

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model
