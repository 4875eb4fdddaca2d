"""bench.peers: the same work for all, turns, figures, and what becomes of a contender that
fails."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.peers import comparison, processes
from bench.peers.__main__ import cases_of, rounds_of
from bench.peers.figures import agreement, figure_of
from bench.peers.models import NAMES, PeerMissing, gguf_file
from bench.peers.ours import BatonContender
from bench.peers.processes import (
    CONTENDERS,
    QUANTIZED,
    ContenderFailed,
    ask_all,
    contender_process,
    orders,
)
from bench.peers.task import Answer, Task, prompts_of
from tests.support.tiny_models import make_tiny_model

TASK = Task(batch=2, context=5, num_tokens=3)
CONSTANT = Answer(0.5, (0.25, 0.75), ((1, 2, 3), (4, 5, 6)))


def program(*lines: str) -> list[str]:
    return [sys.executable, "-c", "\n".join(lines)]


#: Gives the same answer to every task.
STEADY = program(
    "import sys",
    "from bench.peers.task import Answer, emit",
    "for _ in sys.stdin:",
    f"    emit({CONSTANT!r})",
)
#: Has one answer, and then no more.
WEARY = program(
    "import sys",
    "from bench.peers.task import Answer, emit",
    "sys.stdin.readline()",
    f"emit({CONSTANT!r})",
    "sys.stdin.readline()",
    "sys.exit('out of memory')",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("model")))


def test_all_contenders_get_the_same_prompts() -> None:
    assert prompts_of(TASK, 100) == prompts_of(TASK, 100)
    assert [len(prompt) for prompt in prompts_of(TASK, 100)] == [5, 5]


@given(st.integers(1, 5), st.integers(1, 7))
def test_each_round_asks_all_and_each_is_first_as_often(num_names: int, num_cycles: int) -> None:
    names = [str(index) for index in range(num_names)]
    rounds = list(orders(names, num_names * num_cycles))
    assert all(sorted(order) == names for order in rounds)
    assert Counter(order[0] for order in rounds) == dict.fromkeys(names, num_cycles)


def test_the_first_round_does_not_count() -> None:
    asked = ask_all({"steady": STEADY}, [TASK], 2)
    assert asked.answers["steady"][TASK] == [CONSTANT, CONSTANT]
    assert asked.failures == {}


def test_one_that_fails_is_told_with_its_last_words_and_the_others_go_on() -> None:
    rounds: list[None] = []
    asked = ask_all({"weary": WEARY, "steady": STEADY}, [TASK], 2, lambda: rounds.append(None))
    assert asked.failures == {"weary": "out of memory"}
    assert asked.answers["weary"][TASK] == []
    assert len(asked.answers["steady"][TASK]) == 2
    assert len(rounds) == 3


def test_one_that_says_nothing_is_told_by_its_status() -> None:
    with (
        contender_process(program("raise SystemExit(3)")) as process,
        pytest.raises(ContenderFailed, match="status 3"),
    ):
        process.ask(TASK)


def test_agreement_ends_at_the_first_token_that_differs() -> None:
    other = Answer(0.5, (), ((1, 2, 9), (9, 5, 6)))
    assert agreement(CONSTANT, CONSTANT) == 1
    assert agreement(other, CONSTANT) == pytest.approx((2 / 3 + 0) / 2)


def test_figures_are_medians_of_all_rounds() -> None:
    answers = [CONSTANT, Answer(0.9, (0.1, 0.3), CONSTANT.token_ids), CONSTANT]
    figure = figure_of("box", "int8", "baton", TASK, answers, None)
    assert figure.prompt_ms == pytest.approx(250.0)
    assert figure.step_ms == pytest.approx(275.0)
    assert figure.best_step_ms == pytest.approx(100.0)
    assert figure.num_rounds == 3
    assert figure.agreement is None
    with pytest.raises(ValueError, match="nothing"):
        figure_of("box", "int8", "baton", TASK, [], None)


@pytest.mark.slow
def test_baton_writes_what_generate_writes_in_float32(model: str) -> None:
    from bench.peers.transformers_peers import GenerateContender

    task = Task(batch=3, context=20, num_tokens=5)
    ours = BatonContender(model, "float32").run(task)
    theirs = GenerateContender(model, "float32").run(task)
    assert ours.token_ids == theirs.token_ids
    assert len(ours.steps_s) == len(theirs.steps_s) == 4


@pytest.mark.slow
def test_a_contender_of_this_environment_answers(model: str) -> None:
    command = [sys.executable, "-m", "bench.peers.contender", "baton", model, "float32", "1"]
    with contender_process(command) as process:
        answer = process.ask(TASK)
    assert answer.token_ids == BatonContender(model, "float32").run(TASK).token_ids
    assert answer.prefill_s > 0


def test_only_those_who_can_run_int8() -> None:
    cases = cases_of(["box"], ["bfloat16", "int8"], ["llama.cpp", "transformers"])
    whole, rounded = cases
    assert whole.contenders == ("baton", "baton again", "llama.cpp", "transformers")
    assert set(rounded.contenders) <= set(QUANTIZED)
    assert "llama.cpp" in rounded.contenders


def test_float32_is_run_for_its_tokens_alone() -> None:
    by_type = {case.dtype: case for case in cases_of(["box"], ["float32", "bfloat16"], [])}
    assert rounds_of(by_type["float32"], 5) == 1
    assert rounds_of(by_type["bfloat16"], 5) == 5


def test_there_are_cases_of_every_model() -> None:
    dtypes = ["float32", "bfloat16", "int8"]
    assert {case.model for case in cases_of(NAMES, dtypes, CONTENDERS)} == set(NAMES)


def test_llama_cpp_is_missing_where_it_is_not_built(tmp_path: Path) -> None:
    with pytest.raises(PeerMissing, match=r"setup\.sh"):
        gguf_file("box", "bfloat16", tmp_path, tmp_path / "python")


def test_a_peer_that_is_not_installed_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(processes, "_PEERS", tmp_path)
    for peer in ("vllm", "openvino"):
        with pytest.raises(PeerMissing, match=f"WITH_{peer.upper()}=1"):
            processes.command_of(peer, "box", "float32", 1)


def test_the_fastest_chunk_is_measured() -> None:
    def taking(seconds: float) -> list[str]:
        return [word.replace("0.25", str(seconds)) for word in STEADY]

    assert comparison._fastest({512: taking(0.5), 128: taking(0.25)}, [TASK]) == 128
    assert comparison._fastest({512: taking(0.5), 128: WEARY}, [TASK]) == 512
    with pytest.raises(ContenderFailed, match="out of memory"):
        comparison._fastest({128: WEARY}, [TASK])
