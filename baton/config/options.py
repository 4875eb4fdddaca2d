"""The options of every command, each spelled as vLLM spells it where vLLM has it: their base, and
those of every process.

A field is all there is to an option: its name gives the flag, the environment variable and the YAML
key, its type and bounds the check, its docstring the help text. Constructing a class reads nothing
but its arguments.
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
    NonEmpty,
    Port,
    RegistryUrl,
    Seconds,
)
from baton.rpc.tls import TlsFiles


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches who listens there, as far as the name says."""
    if host == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class Options(BaseModel):
    """Base of all: frozen, and closed to unknown names. Environment and files are read by
    baton.config.load only."""

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
    """TLS of every gRPC port and channel; plain text if nothing is given. Files are read when the
    process starts."""

    ssl_certfile: NonEmpty | None = None
    """PEM file of this process's certificate, for its port, and for workers that it calls. Needs
    --ssl-keyfile."""
    ssl_keyfile: NonEmpty | None = None
    """PEM file of the private key of --ssl-certfile, without a password."""
    ssl_ca_certs: NonEmpty | None = None
    """PEM file of the certificates that those of peers must come from. Workers need it with
    --ssl-certfile: they answer only to who shows such a certificate."""

    ssl_server_name: NonEmpty | None = None
    """Name that certificates of workers are made out to, where it is not the host of their
    addresses."""

    @property
    def tls(self) -> TlsFiles | None:
        """This process's files; None for plain text."""
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
    """When a worker is given up."""

    worker_stall_timeout_s: Annotated[float, Field(ge=1)] = 1.5
    """Silence of a worker, in seconds, after which its work is placed elsewhere. One whose steps
    take longer allows itself more."""


class NumericsOptions(Options):
    """What becomes of workers that round differently."""

    numerics: Literal["mixed", "strict"] = "mixed"
    """Whether workers of different numerics classes (device and CPU level, dtype, kernel version)
    may work on one sequence. mixed: they may, and a warning says so. strict: each sequence stays
    within one class, and a worker that no other of its class can work with is refused."""


class ServiceOptions(TlsOptions):
    """What every process has."""

    insecure: bool = False
    """Listen beyond this machine although nothing says who may call: without TLS, keys or a KV
    secret where they belong, and with a metrics port. For networks that keep strangers out
    themselves."""
    log_level: LogLevel = "info"
    """Least severe messages to log."""
    drain_timeout_s: Seconds = 60.0
    """Time, in seconds, that running requests have to end when the process is stopped."""
    metrics_port: Port = 0
    """Port of the Prometheus exporter, on --host; 0 for none. With baton serve, the first of
    consecutive ports: gateways, prefill workers, decode workers."""
    metrics_compat: Literal["none", "vllm"] = "none"
    """vllm: publish metrics on that port under vLLM's names, too, so that boards made for it
    work."""
    ready_fd: FileDescriptor | None = Field(default=None, json_schema_extra=HIDDEN)
    """File descriptor to write one JSON line to when the process is ready or cannot start."""
    parent_fd: FileDescriptor | None = Field(default=None, json_schema_extra=HIDDEN)
    """File descriptor of a pipe whose end of file means that the supervisor is gone: the process
    stops then."""

    def _refuse_exposed(self, option: str, host: str, what: str, fix: str) -> None:
        """Raises ValueError for a host that strangers may reach, unless --insecure says that this
        is meant."""
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


class RegistryOptions(Options):
    """Where workers and gateways find each other."""

    registry: RegistryUrl | None = Field(default=None, json_schema_extra=PRIVATE)
    """Redis by which gateways find workers, redis://host:port/db; not needed where their addresses
    are given."""


class ModelOptions(Options):
    """Which model."""

    model: NonEmpty
    """Model to serve: a local directory, or a Hugging Face Hub id."""
    revision: NonEmpty | None = None
    """Branch, tag or commit of the Hub id."""
    served_model_name: NonEmpty | None = None
    """Name that requests call the model by; MODEL itself if not given."""

    @property
    def model_name(self) -> str:
        return self.served_model_name or self.model
