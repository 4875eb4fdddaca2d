"""Options of gateways."""

from __future__ import annotations

from typing import ClassVar, Literal, Self

from pydantic import Field, model_validator

from baton.config.fields import (
    HIDDEN,
    SECRET,
    Addresses,
    ApiKeys,
    ByteSize,
    CertReqs,
    Count,
    FileDescriptor,
    JsonWhitespace,
    MaxLogprobs,
    Names,
    NonEmpty,
    Port,
    Seconds,
    SloClasses,
)
from baton.config.named_models import SeveralModelsOptions
from baton.config.options import (
    LivenessOptions,
    NumericsOptions,
    RegistryOptions,
    ServiceOptions,
    SloOptions,
)
from baton.rpc.tls import TlsFiles
from baton.sampling_params import MAX_LOGPROBS
from baton.types import DEFAULT_MAX_PREFIXES, DEFAULT_MAX_WHITESPACE, NO_SLO, Slo

#: vLLM's default port.
_HTTP_PORT = 8000


class FrontDoorOptions(ServiceOptions, SloOptions, SeveralModelsOptions):
    """Options for clients and their requests."""

    own_options: ClassVar[frozenset[str]] = SeveralModelsOptions.own_options | {
        *("tokenizer", "generation_config", "chat_template"),
        *("tool_call_parser", "reasoning_parser"),
        *("min_workers", "max_workers"),
    }

    host: NonEmpty = "127.0.0.1"
    """Address to listen on."""
    port: Port = 50051
    """gRPC port; 0 takes a free one."""

    tokenizer: NonEmpty | None = None
    """Directory, GGUF file or Hub id of the tokenizer; MODEL's own if not given."""
    chat_template: NonEmpty | None = None
    """File with the chat template, in Jinja; that beside the tokenizer if not given."""
    generation_config: Literal["auto", "none"] = "auto"
    """Default sampling options of requests. auto: temperature, top_k, top_p, min_p,
    repetition_penalty and max_new_tokens of the generation_config.json beside the tokenizer. none:
    the documented defaults."""
    max_queue_size: Count = 1024
    """Maximum requests waiting for workers; further ones are refused with a retry time."""
    planner: Literal["on", "off"] = "off"
    """Whether the gateway changes the roles of workers between prefill, decode and colocated, by
    the load and the latency targets; needs --slo-ttft-ms or --slo-tpot-ms. Of several gateways with
    one --registry, one plans at a time."""
    max_workers: Count | None = None
    """With --planner=on: also say how many workers there should be, up to this number, by metric
    (baton_planner_workers_wanted); `baton serve` starts and drains them. If not given, their number
    is left alone. With several models, of each."""
    min_workers: Count | None = None
    """Least number of workers with --max-workers; 1 if not given."""
    slo_classes: SloClasses = ()
    """Classes of requests with latency targets of their own, such as interactive=300:30 or
    batch=30000:; repeat the option or separate with commas. A target that is left out is the
    deployment's. A request names its class (slo_class), or the line of its key in --api-key-file
    does (class=NAME); others have the deployment's targets."""
    max_remembered_prefixes: Count = DEFAULT_MAX_PREFIXES
    """Maximum prefixes of prompts and answers remembered per model, to route requests to workers
    that cache them. A request of some hundred tokens adds about three, of about 215 bytes each."""
    request_timeout_s: Seconds = 600.0
    """Deadline, in seconds, of requests without one."""
    client_stall_timeout_s: Seconds = 30.0
    """Seconds that a client may leave output unread before its request is cancelled."""
    max_logprobs: MaxLogprobs = MAX_LOGPROBS
    """Maximum log probabilities that a request may ask for per position; -1 for the whole
    vocabulary."""
    max_json_whitespace: JsonWhitespace = DEFAULT_MAX_WHITESPACE
    """Maximum consecutive white-space characters in the output of a JSON request; 0 allows none."""
    ssl_cert_reqs: CertReqs | None = None
    """Whether gateway clients must present a certificate signed by --ssl-ca-certs; required by
    default if that is given. Also accepts 0 (none) and 2 (required)."""
    enable_http: bool = True
    """Serve OpenAI's HTTP API on --host and --http-port."""
    http_port: Port | None = None
    """Port of the HTTP API; 8000 if not given, or a free one if --port is 0. 0 takes a free one."""
    root_path: NonEmpty | None = None
    """Prefix that paths of HTTP requests may have, such as /llm, where a proxy in front does not
    take it off."""
    enable_per_request_metrics: bool = False
    """Give answers of the HTTP API `metrics`, as vLLM does: milliseconds by phase, and tokens per
    second."""
    response_store_bytes: ByteSize | None = None
    """Keep answers of /v1/responses in the gateway's memory, up to so many bytes, for
    previous_response_id, background and their own paths; nothing is kept if not given."""
    response_store_s: Seconds = 3600.0
    """Seconds that such an answer is kept."""
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
    """Format of the model's tool calls, for the HTTP API; auto detects it from the chat
    template."""
    reasoning_parser: Literal["auto", "none", "qwen3", "deepseek_r1", "openai_gptoss"] = "auto"
    """Format of the model's reasoning, for the HTTP API. qwen3: after <think> in the output or at
    the end of the prompt. deepseek_r1: every output begins with it. openai_gptoss: harmony,
    including tool calls. auto detects it from the chat template."""
    enable_openengine: bool = False
    """Serve OpenEngine's protocol (openengine.v1) on --port, for routers such as Dynamo."""
    allowed_origins: Names = ()
    """Web origins, such as https://example.org, from which browsers may call the HTTP API; * for
    all."""
    api_key: ApiKeys = Field(default=(), json_schema_extra=SECRET)
    """API key accepted from clients; repeat the option or separate with commas for several. Prefer
    BATON_API_KEY or --api-key-file, because other users can read command lines."""
    api_key_file: NonEmpty | None = None
    """File of further API keys, one per line; an optional weight=3 after a key and a space gives it
    three times the share of the queue, and class=NAME one of --slo-classes."""

    @model_validator(mode="after")
    def _check_planner(self) -> Self:
        if self.planner == "on" and self.slo == NO_SLO:
            raise ValueError(
                "--planner=on: has no target to plan for; give --slo-ttft-ms or --slo-tpot-ms"
            )
        return self

    @model_validator(mode="after")
    def _check_number(self) -> Self:
        least, most = self.min_workers, self.max_workers
        if most is None:
            if least is not None:
                raise ValueError(f"--min-workers={least}: goes with --max-workers; give both")
            return self
        if self.planner != "on":
            raise ValueError(f"--max-workers={most}: goes with --planner=on; give both")
        if least is not None and least > most:
            raise ValueError(f"--min-workers={least}: is above --max-workers={most}; give less")
        return self

    @property
    def slo_by_class(self) -> dict[str, Slo]:
        """Targets of each class; what it leaves out is the deployment's."""
        classes = {}
        for each in self.slo_classes:
            name, _, targets = each.partition("=")
            ttft_ms, tpot_ms = (float(part or 0) for part in targets.split(":"))
            classes[name] = Slo(ttft_ms / 1e3 or self.slo.ttft_s, tpot_ms / 1e3 or self.slo.tpot_s)
        return classes

    @model_validator(mode="after")
    def _check_slo_classes(self) -> Self:
        # Requests without a target would wait for ever behind those that have one.
        for name, slo in self.slo_by_class.items():
            pairs = ((slo.ttft_s, self.slo_ttft_ms), (slo.tpot_s, self.slo_tpot_ms))
            for option, (own, of_all) in zip(("ttft", "tpot"), pairs, strict=True):
                if own is not None and of_all is None:
                    raise ValueError(
                        f"--slo-classes={name}: has a target that other requests do not have; give "
                        f"--slo-{option}-ms for these"
                    )
        return self

    @property
    def bound_http_port(self) -> int | None:
        """HTTP port to bind, 0 for any free one; None without HTTP."""
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
    """Share the ports with other gateways that set this option: the kernel distributes
    connections."""
    prefill_workers: Addresses = ()
    """Addresses of prefill workers, host:port; repeat the option or separate with commas."""
    decode_workers: Addresses = ()
    """Addresses of decode workers, host:port; repeat the option or separate with commas."""
    workers_fd: FileDescriptor | None = Field(default=None, json_schema_extra=HIDDEN)
    """File descriptor to read worker addresses from, as JSON lines until end of file."""
    number_fd: FileDescriptor | None = Field(default=None, json_schema_extra=HIDDEN)
    """File descriptor to write numbers of wanted workers to, one a line."""
    refused_models: Names = Field(default=(), json_schema_extra=HIDDEN)
    """Names of models to leave out, because their workers did not start."""

    _also_needed_for_tls: ClassVar[tuple[str, ...]] = ()

    def each_model(self) -> tuple[Self, ...]:
        """The options of each model that is served."""
        models = super().each_model()
        return tuple(each for each in models if each.model_name not in self.refused_models)

    @property
    def worker_tls(self) -> TlsFiles | None:
        """TLS for calls to workers; None for plain text."""
        if self.tls is None or self.ssl_ca_certs is None:
            return None
        return self.tls

    @model_validator(mode="after")
    def _check_store(self) -> Self:
        if self.response_store_bytes and self.reuse_port:
            raise ValueError(
                "--response-store-bytes: goes without --reuse-port and several gateways on one "
                "port, for each keeps its own answers; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _check_tiers(self) -> Self:
        both = sorted(set(self.prefill_workers) & set(self.decode_workers))
        if both:
            raise ValueError(
                f"--decode-workers={both[0]}: is in --prefill-workers, too; a worker has one tier: "
                "leave it out of one of them"
            )
        return self
