"""Process of a rank other than 0: `python -m engine.follow FD LINK_FD [PULSE_FD]`, connections to
rank 0 for commands, for a Link and, if that is on another host, for a Pulse.

The process ends when rank 0 closes them, in any state, or is silent.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading

from engine.follower import follow
from engine.ranks.exchange import ExchangeFailed
from engine.ranks.link import SILENCE_S, Link
from engine.ranks.process_state import is_running
from engine.ranks.pulse import Pulse

_log = logging.getLogger(__name__)


def main() -> None:
    # Signals are for rank 0, which first lets its sequences end.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    control, link, *pulses = (socket.socket(fileno=int(fd)) for fd in sys.argv[1:])
    watch = Pulse(pulses[0]).is_running if pulses else _is_parent_running
    try:
        follow(control, Link(link, "rank 0", _end, _end_alone, watch))
    except ExchangeFailed:
        # Rank 0 names the rank that has gone, and ends this one.
        threading.Event().wait(2 * SILENCE_S)
        raise


def _is_parent_running() -> bool:
    """Of a rank on its host rank 0 is the parent."""
    return is_running(os.getppid())


def _end() -> None:
    """End with rank 0: the main thread may be waiting for it in an exchange."""
    os._exit(0)


def _end_alone(silent_s: float) -> None:
    _log.critical("rank 0 has sent nothing for %g s: this rank ends", silent_s)
    os._exit(1)


if __name__ == "__main__":
    main()
