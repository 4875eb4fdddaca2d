"""A process that is frozen or dead is told from one that runs."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import ExitStack

from engine.ranks.process_state import is_running


def test_a_process_runs_unless_it_is_frozen_or_dead() -> None:
    with subprocess.Popen(("sleep", "60")) as process, ExitStack() as stack:
        # Also if an assertion fails: nobody would wake it.
        stack.callback(process.kill)
        assert is_running(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert not is_running(process.pid)
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED | os.WNOWAIT)
        assert is_running(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not is_running(process.pid)
    assert not is_running(process.pid)
