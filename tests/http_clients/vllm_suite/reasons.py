"""Why a test of vLLM's fails against Baton."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple


class Reason(NamedTuple):
    """pattern: of the tests. kind: decision, of what Baton does otherwise on purpose; missing, of
    what it has not; or model, of what the scripted model does not say. why: for the page."""

    pattern: str
    kind: str
    why: str


_DECISION, _MISSING, _MODEL = "decision", "missing", "model"

REASONS: Sequence[Reason] = (
    Reason(
        "test_stateful",
        _DECISION,
        "nothing is kept between requests: no `store`, `background`, `previous_response_id`",
    ),
    Reason(
        "test_long_seed|test_empty_prompt|test_out_of_vocab",
        _DECISION,
        "refused with 400 as there, in other words",
    ),
    Reason(
        "test_tokenize_chat",
        _DECISION,
        "`add_special_tokens: true` is refused for a conversation: the chat template writes them",
    ),
    Reason(
        "test_show_version",
        _DECISION,
        "`/version` is Baton's own",
    ),
    Reason(
        "test_check_models",
        _DECISION,
        "an adapter's `root` is the model, not a path",
    ),
    Reason(
        "return_token_strs",
        _DECISION,
        "`token_strs` are texts, not the vocabulary's spelling of them",
    ),
    Reason(
        "test_batch_completions",
        _DECISION,
        "`use_beam_search` is refused: beam search is the gRPC API's",
    ),
    Reason(
        "per_request_metrics",
        _DECISION,
        "`return_timing` says the same in other words",
    ),
    Reason(
        "kv_transfer_prompt_token_ids",
        _DECISION,
        "`kv_transfer_params` are of vLLM's own connectors",
    ),
    Reason(
        "root_path_with_api_key",
        _MISSING,
        "no `--root-path`: a proxy in front takes its prefix off",
    ),
    Reason(
        "test_invocations",
        _MISSING,
        "no `/invocations` for SageMaker",
    ),
    Reason(
        "test_server_load",
        _MISSING,
        "no `/load`: `/metrics` has it",
    ),
    Reason(
        "test_tokenizer_info_basic",
        _MISSING,
        "no `tokenizer_class` in `/tokenizer_info`",
    ),
    Reason(
        "test_enable_response_messages",
        _MISSING,
        "no `enable_response_messages`",
    ),
    Reason(
        "test_single_chat_session",
        _MODEL,
        "counts tokens of another tokenizer; `prompt_tokens_details` is always there, too",
    ),
    Reason(
        "more_than_one_prompt_logprobs",
        _MODEL,
        "needs a prompt that the model finds likely",
    ),
    Reason(
        "test_named_tool_use|test_structured_outputs_choice|responses/test_structured_output",
        _MODEL,
        "needs what its own model answers",
    ),
    Reason(
        "test_echo_logprob_completion",
        _MODEL,
        "token 0 is a special one in this tokenizer",
    ),
    Reason(
        "anthropic_streaming_cache_usage",
        _MODEL,
        "its prompt is too long in this tokenizer",
    ),
    Reason(
        "streaming_expected_arguments",
        _MODEL,
        "needs a model that calls several tools by itself",
    ),
)


def reason_of(test: str) -> Reason | None:
    """The first that names the test."""
    return next((each for each in REASONS if re.search(each.pattern, test)), None)
