"""A host says of a rank that it runs, until it is frozen or dead."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest

from engine.ranks.pulse import Pulse, start_pulse

pytestmark = pytest.mark.slow


def until(pulse: Pulse, *, runs: bool) -> None:
    """Wait until that is felt."""
    end_s = time.monotonic() + 30
    while pulse.is_running() != runs:
        assert time.monotonic() < end_s
        threading.Event().wait(0.01)


@contextmanager
def killed(process: subprocess.Popen[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    """The process, which has no later end than this."""
    with process:
        try:
            yield process
        finally:
            process.kill()


def test_a_rank_runs_until_it_is_frozen_or_dead() -> None:
    ours, theirs = socket.socketpair()
    pulse = Pulse(ours)
    assert not pulse.is_running()
    with (
        killed(subprocess.Popen(("sleep", "60"))) as rank,
        killed(start_pulse(rank.pid, [theirs])) as sender,
    ):
        theirs.close()
        until(pulse, runs=True)
        rank.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, rank.pid, os.WSTOPPED | os.WNOWAIT)
        until(pulse, runs=False)
        rank.send_signal(signal.SIGCONT)
        until(pulse, runs=True)
        for signum in (signal.SIGINT, signal.SIGTERM):  # as Ctrl-C sends to all of a terminal
            sender.send_signal(signum)
        with pytest.raises(subprocess.TimeoutExpired):
            sender.wait(0.5)
        rank.kill()
        assert sender.wait(30) == 0
        until(pulse, runs=False)
    ours.close()


def test_a_process_of_pulses_that_has_ended_says_nothing_of_the_rank() -> None:
    ours, theirs = socket.socketpair()
    pulse = Pulse(ours)
    with killed(start_pulse(os.getpid(), [theirs])) as sender:
        until(pulse, runs=True)
        sender.kill()
        until(pulse, runs=False)
    # This process has the other end, too: nothing says that it is over.
    assert theirs.fileno() >= 0
    for each in (ours, theirs):
        each.close()


def test_pulses_that_nobody_reads_stop_nothing_and_end_with_their_connections() -> None:
    full, others = socket.socketpair(), socket.socketpair()
    full[0].setblocking(False)
    with suppress(BlockingIOError):
        while full[0].send(bytes(1 << 16)):
            pass
    pulse = Pulse(others[1])
    with killed(start_pulse(os.getpid(), [full[0], others[0]])) as sender:
        until(pulse, runs=True)
        full[1].close()
        others[1].close()
        assert sender.wait(30) == 0
    full[0].close()
    others[0].close()
