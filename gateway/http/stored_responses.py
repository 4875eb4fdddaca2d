"""/v1/responses of a gateway that keeps answers: `previous_response_id`, `background`, and the
paths of an answer that was made."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

from baton.errors import BatonError
from baton.rpc.api_key import shown_digest
from gateway.http.connection import HttpRequest, HttpResponse
from gateway.http.errors import HttpError, http_error, invalid, shown_value
from gateway.http.format import Door, MakeFormat, send_json
from gateway.http.generation import Generation
from gateway.http.requests import ModelBody
from gateway.http.response_store import MAX_ENTRY_BYTES, ResponseStore
from gateway.http.responses import Kept, ResponsesBody, ResponsesFormat

#: Prefix of the paths of kept answers.
RESPONSES = "/v1/responses/"

_CANCEL = "/cancel"

Run = Callable[[Generation], Awaitable[object]]
Generate = Callable[[ModelBody, MakeFormat, HttpRequest, HttpResponse, Run], Awaitable[None]]
_Handler = Callable[[HttpRequest, HttpResponse], Awaitable[None]]


class StoredResponses:
    """Handlers of /v1/responses and the paths below it. An API key is an owner of answers."""

    def __init__(
        self, door: Door, generate: Generate, store: ResponseStore, *, has_owners: bool
    ) -> None:
        """generate: makes an answer; HttpApp's. has_owners: false without API keys, where a key
        that a client shows means nothing, and answers have one owner."""
        self._door = door
        self._generate = generate
        self._store = store
        self._has_owners = has_owners
        self._running: dict[str, asyncio.Task[None]] = {}
        """Answers that are made in the background, by id."""

    @property
    def running(self) -> Collection[asyncio.Task[None]]:
        """Answers that are made in the background."""
        return self._running.values()

    def methods(self, path: str) -> Mapping[str, _Handler]:
        """Handlers of a path below RESPONSES."""
        if path.removeprefix(RESPONSES).endswith(_CANCEL):
            return {"POST": self._cancel}
        return {"GET": self._get, "DELETE": self._delete}

    async def create(self, request: HttpRequest, response: HttpResponse) -> None:
        """Make an answer, and keep it unless `store` is false."""
        owner, is_large = self._owner(request), len(request.body) > MAX_ENTRY_BYTES
        body = await self._door.parsed(ResponsesBody, request, response)
        earlier = self._earlier(owner, body)
        if body.store is False or is_large:
            if body.background:
                limit = f"and the request has at most {MAX_ENTRY_BYTES} bytes"
                fault = f"background can only be used when `store` is true, {limit}; wait for it"
                raise invalid("background", fault)
            await self._make(body, Kept(earlier), request, response)
        elif body.background:
            await self._make_behind(owner, body, earlier, request, response)
        else:
            await self._make(body, Kept(earlier, self._keeps(owner)), request, response)

    def _owner(self, request: HttpRequest) -> bytes:
        return shown_digest(request.headers) if self._has_owners else b""

    def _keeps(self, owner: bytes) -> Callable[[Mapping[str, Any], Sequence[Any]], None]:
        return lambda document, items: self._store.put(owner, document["id"], document, items)

    async def _make(
        self,
        body: ResponsesBody,
        kept: Kept,
        request: HttpRequest,
        response: HttpResponse,
        run: Run = Generation.run,
    ) -> None:
        make = functools.partial(ResponsesFormat, kept=kept)
        await self._generate(body, make, request, response, run)

    async def _make_behind(
        self,
        owner: bytes,
        body: ResponsesBody,
        earlier: Sequence[Any],
        request: HttpRequest,
        response: HttpResponse,
    ) -> None:
        """Answer once the request is admitted, and go on without the client. A request that is not
        admitted fails as any other."""
        if body.stream:
            raise invalid("background", "goes without stream; leave out one of them")
        begun = asyncio.get_running_loop().create_future()

        def on_begin(queued: Mapping[str, Any]) -> None:
            self._running[queued["id"]] = task
            self._store.put(owner, queued["id"], {**queued, "status": "in_progress"}, None)
            begun.set_result(queued)

        kept = Kept(earlier, self._keeps(owner), on_begin)
        made = self._make(body, kept, request, response, Generation.whole)
        task = asyncio.create_task(self._watched(owner, begun, made))
        try:
            await asyncio.wait((task, begun), return_when=asyncio.FIRST_COMPLETED)
        except asyncio.CancelledError:
            if not begun.done():  # nobody knows its id
                task.cancel()
            raise
        if not begun.done():
            await task
        await send_json(begun.result(), request, response)

    async def _watched(
        self, owner: bytes, begun: asyncio.Future[Mapping[str, Any]], made: Awaitable[None]
    ) -> None:
        """Wait for an answer, and keep how it ended if it failed."""
        status, message = "failed", "the server's log has the cause"
        try:
            await made
            status = "completed"
        except BatonError as error:
            if not begun.done():
                raise
            message = error.message
        except asyncio.CancelledError:
            status = "cancelled"
            raise
        finally:
            if begun.done():
                queued = begun.result()
                self._running.pop(queued["id"], None)
                if status != "completed":
                    fault = {"code": "server_error", "message": message}
                    error_of = {"error": fault if status == "failed" else None}
                    ended = {**queued, "status": status, **error_of}
                    self._store.put(owner, queued["id"], ended, None)

    def _earlier(self, owner: bytes, body: ResponsesBody) -> Sequence[Any]:
        """Items of the conversation that the request continues."""
        field, response_id = "previous_response_id", body.previous_response_id
        if response_id is None:
            return ()
        items = self._store.items(owner, response_id)
        if items is not None:
            return items
        document = self._store.document(owner, response_id)
        if document is None:
            raise _not_found(response_id, field)
        status = json.loads(document)["status"]
        fault = f"{shown_value(response_id)}: is {status}; give that of a completed answer"
        raise invalid(field, fault)

    def _found(self, request: HttpRequest) -> tuple[bytes, str, str]:
        """Owner, id, and the answer as JSON. Raises HttpError."""
        owner = self._owner(request)
        response_id = unquote(request.path.removeprefix(RESPONSES).removesuffix(_CANCEL))
        document = self._store.document(owner, response_id)
        if document is None:
            raise _not_found(response_id)
        return owner, response_id, document

    async def _get(self, request: HttpRequest, response: HttpResponse) -> None:
        *_, document = self._found(request)
        await send_json(document, request, response)

    async def _delete(self, request: HttpRequest, response: HttpResponse) -> None:
        owner, response_id, _ = self._found(request)
        if (task := self._running.get(response_id)) is not None:
            task.cancel()
            await asyncio.wait((task,))
        self._store.drop(owner, response_id)
        deleted = {"id": response_id, "object": "response", "deleted": True}
        await send_json(deleted, request, response)

    async def _cancel(self, request: HttpRequest, response: HttpResponse) -> None:
        _, response_id, document = self._found(request)
        if (task := self._running.get(response_id)) is not None:
            task.cancel()
            await asyncio.wait((task,))
            *_, document = self._found(request)
        elif not json.loads(document)["background"]:
            fault = "Cannot cancel a synchronous response."
            raise http_error(HTTPStatus.BAD_REQUEST, fault, param="response_id")
        await send_json(document, request, response)


def _not_found(response_id: str, param: str = "response_id") -> HttpError:
    fault = (
        f"Response with id '{response_id[:128]}' not found. Answers are kept for some time only, "
        "for the key that asked, and not with store: false; send the whole conversation as input"
    )
    return http_error(HTTPStatus.NOT_FOUND, fault, param=param)
