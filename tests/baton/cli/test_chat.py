"""`baton chat`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from baton.client import ChatMessage
from baton.errors import Overloaded

if TYPE_CHECKING:
    from conftest import FakeClient

Run = Callable[..., Any]
Conversation = Callable[..., list[ChatMessage]]


def prompts(client: FakeClient) -> list[object]:
    return [prompt for prompt, _ in client.asked]


def test_the_conversation_is_kept(run: Run, client: FakeClient, conversation: Conversation) -> None:
    result = run("chat", stdin="one\ntwo\n")
    assert (result.exit_code, result.stdout) == (0, "Hello\nHello\n")
    assert prompts(client) == [conversation("one"), conversation("one", "Hello", "two")]


def test_reset_keeps_the_system_message_only(run: Run, client: FakeClient) -> None:
    run("chat", "--system", "be brief", stdin="one\n/reset\ntwo\n/exit\nthree\n")
    system = ChatMessage("system", "be brief")
    assert prompts(client) == [
        [system, ChatMessage("user", "one")],
        [system, ChatMessage("user", "two")],
    ]


def test_empty_lines_ask_nothing(run: Run, client: FakeClient) -> None:
    run("chat", stdin="\n   \n")
    assert client.asked == []


def test_ctrl_c_ends_the_answer_and_the_conversation_goes_on_with_what_there_was(
    run: Run, client: FakeClient, conversation: Conversation
) -> None:
    client.script = (client.script[0], KeyboardInterrupt())
    result = run("chat", stdin="one\ntwo\n")
    assert result.exit_code == 0
    assert all(stream.is_closed for stream in client.streams)
    assert prompts(client)[1] == conversation("one", "Hel", "two")


def test_a_failed_request_is_told_and_forgotten(
    run: Run, client: FakeClient, conversation: Conversation
) -> None:
    client.script = (Overloaded("full"),)
    result = run("chat", stdin="one\ntwo\n")
    assert result.exit_code == 0
    assert result.stderr.count("OVERLOADED: full") == 2
    assert prompts(client)[1] == conversation("two")
