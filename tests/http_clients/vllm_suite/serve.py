"""`vllm serve MODEL ...` that starts Baton in two tiers with the scripted model: options that Baton
has are passed on, the others only change how vLLM computes."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))

import worker_core.build  # noqa: E402, found by the line above
from engine import oracle  # noqa: E402
from tests.http_clients.vllm_suite.model import TEMPLATE, VOCAB_SIZE, make_model  # noqa: E402
from tests.http_clients.vllm_suite.script import Script  # noqa: E402
from tests.support.live_tiers import live_system  # noqa: E402

_PARSERS = ("hermes", "llama3_json", "mistral", "glm45", "qwen3_coder", "kimi_k2", "deepseek_v3")


def _parsed(argv: list[str]) -> tuple[str, dict[str, str], dict[str, Any]]:
    """The model, options with a value, and options of the gateway."""
    model, given, index = argv[1], dict[str, str](), 2
    while index < len(argv):
        name, _, value = argv[index].partition("=")
        index += 1
        if not value and index < len(argv) and not argv[index].startswith("--"):
            value, index = argv[index], index + 1
        given[name.replace("_", "-")] = value
    gateway: dict[str, Any] = {"http_port": int(given.get("--port", 8000))}
    gateway["max_logprobs"] = int(given.get("--max-logprobs", 20))
    if (parser := given.get("--tool-call-parser", "")) in _PARSERS:
        gateway["tool_call_parser"] = parser
    if (parser := given.get("--reasoning-parser", "")) in ("qwen3", "deepseek_r1"):
        gateway["reasoning_parser"] = parser
    if aliases := given.get("--served-model-aliases"):
        gateway["served_model_aliases"] = tuple(aliases.split(","))
    gateway["root_path"] = given.get("--root-path")
    gateway["enable_per_request_metrics"] = "--enable-per-request-metrics" in given
    if os.environ.get("VLLM_ENABLE_RESPONSES_API_STORE") == "1":
        gateway["response_store_bytes"] = 2**24
    if key := given.get("--api-key") or os.environ.get("VLLM_API_KEY"):
        gateway["api_key"] = (key,)
    return model, given, gateway


async def main(argv: list[str]) -> None:
    """Serve until SIGTERM."""
    model, given, gateway = _parsed(argv)
    template = Path(given["--chat-template"]) if "--chat-template" in given else None
    with tempfile.TemporaryDirectory() as made:
        text = template.read_text() if template and template.is_file() else TEMPLATE
        folder = make_model(Path(made), text)
        script = Script(folder, thinks="--reasoning-parser" in given)
        oracle.choose = script.choose  # type: ignore[assignment]
        sized = functools.partial(oracle.OracleOptions, vocab_size=VOCAB_SIZE)
        worker_core.build.OracleOptions = sized  # type: ignore[misc, assignment]
        workers: dict[str, Any] = {
            "model": str(folder),
            "served_model_name": given.get("--served-model-name", model),
            "max_model_len": int(given.get("--max-model-len", 4096)),
            "max_num_seqs": 128,
            "block_size": 16,
            "num_gpu_blocks_override": 4096,
            "enable_prefix_caching": "--no-enable-prefix-caching" not in given,
        }
        if adapters := given.get("--lora-modules"):
            name = adapters.partition("=")[0]
            workers["lora_modules"] = (f"{name}={folder}",)
        gateway |= {"model": str(folder), "served_model_name": workers["served_model_name"]}
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        key = gateway.get("api_key", (None,))[0]
        async with live_system(worker_options=workers, gateway_options=gateway, api_key=key):
            await stop.wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))
