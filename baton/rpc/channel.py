"""Client channels: one set of options, for which baton.rpc.server grants the matching
permissions."""

from __future__ import annotations

from typing import TypeAlias

import grpc
import grpc.aio

from baton.rpc.tls import TlsFiles, client_credentials

Options: TypeAlias = tuple[tuple[str, int | str], ...]

MAX_MESSAGE_BYTES = 12 * 2**20
"""Maximum message size in either direction: fits a text of 10 MB, or a million token ids. Limited
because a text is decoded in one call, which delays all other streams: 60 ms for 16 MiB beyond
ASCII."""

MAX_CONCURRENT_STREAMS = 100
"""Maximum concurrent calls per connection at a server. With 256 or more, a client that keeps
opening and resetting streams makes the server of grpc 1.85 cancel other clients' calls
(tests/security/test_rapid_reset.py)."""

KEEPALIVE_MS = 2000
"""Milliseconds of silence before a peer is pinged, and again until it counts as lost: at most 4 s
in all."""

CLIENT_KEEPALIVE_MS = 5000
"""Replaces KEEPALIVE_MS on connections to gateways. Longer, because a gateway may pause for
seconds, on a busy or migrating machine, and its streams have no other gateway to continue on."""


def common_options(keepalive_ms: int = KEEPALIVE_MS) -> Options:
    """Options of both ends. keepalive_ms: replaces KEEPALIVE_MS."""
    return (
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", keepalive_ms),
        # Without it, a frozen peer is detected only after a minute, despite the two options above.
        ("grpc.http2.ping_timeout_ms", keepalive_ms),
        ("grpc.http2.max_pings_without_data", 0),
    )


_CHANNEL_OPTIONS: Options = (
    # Workers and gateways are addressed directly: never use the environment's proxy.
    ("grpc.enable_http_proxy", 0),
    # A connection per channel: the back-off of one channel must not delay another.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2000),
    # Also the timeout of one connection attempt, since the kernel of a frozen peer still accepts
    # connections.
    ("grpc.min_reconnect_backoff_ms", 4000),
    # Calls fail at once; their callers retry, since only they have the output received so far.
    ("grpc.enable_retries", 0),
)


def aio_channel(
    address: str,
    tls: TlsFiles | None = None,
    *,
    receive_window_bytes: int | None = None,
    keepalive_ms: int = KEEPALIVE_MS,
) -> grpc.aio.Channel:
    """A channel to "host:port" for the running event loop. It connects on first use; the caller
    closes it.

    tls: None for plain text. The files are read now; raises ConfigError.
    receive_window_bytes: how far the peer's side of a stream may be ahead of the reader; one
    message may be larger. By default gRPC chooses: initially 64 KiB, later the bandwidth-delay
    product.
    keepalive_ms: see common_options.
    """
    options = channel_options(tls, keepalive_ms)
    if receive_window_bytes is not None:
        window = (
            ("grpc.http2.lookahead_bytes", receive_window_bytes),
            # It would enlarge the window again.
            ("grpc.http2.bdp_probe", 0),
        )
        options = (*options, *window)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    return grpc.aio.secure_channel(address, client_credentials(tls), options=options)


def sync_channel(
    address: str, tls: TlsFiles | None = None, *, keepalive_ms: int = KEEPALIVE_MS
) -> grpc.Channel:
    """As aio_channel, thread-safe."""
    options = channel_options(tls, keepalive_ms)
    if tls is None:
        return grpc.insecure_channel(address, options=options)
    return grpc.secure_channel(address, client_credentials(tls), options=options)


def channel_options(tls: TlsFiles | None = None, keepalive_ms: int = KEEPALIVE_MS) -> Options:
    """The options of a channel."""
    options = (*common_options(keepalive_ms), *_CHANNEL_OPTIONS)
    if tls is None or not tls.server_name:
        return options
    return (*options, ("grpc.ssl_target_name_override", tls.server_name))
