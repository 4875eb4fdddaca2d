"""Who may call a worker: of all that have a certificate of its authority, those whose certificate
carries one of some names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import grpc
import grpc.aio

from baton.errors import PermissionDenied
from baton.rpc.interceptor import Continuation, Handler, with_behavior

_ALT_NAMES_KEY = "x509_subject_alternative_name"


def check_peer_names(names: Iterable[str], shown: Iterable[str]) -> None:
    """Raises PermissionDenied unless one of the names that a peer's certificate shows is one of
    `names`.

    Both are DNS names or URIs, as in subjectAltName, compared without regard to case, and without
    wildcards.
    """
    wanted, found = sorted(names), sorted(shown)
    if {name.lower() for name in wanted}.isdisjoint(name.lower() for name in found):
        raise PermissionDenied(
            f"the certificate shown is made out to {', '.join(found) or 'nobody'}, and this worker "
            f"works with those made out to {' or '.join(wanted)} alone (--ssl-peer-names)"
        )


class PeerNamesInterceptor(grpc.aio.ServerInterceptor):
    """Refuses whose certificate carries none of the names, whatever is called.

    To stand behind ErrorInterceptor, which makes the refusal a status.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = tuple(names)
        self._wrapped: dict[Handler, Handler] = {}
        """By the handlers, of which a server has a few that stay the same."""

    async def intercept_service(
        self,
        continuation: Continuation,
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """The handler behind the check: who calls is known when it is called, and not before."""
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
