"""The options of gateways."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

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
    Names,
    NonEmpty,
    Port,
    Seconds,
)
from baton.config.named_models import SeveralModelsOptions
from baton.config.options import (
    LivenessOptions,
    NumericsOptions,
    RegistryOptions,
    ServiceOptions,
)
from baton.rpc.tls import TlsFiles
from baton.types import DEFAULT_MAX_PREFIXES, DEFAULT_MAX_WHITESPACE

#: vLLM's.
_HTTP_PORT = 8000


class FrontDoorOptions(ServiceOptions, SeveralModelsOptions):
    """How the gateway treats requests, and where they come from."""

    own_options: ClassVar[frozenset[str]] = SeveralModelsOptions.own_options | {
        *("tokenizer", "generation_config", "tool_call_parser", "reasoning_parser")
    }

    host: NonEmpty = "127.0.0.1"
    """Address that the gateway listens on."""
    port: Port = 50051
    """Port that the gateway listens on for gRPC; 0 takes a free one."""

    tokenizer: NonEmpty | None = None
    """Directory or Hub id of the tokenizer; MODEL's own if not given."""
    generation_config: Literal["auto", "none"] = "auto"
    """Where a request's sampling options come from if it leaves them out. auto: temperature, top_k,
    top_p, min_p, repetition_penalty and max_new_tokens of the generation_config.json beside the
    tokenizer. none: the documented defaults."""
    max_queue_size: Count = 1024
    """Most requests that wait for workers; further ones are refused, with when to try again."""
    max_remembered_prefixes: Count = DEFAULT_MAX_PREFIXES
    """Most prefixes of prompts and answers that are remembered, of each model, to send what begins
    alike to the same workers. About three are new with a new request of some hundred tokens, and
    each takes some 215 bytes."""
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
    enable_http: bool = True
    """Serve OpenAI's HTTP API, too, on --host and --http-port."""
    http_port: Port | None = None
    """Port of OpenAI's HTTP API; 8000 if not given, or a free one where --port is 0. 0 takes a free
    one."""
    tool_call_parser: Literal[
        "auto",
        "none",
        "hermes",
        "llama3_json",
        "mistral",
        "deepseek_v3",
        "kimi_k2",
        "glm45",
        "qwen3_coder",
    ] = "auto"
    """How the model writes calls of tools, for the HTTP API; auto goes by its chat template."""
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1", "openai_gptoss"] = "auto"
    """Whether the model thinks before it answers, for the HTTP API. qwen3: where it says <think>,
    or the prompt ends with that. deepseek_r1: always. openai_gptoss: harmony's messages, calls of
    tools among them. auto goes by its chat template."""
    enable_openengine: bool = False
    """Serve OpenEngine's protocol (openengine.v1), too, on --port: what routers such as Dynamo's
    use engines by."""
    allowed_origins: Names = ()
    """Origins, such as https://example.org, whose web pages may call the HTTP API from a browser;
    * for all."""
    api_key: ApiKeys = Field(default=(), json_schema_extra=SECRET)
    """Key that clients must show; repeat the option or separate with commas for several. Better
    given as BATON_API_KEY or by --api-key-file: a command line can be read by others."""
    api_key_file: NonEmpty | None = None
    """File of further keys that clients may show, one per line; after a key, and a space, weight=3
    gives it three times the share of the queue."""

    @property
    def bound_http_port(self) -> int | None:
        """Where HTTP listens, 0 for any free port; None for nowhere."""
        if not self.enable_http:
            return None
        default = _HTTP_PORT if self.port else 0
        return default if self.http_port is None else self.http_port

    @property
    def requires_client_cert(self) -> bool:
        """Whether a client without a certificate is refused."""
        return (self.ssl_cert_reqs or ("required" if self.ssl_ca_certs else "none")) == "required"

    @model_validator(mode="after")
    def _check_exposed(self) -> Self:
        has_keys = bool(self.api_key or self.api_key_file)
        if not (has_keys or self.requires_client_cert):
            what = "send requests at your cost"
            self._refuse_exposed("host", self.host, what, "--api-key-file, or --ssl-ca-certs")
        self._refuse_exposed_metrics(self.host)
        return self

    @model_validator(mode="after")
    def _check_client_certs(self) -> Self:
        if self.ssl_ca_certs is None and self.requires_client_cert:
            raise ValueError("--ssl-cert-reqs=required: goes with --ssl-ca-certs; give both")
        return self


class GatewayOptions(
    FrontDoorOptions,
    RegistryOptions,
    LivenessOptions,
    NumericsOptions,
):
    """Options of `baton gateway`."""

    reuse_port: bool = False
    """Share the ports with other gateways that have this option: the kernel spreads connections
    over them."""
    prefill_workers: Addresses = ()
    """Addresses of prefill workers, host:port; repeat the option or separate with commas."""
    decode_workers: Addresses = ()
    """Addresses of decode workers, host:port; repeat the option or separate with commas."""
    workers_fd: FileDescriptor | None = Field(default=None, json_schema_extra=HIDDEN)
    """File descriptor to read addresses of workers from, a JSON object a line, until its end of
    file."""

    _also_needed_for_tls: ClassVar[tuple[str, ...]] = ()

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
