"""Each script of examples/ against real services; a new script without a line here fails."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

#: What the output of each script must hold.
EXPECTED = {
    "beam_search.py": r"greedy, score -\d+\.\d{4}: (.|\n)*beam 3, score -\d+\.\d{4}: ",
    "cancel.py": r"-- cancelled request [0-9a-f-]{32,} after 1[1-9] tokens",
    "chat.py": r"-- \d+ tokens with the template\n(.|\n)*-- (stop|length), \d+ tokens",
    "complete_async.py": r"class Stack:\n(.|\n)*-- request [0-9a-f-]{32,}",
    "complete_sync.py": r"def fibonacci\(n\):\n(.|\n)*-- \d+ tokens in \d+ ms, the first after \d+",
    "many_at_once.py": r"(?m)^ 15 +\d+ ms  'def ",
    "score_prompt.py": r"^perplexity \d+\.\d\d\n( +0\.\d{5} ['\"].*\n){3}",
    "several_choices.py": r"-- \d+ tokens of prompt read once, \d+ written(.|\n)*"
    r"choice 2: (.|\n)*best, -\d",
    "structured.py": r"(-- [a-z_]+ takes \d arguments\n){2}"
    r"-- [a-z]+\.[a-z]+\(\)\n-- (good|bad|unclear)\n",
}

#: Times that a script may run until its output holds that, where it depends on the machine, too: a
#: reader that is held up gets the tokens of several steps in one chunk, and stops behind them.
MOST_RUNS = {"cancel.py": 5}


def test_every_example_is_tested() -> None:
    assert {path.name for path in (ROOT / "examples").glob("*.py")} == set(EXPECTED)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_an_example_runs(name: str, address: str, run: Run) -> None:
    outputs = []
    for _ in range(MOST_RUNS.get(name, 1)):
        done = run([sys.executable, f"examples/{name}", "--address", address])
        assert done.returncode == 0, done.stdout
        outputs.append(done.stdout)
        if re.search(EXPECTED[name], done.stdout):
            return
    pytest.fail("\n".join(outputs))


def test_an_example_without_a_server_says_so_in_one_line(run: Run) -> None:
    done = run([sys.executable, "examples/complete_sync.py", "--address", "127.0.0.1:9"])
    assert done.returncode == 1
    assert "Traceback" not in done.stdout
    assert "error: " in done.stdout.splitlines()[-1]
