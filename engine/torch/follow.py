"""Process of a rank other than 0: `python -m engine.torch.follow FD`; FD is a socket to rank 0.

The process ends when the socket closes, in any state.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading

from engine.torch.follower import follow


def main() -> None:
    # Signals are for rank 0, which first lets its sequences end.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(control,), name="leader-watch", daemon=True).start()
    follow(control)


def _end_with(control: socket.socket) -> None:
    """End the process when rank 0 is gone: the main thread may be waiting for it in shared memory,
    without a timeout."""
    poll = select.poll()
    poll.register(control, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
