"""Nothing that serves requests loads a pickle, unmarshals, or runs text: seen at run time, beside
what the sources say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.audited_system import DONE

ROOT = Path(__file__).resolve().parents[2]

#: What each line does must be seen, or the hook is worth nothing.
GUILTY = """
import marshal, pickle, sys
from pathlib import Path
from tests.support.audited_system import Watch
data, code = pickle.dumps(Path), marshal.dumps(1)
watch = Watch()
sys.addaudithook(watch)
watch.is_serving = True
pickle.loads(data)
marshal.loads(code)
compile("1", "text", "eval")
exec("2")
watch.is_serving = False
print(*sorted({entry["event"] for entry in watch.seen}))
"""


def run(*arguments: str) -> list[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.splitlines()


def test_the_hook_sees_what_it_is_there_for() -> None:
    assert run("-c", GUILTY) == ["compile exec marshal.loads pickle.find_class"]


@pytest.mark.slow
def test_a_system_that_serves_runs_nothing_that_it_was_given() -> None:
    assert run("-m", "tests.support.audited_system") == [DONE]
