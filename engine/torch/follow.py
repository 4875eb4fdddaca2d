"""The process of a rank that follows: `python -m engine.torch.follow FD`, where FD is a socket to
rank 0.

It ends with the socket, whatever it is doing.
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
    # Whoever ends the worker ends rank 0, which first lets its sequences end.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(control,), name="leader-watch", daemon=True).start()
    follow(control)


def _end_with(control: socket.socket) -> None:
    """Rank 0 may go while this one waits for it in shared memory, where nobody would notice."""
    poll = select.poll()
    poll.register(control, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
