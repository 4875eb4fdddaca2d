"""`baton check`: what it passes on and what its exit status says."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import baton.check.faults
import baton.check.run
import baton.check.soak
import baton.cli.check_against
import baton.cli.check_receipt
from baton.check.fault_load import FaultResult
from baton.check.faults import FaultVerdict
from baton.check.run import Shape, Verdict
from baton.check.soak import Held, SoakCounts, SoakVerdict, Trend

Run = Callable[..., Any]


def verdict(shape: Shape, *, is_equal: bool) -> Verdict:
    return Verdict(
        shape=shape,
        num_equal=3 if is_equal else 2,
        num_requests=3,
        num_tokens=30,
        num_handed_over=1,
        seconds=0.5,
        first_difference=None if is_equal else (1, 7),
    )


class FakeCheck:
    """Finds what it was told to find, for every shape."""

    def __init__(self, *, is_equal: bool) -> None:
        self.is_equal = is_equal
        self.options: Mapping[str, object] = {}
        self.shapes: Sequence[Shape] = ()
        self.num_requests = 0
        self.is_long = False

    async def __call__(
        self,
        options: Mapping[str, object],
        shapes: Sequence[Shape],
        *,
        num_requests: int,
        seed: int,
        on_verdict: Callable[[Verdict], None],
        is_long: bool,
    ) -> bool:
        self.is_long = is_long
        self.options, self.shapes, self.num_requests = options, shapes, num_requests + seed
        for shape in shapes:
            on_verdict(verdict(shape, is_equal=self.is_equal))
        return self.is_equal


@pytest.mark.parametrize("is_equal", [True, False])
def test_the_exit_status_says_whether_outputs_are_equal(
    is_equal: bool, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeCheck(is_equal=is_equal)
    monkeypatch.setattr(baton.check.run, "check", fake)
    result = run("check", "m", "--num-requests", "3")
    assert result.exit_code == (0 if is_equal else 1)
    lines = result.stdout.splitlines()
    assert len(lines) == len(fake.shapes) + 1
    assert all(("request 1, token 7" in line) is not is_equal for line in lines[:-1])
    assert (fake.options["model"], fake.num_requests) == ("m", 3)
    assert {shape.options["kv_transport"] for shape in fake.shapes} == {"shm", "tcp"}


def test_long_prompts_and_bounds_are_passed_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCheck(is_equal=True)
    monkeypatch.setattr(baton.check.run, "check", fake)
    scaling = '{"rope_type":"linear","factor":2}'
    flags = ("--long", "--max-model-len", "4096", "--kv-cache-memory-bytes", "1GiB")
    assert run("check", "m", *flags, "--rope-scaling", scaling).exit_code == 0
    assert fake.is_long
    assert fake.options["rope_scaling"] == scaling
    assert (fake.options["max_model_len"], fake.options["kv_cache_memory_bytes"]) == (4096, "1GiB")
    assert run("check", "m").exit_code == 0
    assert not fake.is_long
    assert run("check", "m", "--long", "--faults").exit_code == 2


def test_with_sums_all_have_equal_degrees(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one worker too: else sums would be of other parts."""
    fake = FakeCheck(is_equal=True)
    monkeypatch.setattr(baton.check.run, "check", fake)
    flags = ("--tensor-parallel-cut", "sums", "--prefill-tensor-parallel-size", "2")
    assert run("check", "m", *flags).exit_code == 2
    assert run("check", "m", *flags, "--decode-tensor-parallel-size", "2").exit_code == 0
    degrees = fake.options["tensor_parallel_cut"], fake.options["tensor_parallel_size"]
    assert degrees == ("sums", 2)


def test_a_server_or_a_receipt_is_checked_instead_of_a_model(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []

    def against(*given: object, num_requests: int, seed: int) -> int:
        asked.append((*given, num_requests, seed))
        return 1

    def receipt(*given: object) -> int:
        asked.append(given)
        return 0

    monkeypatch.setattr(baton.cli.check_against, "check_against", against)
    monkeypatch.setattr(baton.cli.check_receipt, "check_receipt", receipt)
    url = "http://127.0.0.1:8000"
    assert run("check", "--against", url, "--model", "m", "--api-key", "k").exit_code == 1
    assert asked.pop() == (url, "m", "k", 24, 0)
    assert run("check", "m", "--receipt", "f", "--decode-tensor-parallel-size", "2").exit_code == 0
    path, options, *others, degrees = asked.pop()
    assert (path, others, degrees) == (
        Path("f"),
        [None, None, None],
        {"tensor_parallel_size": 2, "pipeline_parallel_size": 1},
    )
    assert isinstance(options, dict)
    assert options["model"] == "m"
    gateway = ("--against", "127.0.0.1:50051", "--model", "other")
    assert run("check", "--receipt", "f", *gateway).exit_code == 0
    assert asked.pop()[2:5] == ("127.0.0.1:50051", None, "other")
    others = [("--against", url, flag) for flag in ("--faults", "--soak", "--long")]
    nothing = ((), ("--receipt", "f"), ("--receipt", "f", "--against", url))
    for wrong in (*nothing, *others, ("m", "--receipt", "f", "--soak")):
        assert run("check", *wrong).exit_code == 2
    assert not asked


def test_a_wrong_option_starts_nothing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeCheck(is_equal=True)
    monkeypatch.setattr(baton.check.run, "check", fake)
    for flags in (("--dtype", "int1"), ("--kv-transport", "pigeon"), ("--num-requests", "0")):
        assert run("check", "m", *flags).exit_code == 2
    assert fake.shapes == ()


@pytest.mark.parametrize("broken", [None, "differences", "disorders", "errors", "leak"])
def test_with_faults_each_promise_is_reported(
    broken: str | None, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, object] = {}

    async def fake(options: Mapping[str, object], **others: Any) -> FaultVerdict:
        seen.update(options, **others)
        others["on_fault"]("kill a decode worker", 3)
        result = FaultResult("kill a decode worker", 1, 3, 1, 0, 0, 0.5, 0.5, 0.6)
        wrong = {
            name: ("kill a decode worker: wrong",) if broken == name else ()
            for name in ("differences", "disorders", "errors")
        }
        num_leaked = 7 if broken == "leak" else 0
        return FaultVerdict(
            3, **wrong, num_leaked_blocks=num_leaked, results=(result,), by_prompt=(), by_door=()
        )

    monkeypatch.setattr(baton.check.faults, "check_faults", fake)
    result = run("check", "m", "--faults", "--num-rounds", "2", "--num-requests", "3")
    assert result.exit_code == (1 if broken else 0)
    assert [seen[name] for name in ("model", "num_rounds", "num_requests")] == ["m", 2, 3]
    promises = [line for line in result.stdout.splitlines() if line.startswith("promise")]
    assert len(promises) == 4
    assert sum("BROKEN" in line for line in promises) == bool(broken)
    assert all(line.endswith("held") or "BROKEN" in line for line in promises)


@pytest.mark.parametrize("broken", [None, "wrong", "rises", "died", "held"])
def test_a_soak_says_what_is_not_flat_and_what_is_held(
    broken: str | None, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, object] = {}

    async def fake(options: Mapping[str, object], **others: Any) -> SoakVerdict:
        seen.update(options, **others)
        counts = (
            SoakCounts(5, 50, num_wrong=1, wrong="choice 0")
            if broken == "wrong"
            else (SoakCounts(5, 50))
        )
        others["on_progress"](0.5, counts)
        trend = Trend("gateway", "threads", 4.0, 8.0 if broken == "rises" else 4.0, 8.0, 2.0)
        deaths = ("decode-0",) if broken == "died" else ()
        return SoakVerdict(2.0, counts, (trend,), deaths, Held(7 * (broken == "held"), 0, 0))

    monkeypatch.setattr(baton.check.soak, "soak", fake)
    result = run("check", "m", "--soak", "--hours", "2", "--num-requests", "3")
    assert result.exit_code == (1 if broken else 0)
    assert [seen[name] for name in ("model", "hours", "num_requests")] == ["m", 2.0, 3]
    assert ("RISES" in result.stdout) is (broken == "rises")
    assert ("DIED: decode-0" in result.stdout) is (broken == "died")
    assert ("WRONG, first: choice 0" in result.stdout) is (broken == "wrong")
    assert ("held at the end: 7 blocks" in result.stdout) is (broken == "held")
