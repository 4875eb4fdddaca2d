"""Frames of HTTP/2, byte by byte: for clients and servers that do what no library does."""

from __future__ import annotations

import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

#: Kinds of frames.
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8

#: Flags.
END_STREAM, ACK, END_HEADERS = 1, 1, 4

#: An error's code.
CANCEL = 8


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    """RFC 9113, 4.1."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header_block(path: str, **extra: str) -> bytes:
    """Header block of a gRPC call. RFC 7541, 6.2.2: literal fields that are not indexed, nothing
    compressed."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "x",
        "content-type": "application/grpc",
        "te": "trailers",
        **extra,
    }
    return b"".join(
        b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
        for name, value in fields.items()
    )
