"""The tables of architectures, from test runs' reports."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pytest

from bench.models import GENERIC, NATIVE, PAGE, PYTEST, results_of, table_of
from bench.suite.markdown import part_of
from tests.engine.families.test_families import CASES
from tests.support.architectures import ARCHITECTURES

REPORT = """<testsuites><testsuite>
<testcase name="test_chunks_change_nothing[gpt2]"/>
<testcase name="test_drafts_change_nothing[gpt2]"><failure message="no"/></testcase>
<testcase name="test_chunks_change_nothing[llama]"><skipped message="x"/></testcase>
</testsuite></testsuites>"""


def test_what_failed_was_skipped_or_did_not_run_is_distinguished() -> None:
    lines = table_of(GENERIC, results_of(REPORT)).splitlines()
    assert len(lines[0].split("|")) == len(GENERIC.columns) + 3
    assert lines[2] == "| gpt2 | - | yes | - | **no** | - | - | - | transformers' | - |"
    assert lines[3] == "| llama | - | to rounding | - | - | - | - | - | Baton's code | - |"


def test_parameters_beside_the_architecture_count_together() -> None:
    quantised = "test_quantised_tokens_are_those_of_what_the_levels_mean"
    bits = "test_logits_are_the_same_to_the_bit_in_any_batch"
    published = "test_published_tokens_are_those_of_what_the_levels_mean"
    report = f"""<testsuites><testsuite>
<testcase name="{published}[glm4-moe-gptq]"/>
<testcase name="{published}[glm4-moe-compressed-tensors]"/>
<testcase name="{quantised}[glm4-moe-int8]"><failure message="no"/></testcase>
<testcase name="{quantised}[glm4-moe-int4]"/>
<testcase name="{bits}[float32-glm4-moe]"/>
<testcase name="test_greedy_tokens_are_those_of_generate[glm4-moe]"><properties>
<property name="kernels" value="by operation"/></properties></testcase>
</testsuite></testsuites>"""
    (line,) = table_of(NATIVE, results_of(report)).splitlines()[2:]
    assert line == "| glm4-moe | yes | - | - | - | **no** | yes | yes | - | by operation |"


def test_no_case_is_left_out_of_the_run() -> None:
    """It would read as skipped, which is "to rounding" there."""
    assert "--long" in PYTEST


@pytest.mark.parametrize(("name", "lines"), [("families", CASES), ("transformers", ARCHITECTURES)])
def test_the_page_has_every_architecture_and_none_that_fails(
    name: str, lines: Mapping[str, object]
) -> None:
    table = part_of(PAGE.read_text(), name)
    assert set(re.findall(r"^\| ([\w-]+) \| yes", table, re.MULTILINE)) == set(lines)
    assert "**no**" not in table
