"""What `make bench` measures: for each section its command, and the tables that its result fills.
Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from bench.suite.engine_tables import (
    engine_table,
    levels_tables,
    peers_table,
)
from bench.suite.host_tables import ahead_table, gateway_table, scheduler_table
from bench.suite.served_table import served_table
from bench.suite.split_tables import split_table

Render = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True, slots=True)
class Section:
    """One program and its result, bench/results/NAME.json.

    tables: renderer of each generated part of the page. quick: arguments for a trial of seconds
    with meaningless figures. trace: arguments before a trace's path, if it can use one.
    is_per_level: machines with different best CPU levels keep separate results,
    bench/results/NAME-LEVEL.json; tables get all of them, as `machines`.
    """

    name: str
    module: str
    arguments: tuple[str, ...]
    quick: tuple[str, ...]
    tables: Mapping[str, Render]
    trace: tuple[str, ...] = ()
    is_per_level: bool = False

    def command(self, result: str, trace: str | None, is_quick: bool) -> tuple[str, ...]:
        """After the interpreter. result: where the JSON goes."""
        arguments = self.quick if is_quick else self.arguments
        recorded = (*self.trace, trace) if trace and self.trace else ()
        return ("-m", self.module, *arguments, *recorded, "--json", result)


#: A model with steps long enough to be visible among context switches of two cores and five
#: processes, and with long prompts that one core can process at the lower rate.
_SPLIT = (
    *("125m", "--long-tokens", "600", "--burst-size", "2", "--rate", "0.5", "--rate", "1"),
    *("--seconds", "20", "--steady-rate", "1.5", "--steady-output-tokens", "96"),
    *("--ttft-slo-ms", "3000", "--tpot-slo-ms", "60"),
)
#: About the floors of an 8B model on an H200: 64 sequences of 1,000 tokens per step.
_H200 = ("--oracle-step-ms", "5.5", "--oracle-token-us", "20")
_SPLIT_SIMULATED = (
    *(*_H200, "--long-tokens", "2000", "--tuned-tokens", "256"),
    *("--rate", "4", "--rate", "8", "--seconds", "10", "--steady-rate", "6"),
    *("--ttft-slo-ms", "1500", "--tpot-slo-ms", "12"),
)
#: The same model on a GPU with 2 TB/s and 312 TFLOP/s and few sequences, at 0.75 of the former and
#: 0.6 of the latter.
_A100 = ("--oracle-step-ms", "10.5", "--oracle-token-us", "85")
_SPLIT_SLOW = (
    *(*_A100, "--long-tokens", "2000", "--tuned-tokens", "128"),
    *("--rate", "2", "--rate", "4", "--seconds", "12", "--burst-size", "2", "--steady-rate", "3"),
    *("--ttft-slo-ms", "3000", "--tpot-slo-ms", "25"),
)
_SPLIT_QUICK = (
    *("tiny", "--long-tokens", "60", "--burst-size", "2", "--rate", "4", "--seconds", "1"),
    *("--steady-rate", "4", "--steady-output-tokens", "8"),
)

SECTIONS = (
    Section(
        name="engine",
        module="bench.engine",
        arguments=(),
        quick=("--model", "tiny", "--dtype", "bfloat16", "--rounds", "1", "--threads", "1"),
        tables={"engine": engine_table},
    ),
    Section(
        name="engine-levels",
        module="bench.levels",
        arguments=(),
        quick=(
            *("--model", "tiny", "--dtype", "bfloat16", "--rounds", "1", "--threads", "1"),
            *("--contender", "baton"),
        ),
        tables={"engine-levels": levels_tables},
        is_per_level=True,
    ),
    Section(
        name="peers",
        module="bench.peers",
        arguments=(),
        quick=("--model", "tiny", "--rounds", "1", "--threads", "1"),
        tables={"peers": peers_table},
    ),
    Section(
        name="peers-served",
        module="bench.peers.open_loop",
        arguments=(),
        quick=(
            *("--model", "tiny", "--rate", "8", "--num-requests", "3", "--before", "2"),
            *("--threads", "1"),
        ),
        tables={"peers-served": served_table},
    ),
    Section(
        name="host",
        module="bench.host",
        arguments=(),
        quick=(
            *("--num-seqs", "4", "16", "--num-blocks", "5000"),
            *("--num-streams", "2", "--num-requests", "5"),
            *("--num-connections", "20", "--idle-s", "0.1"),
        ),
        tables={"scheduler": scheduler_table, "gateway": gateway_table},
    ),
    Section(
        name="ahead",
        module="bench.ahead",
        arguments=(),
        quick=("--num-seqs", "4", "--step-ms", "1", "--rounds", "1"),
        tables={"ahead": ahead_table},
    ),
    Section(
        name="split",
        module="bench.split",
        arguments=_SPLIT,
        quick=_SPLIT_QUICK,
        tables={"split": split_table},
        trace=("--input-scale", "0.5", "--trace"),
    ),
    Section(
        name="split-simulated",
        module="bench.split",
        arguments=_SPLIT_SIMULATED,
        quick=(*_SPLIT_QUICK, "--oracle-step-ms", "1", "--oracle-token-us", "5"),
        tables={"split-simulated": split_table},
        trace=("--input-scale", "4", "--trace"),
    ),
    Section(
        name="split-slow",
        module="bench.split",
        arguments=_SPLIT_SLOW,
        quick=(*_SPLIT_QUICK, "--oracle-step-ms", "1", "--oracle-token-us", "5"),
        tables={"split-slow": split_table},
        trace=("--input-scale", "4", "--trace"),
    ),
)


def tables() -> dict[str, tuple[str, Render]]:
    """By generated part: its section, and its renderer."""
    return {
        name: (section.name, render)
        for section in SECTIONS
        for name, render in section.tables.items()
    }
