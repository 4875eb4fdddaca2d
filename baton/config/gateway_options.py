"""The options of gateways."""

from __future__ import annotations

from typing import ClassVar, Self

from pydantic import Field, model_validator

from baton.config.fields import (
    HIDDEN,
    SECRET,
    Addresses,
    ApiKeys,
    CertReqs,
    Count,
    FileDescriptor,
    JsonWhitespace,
    NonEmpty,
    Port,
    Seconds,
)
from baton.config.options import (
    LivenessOptions,
    ModelOptions,
    NumericsOptions,
    RegistryOptions,
    ServiceOptions,
    TlsOptions,
)
from baton.rpc.tls import TlsFiles
from baton.types import DEFAULT_MAX_WHITESPACE


class FrontDoorOptions(TlsOptions):
    """How the gateway treats requests."""

    tokenizer: NonEmpty | None = None
    """Directory or Hub id of the tokenizer; MODEL's own if not given."""
    max_queue_size: Count = 1024
    """Most requests that wait for workers; further ones are refused, with when to try again."""
    request_timeout_s: Seconds = 600.0
    """Deadline, in seconds, of requests that come without one."""
    client_stall_timeout_s: Seconds = 30.0
    """Time, in seconds, that a client may leave a piece unread before its request is ended."""
    max_json_whitespace: JsonWhitespace = DEFAULT_MAX_WHITESPACE
    """Most white-space characters between two parts of a JSON document that a request asks for; 0
    writes it without any."""
    ssl_cert_reqs: CertReqs | None = None
    """Whether clients of the gateway must show a certificate that comes from --ssl-ca-certs;
    required if not given and that is. 0 and 2 say it, too."""
    api_key: ApiKeys = Field(default=(), json_schema_extra=SECRET)
    """Key that clients must show; repeat the option or separate with commas for several. Better
    given as BATON_API_KEY or by --api-key-file: a command line can be read by others."""
    api_key_file: NonEmpty | None = None
    """File of further keys that clients may show, one per line."""

    @property
    def requires_client_cert(self) -> bool:
        """Whether a client without a certificate is refused."""
        return (self.ssl_cert_reqs or ("required" if self.ssl_ca_certs else "none")) == "required"

    @model_validator(mode="after")
    def _check_client_certs(self) -> Self:
        if self.ssl_ca_certs is None and self.requires_client_cert:
            raise ValueError("--ssl-cert-reqs=required: goes with --ssl-ca-certs; give both")
        return self


class GatewayOptions(
    ModelOptions,
    FrontDoorOptions,
    RegistryOptions,
    LivenessOptions,
    NumericsOptions,
    ServiceOptions,
):
    """Options of `baton gateway`."""

    host: NonEmpty = "127.0.0.1"
    """Address to listen on."""
    port: Port = 50051
    """Port to listen on; 0 takes a free one."""
    reuse_port: bool = False
    """Share the port with other gateways that have this option: the kernel spreads connections over
    them."""
    prefill_workers: Addresses = ()
    """Addresses of prefill workers, host:port; repeat the option or separate with commas."""
    decode_workers: Addresses = ()
    """Addresses of decode workers, host:port; repeat the option or separate with commas."""
    workers_fd: FileDescriptor | None = Field(default=None, json_schema_extra=HIDDEN)
    """File descriptor to read addresses of workers from, a JSON object a line, until its end of
    file."""

    _also_needed_for_tls: ClassVar[tuple[str, ...]] = ()

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer or self.model

    @property
    def worker_tls(self) -> TlsFiles | None:
        """How workers are called; None for plain text."""
        if self.tls is None or self.ssl_ca_certs is None:
            return None
        return self.tls

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        both = sorted(set(self.prefill_workers) & set(self.decode_workers))
        if both:
            raise ValueError(
                f"--decode-workers={both[0]}: is in --prefill-workers, too; a worker has one tier: "
                "leave it out of one of them"
            )
        return self
