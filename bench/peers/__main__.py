"""Baton's engine beside llama.cpp, vLLM, OpenVINO GenAI and transformers, on the same weights,
prompts and cores, by turns.

    python -m bench.peers [--peer NAME ...] [--model NAME ...] [--dtype NAME ...] [--rounds 5]
        [--threads N] [--json FILE]

Contenders are processes that take turns, first to last, then again from the next one. Prompts are
random token ids and all answers are greedy. Models, see bench/peers/models.py: the bundled one,
SmolLM2, and Llamas of random weights. int8 is Baton's int8 by output and llama.cpp's Q8_0.
`agreement` is the share of each answer before the first token that differs from transformers'.
llama.cpp, vLLM and OpenVINO first run each task with each chunk of CHUNKS, and are measured with
the fastest. The engine runs a second time, as `baton again`: the difference is noise.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench.machine import document_of, now, publish
from bench.peers.comparison import Case, data_of, parser_of, run_cases
from bench.peers.figures import AGAIN
from bench.peers.models import QUANTIZED_DTYPES, peer_versions
from bench.peers.processes import CONTENDERS, QUANTIZED
from bench.peers.task import Task
from bench.suite.engine_tables import peers_table

_TOKENS = 16
#: Short enough that all of it takes minutes: large models read few tokens a second here.
_TASKS = {
    "tiny": (Task(2, 20, 6),),
    "box": (Task(1, 500, _TOKENS), Task(8, 500, _TOKENS)),
    "smol": (Task(1, 256, _TOKENS), Task(8, 64, _TOKENS)),
    "125m": (Task(1, 256, _TOKENS), Task(8, 128, _TOKENS)),
    "1.1b": (Task(1, 64, 8), Task(8, 8, 8)),
}
#: float32 is where all must write the same tokens; the bundled model is enough for that.
_DTYPES = {
    "tiny": ("float32", "int8"),
    "box": ("float32", "bfloat16", "int8"),
    "smol": ("bfloat16", "q4_1"),
    "125m": ("bfloat16", "int8"),
    "1.1b": ("bfloat16", "int8"),
}


def cases_of(models: Sequence[str], dtypes: Sequence[str], peers: Sequence[str]) -> list[Case]:
    """Baton, and those of `peers` that run the type."""
    contenders = [name for name in CONTENDERS if name in ("baton", AGAIN) or name in peers]
    cases = []
    for model in models:
        for dtype in _DTYPES[model]:
            is_plain = dtype not in QUANTIZED_DTYPES
            able = tuple(name for name in contenders if is_plain or name in QUANTIZED)
            if dtype in dtypes:
                cases.append(Case(model, dtype, able, _TASKS[model]))
    return cases


def rounds_of(case: Case, num_rounds: int) -> int:
    """One of float32, which is there for its tokens: they are the same in each."""
    return 1 if case.dtype == "float32" else num_rounds


def main() -> None:
    """Measure and print."""
    peers = [name for name in CONTENDERS if name not in ("baton", AGAIN)]
    types = ("float32", "bfloat16", "int8", "q4_1")
    parser = parser_of(__doc__, ("box", "smol", "125m", "1.1b"), types)
    parser.add_argument("--peer", nargs="+", choices=peers, default=peers)
    given = parser.parse_args()
    started = now()
    cases = {
        case: rounds_of(case, given.rounds)
        for case in cases_of(given.model, given.dtype, given.peer)
    }
    results = run_cases(cases, given.threads, tunes=True)
    data = {"num_threads": given.threads, **data_of(results)}
    document = document_of("bench.peers", started, data)
    document["versions"] |= peer_versions()
    publish(document, given.json, peers_table)


if __name__ == "__main__":
    main()
