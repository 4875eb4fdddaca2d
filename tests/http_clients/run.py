"""Runs tests that others wrote against Baton, and keeps their outcomes for docs/openai.md:

    python -m tests.http_clients.run [--only NAME]... [TEST]...

tests/http_clients/setup.sh fetches them. A test that fails must have its reason in its suite.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from tests.http_clients.suite import Suite
from tests.http_clients.suites import SUITES


def main() -> int:
    """0: every failure has a reason."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [suite.name for suite in SUITES]
    parser.add_argument("--only", action="append", choices=names, help="suite; all if not given")
    parser.add_argument("tests", nargs="*", help="of one suite; all if not given")
    asked = parser.parse_args()
    if asked.tests and len(asked.only or ()) != 1:
        parser.error("tests go with one --only")
    suites = [suite for suite in SUITES if not asked.only or suite.name in asked.only]
    return max(_run(suite, asked.tests) for suite in suites)


def _run(suite: Suite, tests: Sequence[str]) -> int:
    """Run, and keep the outcomes; those of named tests beside what is known of the others."""
    outcomes = suite.run(tests)
    kept = {**(suite.outcomes() if tests else {}), **outcomes}
    suite.outcomes_file.write_text(json.dumps(kept, indent=1, sort_keys=True) + "\n")
    num_passed = sum(outcome == "passed" for outcome in outcomes.values())
    num_failed = sum(outcome == "failed" for outcome in outcomes.values())
    unexplained = suite.unexplained(outcomes)
    print(f"{suite.name}: {num_passed} passed, {num_failed} failed", end="")
    print(f", {len(unexplained)} without a reason")
    print("".join(f"  {test}\n" for test in unexplained), end="")
    return 1 if unexplained else 0


if __name__ == "__main__":
    sys.exit(main())
