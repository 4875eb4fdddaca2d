"""Generate docs/openai.md from the cases that its tests run, or with --check say whether it is
current. The pages of commands and protos are generated when the site is built, by
scripts/site_hook.py; --check generates them, too, and drops them."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer.main
from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc
from wrap import wrapped

from baton.cli.main import app
from baton.config.command import ADVANCED_PANEL

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.http_clients.suite import Reason, Suite  # noqa: E402, found above
from tests.http_clients.suites import SUITES  # noqa: E402
from tests.openai_api.cases import CASES  # noqa: E402

PROTOS = ROOT / "protos"

_CLI_HEAD = """# The command line

Each option of `serve`, `gateway`, `prefill` and `decode` can also be given as an environment
variable (`--block-size` is `BATON_BLOCK_SIZE`) or in a YAML file named by `--config`
(`block_size: 32`). Flags go before variables, variables before the file, the file before defaults.
An option that does not exist is refused wherever it is given. The client commands read the
gateway's address from `BATON_ADDRESS`.

Exit status: 0 if all is well, 1 if a request failed or a check did not hold, 2 if nothing was
started: one line on stderr then names option, value and fix.
"""

_PROTOCOL_HEAD = """# The protocol

Clients need `InferenceService` only. Every port also serves `grpc.health.v1.Health` and server
reflection. A failed call carries a `google.rpc.Status` with `ErrorInfo` (domain `baton`), for a bad
request with `BadRequest`, and with `RetryInfo` where it may succeed later; `baton/errors.py` lists
reasons and codes.
"""

_OPENAI_HEAD = """# OpenAI's API

Made from `tests/openai_api/cases.py` by `scripts/docs.py` (`make pages`); do not edit.

The gateway serves OpenAI's HTTP API on `--http-port`, 8000 if not given, beside gRPC: the same
validation, queue and streams. `--no-enable-http` leaves it out. TLS and API keys are those of the
gRPC port.

    client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    client.completions.create(model="models/baton-py-6m", prompt="def add(", max_tokens=64)

    curl http://127.0.0.1:8000/v1/completions -H 'content-type: application/json' \\
        -d '{"prompt": "def fibonacci(n):", "max_tokens": 64, "stream": true}'

| Path | |
|---|---|
| `/v1/completions` | text or token ids of up to 128 prompts in, text out |
| `/v1/chat/completions` | a conversation in, a message out; tools, thoughts, structured output |
| `/v1/responses` | OpenAI's newer form of the same; see below for answers that are kept |
| `/v1/messages`, `/v1/messages/count_tokens` | Anthropic's API; see below |
| `/v1/models`, `/v1/models/{id}` | what is served |
| `/tokenize`, `/detokenize` | as vLLM has them, for a `prompt` or `messages`, and `tokens` |
| `/tokenizer_info` | as vLLM has it: special tokens, and the chat template |
| `/invocations` | SageMaker's path: a chat where there are `messages`, else a completion |
| `/health`, `/ping`, `/healthcheck` | 200 if some request could be served, else 503; no key |
| `/metrics` | for Prometheus |
| `/load` | `server_load`: how many answers are being made |
| `/version` | of Baton |
| `/` | a page for people: a playground, a live map, KV memory over time, code |
| `/docs`, `/openapi.json` | every path, field, range and error; without a key |

`model` may be left out where one model is served. A null field counts as absent; an unknown one is
ignored and named in a `warning` header; one that would change the output and is not served
(`suffix`, `functions`, `audio`, `documents`, `chat_template`, `logits_processors`) is refused.
`use_beam_search` searches with `n` beams for `n` outputs; `length_penalty` goes with it, options
that sampling alone reads are refused beside it, and `temperature` is not read.
`top_logprobs: -1`, `logprobs: -1` and `prompt_logprobs: -1` ask for the whole vocabulary, which
`--max-logprobs` must allow. `thinking_token_budget` is kept by a grammar, so the mark at the end of
thoughts must be one token of the model, and `ignore_eos` and `min_tokens` do not go with it.
`/v1/responses` takes the sampling fields of the others, too, and gives log probabilities by
`include: ["message.output_text.logprobs"]` with `top_logprobs`; items of `reasoning` reach the
chat template.

`kv_transfer_params.prompt_token_ids` of a chat is the prompt as token ids, from a router that has
tokenized it; `messages` are then only read for their roles. `add_special_tokens: true` puts the
tokenizer's special tokens to what the chat template writes. `enable_response_messages: true` of
`/v1/responses` adds `input_messages` and `output_messages`, the model's own text and tokens. With
`--enable-per-request-metrics` an answer of one choice has vLLM's `metrics`. Paths may begin with
`--root-path`, where a proxy in front does not take it off. `/v1` may be left out of all but
`/v1/models/{id}`.

`return_timing: true` adds `timing` to an answer, or to the last piece of a stream (of
`/v1/responses`, too): milliseconds to the first token and their parts, the bytes handed over, and
the workers.

`slo_class` names one of the gateway's `--slo-classes` at each of the four paths that generate
([tuning.md](tuning.md#by-class-of-requests)).

`return_receipt: true` adds `receipt` in the same places: digest of the weights and adapters, type
of KV, the prompt's token ids, the sampling as resolved with its seed, the tokens and (with
`logprobs`) log probabilities of each choice, the workers with their versions and numerics, and the
handoffs with their checksums. `baton check --receipt` asks again for the answer in a file and
compares: see [reliability.md](reliability.md#receipts).

## Answers that are kept

With `--response-store-bytes N` the gateway keeps answers of `/v1/responses` in its memory, as
OpenAI does, unless `store` is false: `GET` and `DELETE /v1/responses/{id}`, `previous_response_id`,
and `background: true`, which is answered once the request is admitted and goes on without the
client; `POST /v1/responses/{id}/cancel` ends it. An answer is found by the API key that asked for
it alone (without keys, by whoever knows its id), for `--response-store-s`. Only a whole answer can
be continued: one that is in progress, failed or was cancelled is refused as
`previous_response_id`. Beyond N bytes the key with the most bytes loses its oldest answers. An
answer of more than 4 MiB with its conversation is not kept. Answers end with their gateway, and
those in the background with it, so the option goes with one gateway: several, and gateways of one
registry, do not share them.

## Resuming a stream

To continue a broken stream, at any gateway of the model, send the same request with `resume_from`:
a list with, for each choice that anything came of, its `choice`, its `token_ids` (from
`return_token_ids`), the `num_chars` of its text, and `has_ended`. The stream continues with the
next token. It needs `seed` ([adr/0020](adr/0020-clients-hold-what-a-stream-sent.md)). With the
`x-request-id` of its first part it keeps that one's `id`. Where every choice has ended, it sends
the end: the usage, if it was asked for, and `[DONE]`.

Pieces of a chat have `num_chars` beside `token_ids`, because calls and thoughts are longer as the
model's text than as sent. `/v1/responses` and `/v1/messages` take `seed`, `return_token_ids` and
`resume_from`, too. There one event, `baton.progress`, ends the events of each piece, with
`token_ids` and `num_chars`; discard what came after the last of them, because it comes again. For
`/v1/responses`, add the `sequence_number` of the last `baton.progress`. Names of items and calls
are the same with the same seed and prompt.

With `stream_options.include_event_ids` each event of a completion or a chat has an `id`. Send the
same request with the last id as `Last-Event-ID`, as browsers do; it needs no `seed` and may have
several prompts. The answer is drawn again up to there, a step for each token, where `resume_from`
costs one prefill; a checksum in the id refuses a different answer. Ids are off by default, because
some load tools take each event for one line.

## Several models

`baton serve` takes several models, each with workers of its own behind one gateway, and a name for
each that a directory or Hub id does not name well:

    baton serve code=models/code chat=org/chat:revision=v2:num_decode_workers=2 \\
        --served-model-aliases gpt-4o=chat

Options hold for all models, except those that describe the first MODEL; another model's own follow
it, as above: `revision`, `tokenizer`, `chat_template`, `tool_call_parser`, `reasoning_parser`,
and with `baton serve` those of its engine and numbers of its workers. `baton gateway` takes the
same, or all but the first as `--more-models`, each with its own tokenizer, queue and workers.
Workers name their model by `--served-model-name`; a registry and addresses on the command line
may mix models. `baton serve` goes on without a model that cannot be served: its log says which
and why.

    baton gateway models/code --served-model-name code --more-models chat=models/chat \\
        --prefill-workers code-p:50061,chat-p:50061 --decode-workers code-d:50062,chat-d:50062

`--served-model-aliases ALIAS=NAME` adds a name. A request without a model is refused with 400, one
of an unknown name with 404; both errors list the names. Before a decode worker of each model has
reported its adapters, an unknown name is a 503 that names the model. `baton serve` is ready when
all have. Lost or full workers of one model do not affect the others.

## Headers and errors

The answer to each request that was read whole, under `/v1`, `/tokenize` and `/detokenize`, has
`x-request-id`, errors too: the one that was sent, with an ending that makes it unique, or a fresh
one. That of `/v1/messages` has it as `request-id`, too, and an error there as `request_id`.
`traceparent` is continued.

The deadline of a request is `--request-timeout-s`, or less, if the proxy in front gives it less by
Envoy's `x-envoy-expected-rq-timeout-ms`; it is the deadline of all that the request does in both
tiers, and a client that reaches the gateway directly may send it, too. The
`x-stainless-read-timeout` of OpenAI's package is not read: it is a time between two pieces, begins
anew with each, and a client that gives up cancels its request by closing the connection.

An error is OpenAI's `{"error": {"message", "type", "param", "code"}}`, `param` with the whole path
of the first wrong field. A stream that fails after its first piece has the error as its last event,
and no `[DONE]`.

| Status | When |
|---|---|
| 400 | a field is wrong: which, its value and the fix are in the message |
| 401 | no API key, or a wrong one |
| 404 | a model that is not served, or a path that is not |
| 408 | the request's time was over, or it was too slow to arrive |
| 413, 431 | a body of more than 16 MiB; more than 100 headers, or 32 KiB of them |
| 429 | full now; `retry-after` says when to try again |
| 499 | the client went away, or did not read its stream; in logs and metrics only, for then its \
connection is closed, or its answer has begun with 200 |
| 503 | no worker takes work, one was lost, or none yet said what adapters it has; `retry-after` |

## Tools and reasoning

Tool calls are parsed from the model's own format: `--tool-call-parser`, `auto` by the chat
template. A grammar enforces `tool_choice: required` and a named function. Where the chat template
has no place for tools, the system message describes them, with Hermes' format of calls, and a
`warning` header says so. Thoughts come as
`reasoning` and `reasoning_content`, the same text: `--reasoning-parser`; `usage` has the number of
their tokens in `completion_tokens_details.reasoning_tokens`. Formats: Hermes' and Qwen's, Llama's,
Mistral's, DeepSeek's, Kimi's, GLM's, Qwen3-Coder's, and gpt-oss's (harmony, calls and thoughts in
one). GLM and Qwen3-Coder write arguments without quotes, so a tool's JSON Schema gives their types:
a parameter that may only be a string is streamed; any other comes when it is complete.

## Anthropic's API

`/v1/messages` takes text, `system`, tools of the client's own, results of tools, `stop_sequences`,
`thinking` (`enabled` and `disabled` become the template variable `enable_thinking`),
`output_config.format` with a JSON Schema, and streams Anthropic's events; a last message of the
assistant is continued. Keys come as `x-api-key` or as Bearer; errors have Anthropic's form. Images,
documents, tools that a server runs, and batches are refused. The unmodified `anthropic` package
runs against it in `tests/openai_api/test_messages.py`.

    client = anthropic.Anthropic(base_url="http://127.0.0.1:8000", api_key="none")

## What is tested

Clients beside the `openai` package that were run to the end of an answer by hand (a template with
tools, 65,536 tokens of context): Claude Code 2.1.197 with `ANTHROPIC_BASE_URL`, Codex CLI 0.169.0
with `wire_api = "responses"`, opencode 1.18.33; and lm-eval 0.4.13's `local-completions`, with
`tokenizer_backend=huggingface` and `=remote`, on tasks that generate, choose and measure
perplexity. Coding agents send 15,000 tokens and more before the first question.

Each line is a case of the unmodified `openai` package, run by its sync and its async client.
"""

_SUITES_HEAD = """## Tests of others

`tests/http_clients/setup.sh` fetches these, `python -m tests.http_clients.run` runs them, `--only
NAME` one suite of them. Of the tests that fail, *decision*: Baton does otherwise on purpose;
*missing*: Baton has it not; *model*: the model that is served, or how its server was started, is
not what the test was written for. LiteLLM's `BaseLLMChatTest` is in no package, and is not run.
"""

_METAVARS = {int: "INTEGER", float: "NUMBER"}
_FieldType = FieldDescriptorProto.Type
Path_ = tuple[int, ...]
Comments = Mapping[Path_, str]


def main() -> int:
    """0: done, or current. 1: not current."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing, compare only")
    is_check = parser.parse_args().check
    path = ROOT / "docs" / "openai.md"
    text = wrapped("\n".join(openai_page())) + "\n"
    if not is_check:
        path.write_text(text)
        return 0
    is_stale = path.read_text() != text
    if is_stale:
        sys.stderr.write("docs/openai.md is not current; run `make pages`\n")
    return int(is_stale)


def cli_page() -> Iterator[str]:
    """Lines of the site's cli.md."""
    yield _CLI_HEAD
    advanced: dict[str, list[str]] = {}
    group: Any = typer.main.get_command(app)
    context = typer.Context(group)
    for name in sorted(group.list_commands(context)):
        command: Any = group.get_command(context, name)
        shown = [param for param in command.params if not getattr(param, "hidden", False)]
        arguments = [param for param in shown if param.param_type_name == "argument"]
        options = [param for param in shown if param.param_type_name == "option"]
        for param in command.params:
            if getattr(param, "rich_help_panel", None) == ADVANCED_PANEL:
                advanced.setdefault(_row(_flag(param), param), []).append(name)
        named = "".join(f" {_argument_name(argument)}" for argument in arguments)
        yield f"## baton {name}\n"
        yield f"{_one_line(command.help)}\n"
        yield f"    baton {name}{named}{' [OPTIONS]' if options else ''}\n"
        if shown:
            yield "| | |\n|---|---|"
            for argument in arguments:
                yield _row(_argument_name(argument), argument)
            yield from _rows(options)
            yield ""
    yield "## Advanced options\n"
    yield "Shown by `--help-all`.\n"
    yield "| | | Commands |\n|---|---|---|"
    for row, names in sorted(advanced.items()):
        yield f"{row} {', '.join(names)} |"
    yield ""


def _rows(options: Sequence[Any]) -> Iterator[str]:
    """By name."""
    for option in sorted(options, key=lambda option: option.opts[0]):
        yield _row(_flag(option), option)


def _argument_name(argument: Any) -> str:
    return str(argument.metavar or argument.name.upper())


def _flag(option: Any) -> str:
    flags = ", ".join([*option.opts, *option.secondary_opts])
    if option.is_flag:
        return flags
    kind = option.type_descriptor.annotation
    return f"{flags} {option.metavar or _METAVARS.get(kind, 'TEXT')}"


def _row(name: str, param: Any) -> str:
    text = _one_line(param.help or "")
    default = param.default
    # Options of services have their default in their help already; a callable would be run by
    # asking.
    has_default = isinstance(default, (str, int, float)) and default is not False and default != ""
    if has_default and "[default:" not in text:
        text += f" [default: {default}]"
    return f"| `{_cell(name)}` | {_cell(text)} |"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def openai_page() -> Iterator[str]:
    """Lines of docs/openai.md."""
    yield _OPENAI_HEAD
    for section in dict.fromkeys(case.section for case in CASES):
        names = [case.name for case in CASES if case.section == section]
        yield f"### {section} ({len(names)})\n"
        yield from (f"- {name}" for name in names)
        yield ""
    yield _SUITES_HEAD
    for suite in SUITES:
        yield from _suite_page(suite)


def _suite_page(suite: Suite) -> Iterator[str]:
    """How a suite fares, as the last runs of its tests had it."""
    outcomes = suite.outcomes()
    counts = Counter(outcomes.values())
    num_run = counts["passed"] + counts["failed"]
    yield f"### {suite.title} (`{suite.name}`)\n"
    yield f"{suite.about} {counts['passed']} of {num_run} pass. {suite.not_run}".rstrip()
    by_reason: dict[Reason | None, list[str]] = {}
    for test, outcome in outcomes.items():
        if outcome == "failed":
            by_reason.setdefault(suite.reason_of(test), []).append(test)
    if by_reason:
        yield "\n| Tests that fail | | Why |\n|---|---|---|"
    for reason, tests in by_reason.items():
        names = dict.fromkeys(f"`{test.partition('::')[2].partition('[')[0]}`" for test in tests)
        kind, why = (reason.kind, reason.why) if reason else ("", "not known")
        yield f"| {', '.join(names)} ({len(tests)}) | {kind} | {_cell(why)} |"
    yield ""


def protocol_page() -> Iterator[str]:
    """Lines of the site's protocol.md: the public service's file first, the others by name."""
    yield _PROTOCOL_HEAD
    files = sorted(
        read_protos(), key=lambda file: (not file.name.endswith("inference.proto"), file.name)
    )
    for file in files:
        comments = {
            tuple(location.path): location.leading_comments.strip()
            for location in file.source_code_info.location
        }
        yield f"## {file.name}\n"
        # The file's comment stands before its syntax line.
        yield f"{_one_line(comments.get((12,), ''))}\n"
        for index, service in enumerate(file.service):
            yield from _service(service, (6, index), comments)
        for index, message in enumerate(file.message_type):
            yield from _message(message, (4, index), comments)
        for index, enum in enumerate(file.enum_type):
            yield from _enum(enum, (5, index), comments)


def read_protos() -> list[FileDescriptorProto]:
    """Our protos with their comments."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "protos"
        status = protoc.main(
            [
                "protoc",
                f"--proto_path={PROTOS}",
                "--include_source_info",
                f"--descriptor_set_out={out}",
                *map(str, sorted((PROTOS / "baton").rglob("*.proto"))),
            ]
        )
        if status:
            raise SystemExit(status)
        return list(FileDescriptorSet.FromString(out.read_bytes()).file)


def _service(service: ServiceDescriptorProto, path: Path_, comments: Comments) -> Iterator[str]:
    yield f"### service {service.name}\n"
    yield f"{_one_line(comments.get(path, ''))}\n"
    yield "| Method | Takes | Gives | |\n|---|---|---|---|"
    for index, method in enumerate(service.method):
        takes = ("stream " if method.client_streaming else "") + _short(method.input_type)
        gives = ("stream " if method.server_streaming else "") + _short(method.output_type)
        text = _cell(_one_line(comments.get((*path, 2, index), "")))
        yield f"| `{method.name}` | `{takes}` | `{gives}` | {text} |"
    yield ""


def _message(message: DescriptorProto, path: Path_, comments: Comments) -> Iterator[str]:
    yield f"### {message.name}\n"
    yield f"{_one_line(comments.get(path, ''))}\n"
    if message.field:
        yield "| No. | Field | Type | |\n|---|---|---|---|"
        for index, field in enumerate(message.field):
            text = _one_line(comments.get((*path, 2, index), ""))
            if field.HasField("oneof_index") and not field.proto3_optional:
                text = f"{text} (one of `{message.oneof_decl[field.oneof_index].name}`)"
            yield f"| {field.number} | `{field.name}` | `{_type(field, message)}` | {_cell(text)} |"
        yield ""


def _enum(enum: EnumDescriptorProto, path: Path_, comments: Comments) -> Iterator[str]:
    yield f"### enum {enum.name}\n"
    yield f"{_one_line(comments.get(path, ''))}\n"
    yield "| No. | Name | |\n|---|---|---|"
    for index, value in enumerate(enum.value):
        text = _cell(_one_line(comments.get((*path, 2, index), "")))
        yield f"| {value.number} | `{value.name}` | {text} |"
    yield ""


def _type(field: FieldDescriptorProto, message: DescriptorProto) -> str:
    """The field's type as the .proto spells it."""
    for nested in message.nested_type:
        if nested.options.map_entry and field.type_name.endswith(f".{nested.name}"):
            key, value = nested.field
            return f"map<{_type(key, nested)}, {_type(value, nested)}>"
    name = _short(field.type_name) or _FieldType.Name(field.type).removeprefix("TYPE_").lower()
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {name}"
    return f"optional {name}" if field.proto3_optional else name


def _short(type_name: str) -> str:
    return type_name.removeprefix(".baton.v1.").lstrip(".")


#: Pages that only the site has, by name.
SITE_PAGES: Mapping[str, Callable[[], Iterator[str]]] = {
    "cli.md": cli_page,
    "protocol.md": protocol_page,
}


if __name__ == "__main__":
    sys.exit(main())
