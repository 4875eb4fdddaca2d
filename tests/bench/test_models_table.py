"""The table of architectures, from a test run's report."""

from __future__ import annotations

import re

from bench.models import COLUMNS, PAGE, results_of, table_of
from bench.suite.markdown import part_of
from tests.support.architectures import ARCHITECTURES

REPORT = """<testsuites><testsuite>
<testcase name="test_chunks_change_nothing[gpt2]"/>
<testcase name="test_drafts_change_nothing[gpt2]"><failure message="no"/></testcase>
<testcase name="test_chunks_change_nothing[llama]"><skipped message="x"/></testcase>
</testsuite></testsuites>"""


def test_what_failed_was_skipped_or_did_not_run_is_told_apart() -> None:
    lines = table_of(results_of(REPORT)).splitlines()
    assert len(lines[0].split("|")) == len(COLUMNS) + 4
    assert lines[2] == "| gpt2 | - | yes | - | **no** | - | transformers' |"
    assert lines[3] == "| llama | - | to rounding | - | - | - | Baton's code |"


def test_the_page_has_every_architecture_and_none_that_fails() -> None:
    table = part_of(PAGE.read_text(), "transformers")
    assert set(re.findall(r"^\| (\w+) \| yes", table, re.MULTILINE)) == set(ARCHITECTURES)
    assert "**no**" not in table
