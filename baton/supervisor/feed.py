"""Lines that processes read on their stdin, whenever they start."""

from __future__ import annotations

from asyncio import StreamWriter


class Feed:
    """What was said so far, and the pipes of those who listen: one that is started again hears all
    of it again."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._is_ended = False
        self._writers: list[StreamWriter] = []

    def add(self, line: str) -> None:
        """Say one more line."""
        data = line.encode() + b"\n"
        self._lines.append(data)
        for writer in self._open_writers():
            writer.write(data)

    def end(self) -> None:
        """There are no more lines."""
        self._is_ended = True
        for writer in self._open_writers():
            writer.close()

    def attach(self, writer: StreamWriter) -> None:
        """One more listener, whose pipe is the feed's from now on."""
        for line in self._lines:
            writer.write(line)
        if self._is_ended:
            writer.close()
        else:
            self._writers.append(writer)

    def _open_writers(self) -> list[StreamWriter]:
        self._writers = [writer for writer in self._writers if not writer.is_closing()]
        return self._writers
