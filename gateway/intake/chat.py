"""Conversations to text, by the model's own template, in a process that is killed when it takes too
long."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.errors import BatonError, FieldViolation, InvalidRequest
from gateway.intake.child_process import ChildProcess, ChildSpec

RENDER_TIMEOUT_S = 5.0

_MAX_ERROR_CHARS = 300


class ChatRenderer:
    """One renderer process; one conversation at a time."""

    def __init__(
        self,
        template: str,
        special_tokens: Mapping[str, str],
        *,
        render_timeout_s: float = RENDER_TIMEOUT_S,
    ) -> None:
        self._render_timeout_s = render_timeout_s
        start_line = {"template": template, "special_tokens": dict(special_tokens)}
        self.process = ChildProcess(
            ChildSpec(
                "chat template renderer",
                "gateway.intake.chat_renderer",
                start_line,
                render_timeout_s,
            )
        )

    async def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The text of (role, content) messages, up to where the model is to answer.

        Raises InvalidRequest if the template refuses them or takes too long.
        """
        question = {
            "messages": [{"role": role, "num_chars": len(content)} for role, content in messages],
            "text": "".join(content for _, content in messages),
        }
        try:
            answer = await self.process.ask(question)
        except TimeoutError:
            raise _refusal(
                f"the chat template took more than {self._render_timeout_s:g} s for these "
                "messages; send fewer or shorter ones"
            ) from None
        if "error" in answer:
            raise _refusal(f"the chat template refuses them: {answer['error'][:_MAX_ERROR_CHARS]}")
        return str(answer["text"])

    async def start(self) -> None:
        """Start the process ahead of the first conversation, without waiting for it to be ready."""
        await self.process.start()

    async def close(self) -> None:
        """End the process."""
        await self.process.close()


def _refusal(description: str) -> BatonError:
    return InvalidRequest.of(FieldViolation("prompt.chat", description))
