"""The options of every command, each spelled as vLLM spells it where vLLM has it.

A field is all there is to an option: its name gives the flag, the environment variable and the YAML key, its type and
bounds the check, its docstring the help text. Constructing a class reads nothing but its arguments.
"""

from __future__ import annotations

import os
import re
import socket
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr, model_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from baton.config.byte_size import parse_byte_size
from baton.rpc.address import is_address
from baton.rpc.tls import TlsFiles
from baton.types import Tier

LogLevel = Literal["debug", "info", "warning", "error"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Transport = Literal["auto", "shm", "tcp", "nixl"]
KvDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8", "int8"]

NonEmpty = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Port = Annotated[int, Field(ge=0, le=65535)]
BlockSize = Annotated[int, Field(ge=1, le=256)]
Seconds = Annotated[float, Field(gt=0)]
ByteSize = Annotated[int, BeforeValidator(parse_byte_size), Field(ge=1)]
FileDescriptor = Annotated[int, Field(ge=0)]

#: Hosts to listen on that nobody can connect to from elsewhere.
_ALL_ADDRESSES = frozenset({"0.0.0.0", "[::]", "::"})

HIDDEN: dict[str, Any] = {"hidden": True}
#: Of a field that may have a password in it: it reaches other processes by their environment only.
PRIVATE: dict[str, Any] = {"private": True}
#: Of a field whose value is shown to nobody, besides.
SECRET: dict[str, Any] = {"secret": True, **PRIVATE}

#: As uvicorn and vLLM number them.
_CERT_REQS = {"0": "none", "2": "required"}


def _split_commas(value: object) -> object:
    """["a,b", "c"] or "a,b,c" as a list of its non-empty parts."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, list | tuple) and all(isinstance(part, str) for part in value):
        return [piece.strip() for part in value for piece in part.split(",") if piece.strip()]
    return value


def _check_address(address: str) -> str:
    if not is_address(address):
        raise ValueError(f"{address!r} is no address; give host:port, with an IPv6 host in []")
    return address


def _check_addresses(addresses: tuple[str, ...]) -> tuple[str, ...]:
    for address in addresses:
        _check_address(address)
    if len(set(addresses)) != len(addresses):
        raise ValueError("give each address once")
    return addresses


def _check_registry(url: str) -> str:
    if re.fullmatch(r"rediss?://[^\s/?#]+(/\d+)?", url, re.ASCII) is None:
        raise ValueError("give redis://host:port/db, special characters of a password as %XX")
    return url


def _check_api_keys(keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
    if not all(is_api_key(key.get_secret_value()) for key in keys):
        raise ValueError(API_KEY_FIX)
    return keys


def is_api_key(text: str) -> bool:
    """Whether a header can carry it, and a list with commas."""
    return re.fullmatch(r"[!-+\--~]+", text, re.ASCII) is not None


API_KEY_FIX = "give keys of printable ASCII, without spaces and commas"


def _cert_reqs(value: object) -> object:
    return _CERT_REQS.get(str(value), value)


def _check_device(device: str) -> str:
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device, re.ASCII) is None:
        raise ValueError("give auto, cpu, cuda or cuda:N")
    return device


#: Worker addresses, "host:port", given by repeating the option or with commas.
Addresses = Annotated[
    tuple[str, ...],
    NoDecode,
    BeforeValidator(_split_commas),
    AfterValidator(_check_addresses),
]


#: redis://[user:password@]host:port/db, or rediss:// for TLS.
RegistryUrl = Annotated[str, AfterValidator(_check_registry)]


#: Keys of callers, given by repeating the option or with commas.
ApiKeys = Annotated[
    tuple[SecretStr, ...],
    NoDecode,
    BeforeValidator(_split_commas),
    AfterValidator(_check_api_keys),
]

#: Names in certificates, given by repeating the option or with commas.
PeerNames = Annotated[tuple[NonEmpty, ...], NoDecode, BeforeValidator(_split_commas)]

CertReqs = Annotated[Literal["none", "required"], BeforeValidator(_cert_reqs)]


class Options(BaseSettings):
    """Base of all: frozen, and closed to unknown names. Environment and files are read by baton.config.load only."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix="BATON_",
        case_sensitive=False,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
        validate_default=False,
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return (init_settings,)


class TlsOptions(Options):
    """TLS of every gRPC port and channel; plain text if nothing is given. Files are read when the process starts."""

    ssl_certfile: NonEmpty | None = None
    """PEM file of this process's certificate, for its port, and for workers that it calls. Needs --ssl-keyfile."""
    ssl_keyfile: NonEmpty | None = None
    """PEM file of the private key of --ssl-certfile, without a password."""
    ssl_ca_certs: NonEmpty | None = None
    """PEM file of the certificates that those of peers must come from. Workers need it with --ssl-certfile: they answer only
    to who shows such a certificate."""

    ssl_server_name: NonEmpty | None = None
    """Name that certificates of workers are made out to, where it is not the host of their addresses."""

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
    """Silence of a worker, in seconds, after which its work is placed elsewhere. One whose steps take longer allows itself more."""


class ServiceOptions(TlsOptions):
    """What every process has."""

    log_level: LogLevel = "info"
    """Least severe messages to log."""
    drain_timeout_s: Seconds = 60.0
    """Time, in seconds, that running requests have to end when the process is told to stop."""
    metrics_port: Port = 0
    """Port of the Prometheus exporter, on --host; 0 for none. With baton serve, the first of consecutive ports: gateways,
    prefill workers, decode workers."""
    metrics_compat: Literal["none", "vllm"] = "none"
    """vllm: tell metrics on that port under vLLM's names, too, so that boards made for it work."""
    ready_fd: FileDescriptor | None = Field(default=None, json_schema_extra=HIDDEN)
    """File descriptor to write one JSON line to when the process is ready or cannot start."""
    parent_fd: FileDescriptor | None = Field(default=None, json_schema_extra=HIDDEN)
    """File descriptor of a pipe whose end of file means that the supervisor is gone: the process stops then."""


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


class EngineOptions(ModelOptions):
    """What an engine is loaded with, in either tier."""

    engine: Literal["torch", "oracle"] = "torch"
    """torch runs the model; oracle makes tokens from hashes without one, to try the plumbing."""
    oracle_step_ms: Annotated[float, Field(ge=0)] = 0.0
    """Time a step of the oracle engine takes, in milliseconds."""
    oracle_token_us: Annotated[float, Field(ge=0)] = 0.0
    """Time each new token of a step adds to it, of the oracle engine, in microseconds."""
    dtype: Dtype = "auto"
    """Element type of weights and of what is computed; auto takes the checkpoint's."""
    kv_cache_dtype: KvDtype = "auto"
    """Element type of the KV blocks; auto takes --dtype's. fp8 (e4m3) and int8 hold about twice the tokens of 16 bits, rounded:
    each head of a token has a scale of its own."""
    device: Annotated[str, AfterValidator(_check_device)] = "auto"
    """auto, cpu, cuda or cuda:N; auto takes a GPU if there is one."""
    num_threads: Count | None = None
    """CPU threads of the engine, of all its ranks together; all cores if not given."""
    tensor_parallel_size: Count = 1
    """Processes that share the model, each with a part of every layer and of every token's KV. The two tiers may differ."""
    max_model_len: Annotated[int, Field(ge=2)] | None = None
    """Most tokens of a sequence, prompt and output; the model's own limit if not given."""
    block_size: BlockSize = 16
    """Tokens per KV block. The two tiers may differ."""
    kv_cache_memory_bytes: ByteSize | None = None
    """Memory for KV blocks, such as 512MiB or 2GB; if not given, what --max-num-seqs sequences of --max-model-len tokens
    need, within --gpu-memory-utilization."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Share of the memory that is free at the start, of any device, that weights, activations and KV blocks may take."""
    num_gpu_blocks_override: Count | None = None
    """Number of KV blocks (on any device), in place of the one that memory gives."""
    enable_prefix_caching: bool = True
    """Keep KV of past prompts and reuse it for prompts that begin alike."""
    max_num_seqs: Count = 64
    """Most sequences in one batch."""
    max_num_batched_tokens: Count = 2048
    """Most new tokens in one batch: longer prompts are computed in chunks."""
    layer_group_size: Count = 4
    """Layers that are sent together while the last chunk of a prompt is computed."""

    @model_validator(mode="after")
    def _check_ranks(self) -> Self:
        if self.engine == "oracle" and self.tensor_parallel_size > 1:
            raise ValueError(
                f"--tensor-parallel-size={self.tensor_parallel_size}: --engine=oracle has no model to share; "
                "leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_batch(self) -> Self:
        """Each running sequence adds a token to a batch, so that a smaller batch would starve the last of them."""
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if tokens < seqs:
            raise ValueError(
                f"--max-num-batched-tokens={tokens}: is less than --max-num-seqs={seqs}; "
                f"give at least {seqs} tokens, or at most {tokens} sequences"
            )
        return self

    @model_validator(mode="after")
    def _check_oracle(self) -> Self:
        if self.engine == "oracle" and self.kv_cache_dtype != "auto":
            raise ValueError(
                f"--kv-cache-dtype={self.kv_cache_dtype}: the oracle engine keeps hashes, of one type; leave it out, or "
                "give --engine torch"
            )
        return self


class PeerOptions(TlsOptions):
    """Whom workers work with."""

    ssl_peer_names: PeerNames = ()
    """Name that certificates of gateways and of other workers carry, as DNS name or URI of subjectAltName; repeat the option or
    separate with commas for several. Who shows none of them is refused; if none is given, every certificate that comes from
    --ssl-ca-certs will do."""

    @model_validator(mode="after")
    def _check_peer_names(self) -> Self:
        if self.ssl_peer_names and self.ssl_ca_certs is None:
            raise ValueError("--ssl-peer-names: goes with --ssl-ca-certs; give both")
        return self


class HandoffOptions(Options):
    """How workers pass sequences on."""

    kv_transport: Transport = "auto"
    """How KV travels; auto takes shared memory between processes of one host, else TCP. nixl is for RDMA and needs the library
    of that name."""
    kv_num_lanes: Annotated[int, Field(ge=1, le=16)] = 1
    """Most connections from one worker to another. Handoffs that are under way at the same time share them out: one connection is
    enough where one stream fills the network."""
    ticket_lease_s: Seconds = 30.0
    """Silence of a sender, in seconds, after which its reservation is given up."""
    ticket_offer_s: Seconds = 10.0
    """How long a reservation waits for its sender to come, in seconds. A sender comes when it is given a prompt, not when the
    prompt's turn has come."""
    kv_secret_file: NonEmpty | None = None
    """File of a secret that all workers share, such as openssl rand -hex 32 makes: KV goes only between workers that have it, and
    carries digests under it."""


class RegistryOptions(Options):
    """Where workers and gateways find each other."""

    registry: RegistryUrl | None = Field(default=None, json_schema_extra=PRIVATE)
    """Redis by which gateways find workers, redis://host:port/db; not needed where their addresses are given."""


class WorkerOptions(
    EngineOptions, HandoffOptions, RegistryOptions, LivenessOptions, PeerOptions, ServiceOptions
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
    """Address that this worker's KV channel listens on, and under which other workers reach it if --kv-advertise-address is not
    given."""
    kv_port: Port = 0
    """Port of the KV channel over TCP; 0 takes a free one."""
    kv_advertise_address: Annotated[NonEmpty, AfterValidator(_check_address)] | None = None
    """Address, host:port, under which other workers reach this one's KV channel, where a NAT or a proxy stands before --kv-host and
    --kv-port."""
    advertise_host: NonEmpty | None = None
    """Host that the registry names this worker by; if not given, --host, or for 0.0.0.0 this machine's name."""

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


class SpeculationOptions(Options):
    """How decode workers guess tokens ahead, to confirm several in one step."""

    speculative_method: Literal["none", "ngram", "draft"] = "ngram"
    """ngram drafts what followed the last tokens where they occurred before; draft asks --speculative-model; none drafts nothing.
    The tokens of an answer are the same with each."""
    speculative_model: NonEmpty | None = None
    """Draft model, with MODEL's tokenizer: a local directory, or a Hugging Face Hub id."""
    num_speculative_tokens: Count = 8
    """Most tokens drafted for a sequence in one step; fewer where they are not worth their time."""
    prompt_lookup_min: Count = 2
    """Tokens in a row that must have occurred before, at least, for ngram to draft."""
    prompt_lookup_max: Count = 5
    """Tokens in a row from which ngram compares no further."""

    @model_validator(mode="after")
    def _check_speculation(self) -> Self:
        if self.prompt_lookup_max < self.prompt_lookup_min:
            raise ValueError(
                f"--prompt-lookup-max={self.prompt_lookup_max}: is less than "
                f"--prompt-lookup-min={self.prompt_lookup_min}; give at least as much"
            )
        if (self.speculative_method == "draft") != (self.speculative_model is not None):
            raise ValueError(
                f"--speculative-model={self.speculative_model}: goes with "
                "--speculative-method=draft; give both or neither"
            )
        return self


class DecodeTierOptions(SpeculationOptions):
    """How decode workers treat their sequences."""

    max_local_prefill_tokens: Annotated[int, Field(ge=0)] | None = None
    """Missing prompt tokens up to which a decode worker computes by itself; if not given, what is measured to be faster."""
    max_itl_factor: Annotated[float, Field(gt=1)] = 2.0
    """Times as long as without that a decode step may take because of a prompt computed beside it."""
    colocated: bool = False
    """Decode workers compute all prompts themselves, and nothing is handed over."""
    swap_space: Annotated[float, Field(ge=0)] = 1.0
    """Host memory, in GiB, for the KV of preempted sequences; what does not fit is computed anew."""
    kv_transfer_dtype: KvDtype = "auto"
    """Type that KV travels in to decode workers; auto takes the narrower of the two workers' own. fp8 and int8 come with
    scales and halve the bytes of 16 bits, at some cost in quality."""


class DecodeOptions(WorkerOptions, DecodeTierOptions):
    """Options of `baton decode`."""

    tier: ClassVar[Tier] = Tier.DECODE


class FrontDoorOptions(TlsOptions):
    """How the gateway treats requests."""

    tokenizer: NonEmpty | None = None
    """Directory or Hub id of the tokenizer; MODEL's own if not given."""
    max_queue_size: Count = 1024
    """Most requests that wait for workers; further ones are told to come again."""
    request_timeout_s: Seconds = 600.0
    """Deadline, in seconds, of requests that come without one."""
    client_stall_timeout_s: Seconds = 30.0
    """Time, in seconds, that a client may leave a piece unread before its request is ended."""
    ssl_cert_reqs: CertReqs | None = None
    """Whether clients of the gateway must show a certificate that comes from --ssl-ca-certs; required if not given and that is.
    0 and 2 say it, too."""
    api_key: ApiKeys = Field(default=(), json_schema_extra=SECRET)
    """Key that clients must show; repeat the option or separate with commas for several. Better given as BATON_API_KEY or by
    --api-key-file: a command line can be read by others."""
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
    ModelOptions, FrontDoorOptions, RegistryOptions, LivenessOptions, ServiceOptions
):
    """Options of `baton gateway`."""

    host: NonEmpty = "127.0.0.1"
    """Address to listen on."""
    port: Port = 50051
    """Port to listen on; 0 takes a free one."""
    reuse_port: bool = False
    """Share the port with other gateways that have this option: the kernel spreads connections over them."""
    prefill_workers: Addresses = ()
    """Addresses of prefill workers, host:port; repeat the option or separate with commas."""
    decode_workers: Addresses = ()
    """Addresses of decode workers, host:port; repeat the option or separate with commas."""

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


class ServeOptions(
    EngineOptions,
    DecodeTierOptions,
    HandoffOptions,
    FrontDoorOptions,
    LivenessOptions,
    PeerOptions,
    ServiceOptions,
):
    """Options of `baton serve`, which starts all tiers on this machine."""

    host: NonEmpty = "127.0.0.1"
    """Address that the gateway listens on."""
    port: Port = 50051
    """Port that the gateway listens on; 0 takes a free one."""
    num_prefill_workers: Count = 1
    """Number of prefill processes."""
    num_decode_workers: Count = 1
    """Number of decode processes."""
    num_gateways: Count = 1
    """Number of gateway processes, all on one port."""
    prefill_block_size: BlockSize | None = None
    """Tokens per KV block in the prefill tier; --block-size if not given."""
    decode_block_size: BlockSize | None = None
    """Tokens per KV block in the decode tier; --block-size if not given."""
    prefill_tensor_parallel_size: Count | None = None
    """Processes that share the model in each prefill worker; --tensor-parallel-size if not given."""
    decode_tensor_parallel_size: Count | None = None
    """Processes that share the model in each decode worker; --tensor-parallel-size if not given."""

    @model_validator(mode="after")
    def _check_colocated(self) -> Self:
        of_prefill = {"num_prefill_workers", "prefill_block_size", "prefill_tensor_parallel_size"}
        meaningless = of_prefill & self.model_fields_set
        if self.colocated and meaningless:
            name = min(meaningless).replace("_", "-")
            raise ValueError(f"leave out --{name}: with --colocated there are no prefill workers")
        return self
