"""Lines for the stdin of processes, independent of when they start."""

from __future__ import annotations

from asyncio import StreamWriter


class Feed:
    """All lines so far, and the pipes of the readers. A restarted reader gets all lines again."""

    def __init__(self) -> None:
        self._lines: list[bytes] = []
        self._is_ended = False
        self._writers: list[StreamWriter] = []

    def add(self, line: str) -> None:
        """Append a line, and write it to all readers."""
        data = line.encode() + b"\n"
        self._lines.append(data)
        for writer in self._open_writers():
            writer.write(data)

    def remove(self, line: str, notice: str) -> None:
        """Take a line back, and write a notice of it to those that have read it."""
        self._lines.remove(line.encode() + b"\n")
        for writer in self._open_writers():
            writer.write(notice.encode() + b"\n")

    def end(self) -> None:
        """End the feed: no more lines follow."""
        self._is_ended = True
        for writer in self._open_writers():
            writer.close()

    def attach(self, writer: StreamWriter) -> None:
        """Add a reader. The feed owns its pipe from now on."""
        for line in self._lines:
            writer.write(line)
        if self._is_ended:
            writer.close()
        else:
            self._writers.append(writer)

    def _open_writers(self) -> list[StreamWriter]:
        self._writers = [writer for writer in self._writers if not writer.is_closing()]
        return self._writers
