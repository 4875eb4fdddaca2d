"""Restricts the callers of a worker: a certificate of its authority must also carry one of the
configured names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from baton.errors import PermissionDenied
from baton.rpc.interceptor import Continuation, Handler, with_behavior

_ALT_NAMES_KEY = "x509_subject_alternative_name"


def check_peer_names(names: Iterable[str], shown: Iterable[str]) -> None:
    """Raise PermissionDenied unless one of the certificate's names is in `names`.

    Both are DNS names or URIs, as in subjectAltName, compared case-insensitively and without
    wildcards.
    """
    wanted, found = sorted(names), sorted(shown)
    if {name.lower() for name in wanted}.isdisjoint(name.lower() for name in found):
        raise PermissionDenied(
            f"the certificate shown is made out to {', '.join(found) or 'nobody'}, and this worker "
            f"works with those made out to {' or '.join(wanted)} alone (--ssl-peer-names)"
        )


class PeerNamesInterceptor(grpc.aio.ServerInterceptor):
    """Refuses all calls of peers without one of the names in their certificate.

    Must be placed behind ErrorInterceptor, which converts the refusal into a status.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._wrapped: dict[Handler, Handler] = {}
        """Wrapped handlers, by original. A server has few, which never change."""

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Return the handler behind the check, which runs at the call, when the peer is known."""
        handler = await continuation(handler_call_details)
        if handler is not None and handler not in self._wrapped:
            self._wrapped[handler] = with_behavior(handler, self._checked)
        return handler and self._wrapped[handler]

    def _checked(self, behavior: Callable[[Any, Any], Any]) -> Any:
        def call(request: Any, context: Any) -> Any:
            shown = context.auth_context().get(_ALT_NAMES_KEY, ())
            check_peer_names(self._names, [name.decode(errors="replace") for name in shown])
            return behavior(request, context)

        return call
