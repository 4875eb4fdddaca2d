"""What is fuzzed: each target takes bytes that a stranger may send, or that a file may hold, and
may refuse them by an error of baton.errors. Whatever else it raises is a finding.

Targets are made when they are asked for, so that one imports no more than it needs.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from baton.errors import BatonError

Target = Callable[[bytes], None]
_T = TypeVar("_T")

#: What a model's files are read from: each key of a JSON object is a file's name.
_MODEL_FILES = frozenset(
    {
        "config.json",
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.json",
        "model.safetensors.index.json",
    }
)


_LARGE_NUMBER = re.compile(r"[0-9_]{5,}|0[xXoObB]")


def _finished(work: Coroutine[object, None, _T]) -> _T:
    """Run a coroutine that never pauses, as for short values."""
    try:
        work.send(None)
    except StopIteration as end:
        result: _T = end.value
        return result
    raise RuntimeError("it paused")


def requests() -> Target:
    """Requests of clients, from their bytes to what the tiers get."""
    from baton.v1 import inference_pb2
    from gateway.intake.rules import ModelFacts
    from gateway.intake.validator import (
        Ids,
        Tokenized,
        check_detokenize,
        check_request,
        check_tokenize,
        resolve,
    )

    facts = ModelFacts(
        "m", 100, 64, 48, frozenset((2,)), has_chat_template=True, max_num_seqs=8, max_token_chars=8
    )

    def run(data: bytes) -> None:
        kind, rest = data[:1], data[1:]
        if kind == b"t":
            _finished(check_tokenize(inference_pb2.TokenizeRequest.FromString(rest), facts))
        elif kind == b"d":
            _finished(check_detokenize(inference_pb2.DetokenizeRequest.FromString(rest), facts))
        else:
            request = inference_pb2.GenerateRequest.FromString(rest)
            read = _finished(check_request(request, facts))
            words = tuple(((i % 100,),) for i, _ in enumerate(request.sampling.bad_words))
            given = tuple(request.prompt.token_ids.ids) or (1, 2, 3)
            resolve(request, Tokenized(given, words), facts, Ids("r", seed=7, arrival_ns=5), read)

    return run


def inner_messages() -> Target:
    """What gateways and workers say to each other."""
    from baton import wire
    from baton.v1 import sequence_pb2, sequence_service_pb2, worker_pb2
    from engine.oracle import OracleEngine, OracleOptions
    from worker_core.sequence_rules import refusal

    spec = OracleEngine(OracleOptions(num_blocks=4)).spec

    def run(data: bytes) -> None:
        kind, rest = data[:1], data[1:]
        if kind not in (b"i", b"l", b"s"):
            refusal(wire.sequence_from_proto(sequence_pb2.SequenceState.FromString(rest)), spec)
            return
        # At a ValueError a gateway refuses the worker that said so.
        with suppress(ValueError):
            if kind == b"i":
                wire.info_from_proto(worker_pb2.GetWorkerInfoResponse.FromString(rest))
            elif kind == b"l":
                wire.load_from_proto(worker_pb2.WatchLoadResponse.FromString(rest))
            else:
                list(wire.step_from_proto(sequence_service_pb2.ServeResponse.FromString(rest)))

    return run


def kv_frames() -> Target:
    """Bytes at the KV port: preambles and frames, and what a receiver makes of them."""
    from baton.types import KvLayout, Sampling, SequenceSpec, WorkerIdentity
    from engine.kv.tensors.array import ArrayKvPool
    from kv_transfer.frame import (
        HANDSHAKE_VERSION,
        PREAMBLE_BYTES,
        FrameBuffer,
        FrameError,
        decode_header,
        decode_preamble,
    )
    from kv_transfer.handshake import ReceiverConfig
    from kv_transfer.receiver import Receiver
    from kv_transfer.ticket_table import TicketRules, TicketTable

    layout = KvLayout("oracle", 2, 1, 2, "int64", 4)
    owner = WorkerIdentity("d0", 1)

    def run(data: bytes) -> None:
        with suppress(FrameError):
            list(FrameBuffer().feed(data))
        tickets = TicketTable(
            owner,
            layout,
            (),
            TicketRules(secret=bytes(32), draw_id=lambda: 7),
            lambda _: None,
            lambda: 0.0,
        )
        tickets.offer(SequenceSpec("r", (1, 2, 3, 4), Sampling()), (0, 1), 0, 8)
        pool = ArrayKvPool(layout, 4)
        session = Receiver(ReceiverConfig(owner, pool, 4, 1024), tickets).session(lambda _: None)
        at, version = 0, HANDSHAKE_VERSION
        try:
            while len(data) >= at + PREAMBLE_BYTES:
                preamble = decode_preamble(data[at : at + PREAMBLE_BYTES], 1024, version)
                at += PREAMBLE_BYTES
                end = at + preamble.header_bytes
                frame = decode_header(preamble, data[at:end])
                at = end + preamble.payload_bytes
                session.on_frame(frame, memoryview(data[end:at]))
        finally:
            session.on_close("over")

    return run


def tickets() -> Target:
    """The bytes of a ticket, which a gateway passes on unread."""
    from baton.types import KvLayout, Sampling, SequenceSpec, WorkerIdentity
    from kv_transfer.ticket import parse_ticket
    from kv_transfer.ticket_table import TicketRules, TicketTable

    table = TicketTable(
        WorkerIdentity("d0", 1),
        KvLayout("oracle", 2, 1, 2, "int64", 4),
        (),
        TicketRules(secret=bytes(32), draw_id=lambda: 7),
        lambda _: None,
        lambda: 0.0,
    )
    table.offer(SequenceSpec("r", (1, 2, 3, 4), Sampling()), (0, 1), 0, 8)

    def run(data: bytes) -> None:
        table.begin(data, 1)
        parse_ticket(data)

    return run


def grammars() -> Target:
    """A request's grammar: a letter for its kind, then its text."""
    from gateway.intake.grammar_compiler import grammar_of, try_grammar
    from tests.support.grammar_walks import small_vocabulary

    vocabulary = small_vocabulary()
    kinds = {b"j": "json_schema", b"l": "grammar"}

    def run(data: bytes) -> None:
        text = data[1:257].decode(errors="replace")
        try:
            try_grammar(grammar_of(kinds.get(data[:1], "regex"), text, 8), vocabulary)
        except (ValueError, RecursionError, MemoryError):
            return  # what the process that compiles them answers by itself

    return run


def templates() -> Target:
    """A model's chat template, rendered for a short conversation."""
    from gateway.chat.template import make_answer

    question: Mapping[str, Any] = {
        "messages": [{"role": "user", "num_chars": 2}, {"role": "assistant", "num_chars": 3}],
        "text": "hello",
        "fields": {},
    }

    def run(data: bytes) -> None:
        template = data[:160].decode(errors="replace")
        # Loops within loops end by the renderer's deadline, which kills its process, and what large
        # numbers take (`tojson(indent=1_000_000_000)`) by its limit of memory: neither holds here.
        is_bounded = template.count("for") < 2 and "*" not in template
        if is_bounded and not _LARGE_NUMBER.search(template):
            start = {"template": template, "special_tokens": {"eos_token": "</s>"}}
            make_answer(start)(question)

    return run


def configs() -> Target:
    """config.json and generation_config.json."""
    from engine.families.read import parse_config
    from gateway.intake.sampling_defaults import sampling_defaults

    def run(data: bytes) -> None:
        raw = _object(data[1:])
        if raw is not None:
            (sampling_defaults if data[:1] == b"g" else parse_config)(raw)

    return run


def model_files() -> Target:
    """A checkpoint's folder, as gateway and workers look at it: an object of files' names, and what
    is in them, with a whole tokenizer."""
    from engine.checkpoint import check_checkpoint
    from gateway.intake.tokenizer import load_tokenizer

    folder = Path(tempfile.mkdtemp(prefix="baton-fuzz-"))
    tokenizer = {
        "version": "1.0",
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "model.safetensors").write_bytes(b"")

    def run(data: bytes) -> None:
        for name, value in (_object(data) or {}).items():
            if name in _MODEL_FILES:
                (folder / name).write_text(json.dumps(value))
        try:
            load_tokenizer(str(folder))
            check_checkpoint(str(folder))
        finally:
            for name in _MODEL_FILES:
                (folder / name).unlink(missing_ok=True)

    return run


def tokenizer_json() -> Target:
    """tokenizer.json itself, and a text for what it makes of it."""
    from gateway.intake.tokenizer import load_tokenizer

    folder = Path(tempfile.mkdtemp(prefix="baton-fuzz-"))

    def run(data: bytes) -> None:
        (folder / "tokenizer.json").write_bytes(data)
        load_tokenizer(str(folder))

    return run


def safetensors() -> Target:
    """A shard of weights: its header, and that its data is there."""
    from engine.torch.weights import digest_checkpoint

    folder = Path(tempfile.mkdtemp(prefix="baton-fuzz-"))

    def run(data: bytes) -> None:
        (folder / "model.safetensors").write_bytes(data)
        digest_checkpoint(folder)

    return run


def http_bodies() -> Target:
    """Bodies of the HTTP port: a letter for the path, then JSON; up to the requests they mean."""
    from gateway.chat.style import chat_style
    from gateway.http.chat import ChatBody, ChatFormat
    from gateway.http.completions import CompletionBody, CompletionFormat
    from gateway.http.messages import MessagesBody, MessagesFormat
    from gateway.http.responses import ResponsesBody, ResponsesFormat
    from tests.support.http_bodies import parsed

    style = chat_style("", "auto", "auto")

    def bytes_of(token_id: int) -> bytes:
        return b"%d" % token_id

    def run(data: bytes) -> None:
        kind, rest = data[:1], data[1:]
        if kind == b"c":
            list(ChatFormat(parsed(ChatBody, rest), bytes_of, style).requests)
        elif kind == b"m":
            list(MessagesFormat(parsed(MessagesBody, rest), bytes_of, style).requests)
        elif kind == b"r":
            list(ResponsesFormat(parsed(ResponsesBody, rest), bytes_of, style).requests)
        else:
            list(CompletionFormat(parsed(CompletionBody, rest), bytes_of).requests)

    return run


def _object(data: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def refusing(target: Target) -> Target:
    """The target, where a refusal is an end like any other."""

    def run(data: bytes) -> None:
        try:
            target(data)
        except (BatonError, DecodeError):
            return

    return run


#: The fast ones first.
TARGETS: Mapping[str, Callable[[], Target]] = MappingProxyType(
    {
        made.__name__: made
        for made in (
            inner_messages,
            requests,
            tickets,
            configs,
            http_bodies,
            kv_frames,
            model_files,
            templates,
            tokenizer_json,
            safetensors,
            grammars,
        )
    }
)
