"""llama.cpp's server as a contender, as bench/peers/setup.sh builds it."""

from __future__ import annotations

from typing import Any

from bench.drive_http import Dialect
from bench.peers.models import PeerMissing, gguf_file, peers_python
from bench.peers.server import Bounds, PeerServer
from bench.workload import LoadRequest


def _completion(request: LoadRequest, cache_salt: str) -> dict[str, Any]:
    """Prompts are computed whole each time; there is no salt."""
    del cache_salt
    return {
        "prompt": request.prompt_token_ids,
        "n_predict": request.num_output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "cache_prompt": False,
    }


#: Its door for completions streams no token ids; this one does.
DIALECT = Dialect(
    "/completion",
    _completion,
    num_tokens=lambda event: 0 if event["stop"] else len(event["tokens"]),
    is_last=lambda event: bool(event and event["stop"]),
)


def llama_server(model: str, chunk: int, bounds: Bounds, port: int) -> PeerServer:
    """In bfloat16, with KV in float16. model: of bench.peers.models.NAMES. chunk: tokens that are
    computed at once. Raises PeerMissing."""
    program = peers_python().with_name("llama-server")
    if not program.exists():
        raise PeerMissing("it is not built: run WITH_LLAMA_SERVER=1 bench/peers/setup.sh")
    threads = str(bounds.num_threads)
    command = (
        *(str(program), "--model", str(gguf_file(model, "bfloat16"))),
        *("--host", "127.0.0.1", "--port", str(port), "--no-webui", "--cache-ram", "0"),
        *("--threads", threads, "--threads-batch", threads, "--ubatch-size", str(chunk)),
        # It divides its context among its slots.
        *("--parallel", str(bounds.max_num_seqs)),
        *("--ctx-size", str(bounds.max_num_seqs * bounds.max_model_len)),
    )
    return PeerServer(command, {}, port, "listening on http:", DIALECT)
