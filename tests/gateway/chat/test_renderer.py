"""The renderer process: rendering as transformers does it, and its end when it takes too long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys

import pytest

from baton.errors import EngineFault, InvalidRequest
from gateway.chat.renderer import ChatRenderer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'refused' %}{{ raise_exception('this role is refused') }}{% endif %}"
    "{% if m.role == 'endless' %}{% for a in range(9999) %}{% for b in range(9999) %}"
    "{% for c in range(9999) %}{% endfor %}{% endfor %}{% endfor %}{% endif %}"
    "[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


async def test_conversations_are_rendered_or_refused_and_the_process_outlives_both() -> None:
    renderer = ChatRenderer(TEMPLATE, {"bos_token": "<s>"}, render_timeout_s=300.0)
    try:
        await renderer.start()
        messages = [("system", "Be brief."), ("user", 'héllo\n"quoted" {{ 1 }} 你好')]
        text = await renderer.render(messages)
        assert text == ('<s>[system] Be brief.\n[user] héllo\n"quoted" {{ 1 }} 你好\n[assistant]')
        with pytest.raises(InvalidRequest, match="this role is refused") as caught:
            await renderer.render([("refused", "x")])
        assert caught.value.violations[0].field == "prompt.chat"
        # Many at once get each their own.
        texts = await asyncio.gather(*(renderer.render([("user", str(i))]) for i in range(20)))
        assert texts == [f"<s>[user] {i}\n[assistant]" for i in range(20)]
    finally:
        await renderer.close()


@pytest.mark.slow
async def test_a_template_that_does_not_end_is_killed_and_others_are_served() -> None:
    renderer = ChatRenderer(TEMPLATE, {}, render_timeout_s=1.0)
    try:
        with pytest.raises(InvalidRequest, match="took more than 1 s"):
            await renderer.render([("endless", "x")])
        assert await renderer.render([("user", "x")]) == "[user] x\n[assistant]"
    finally:
        await renderer.close()


@pytest.mark.slow
async def test_a_template_that_takes_all_memory_is_refused_and_others_are_served() -> None:
    """Found by tests/fuzz: a number in a template is enough."""
    indented = "{{ messages | tojson(indent=2222222222) }}"
    greedy = f"{{% if messages[0].role == 'greedy' %}}{indented}{{% endif %}}"
    renderer = ChatRenderer(greedy + TEMPLATE, {}, render_timeout_s=300.0)
    try:
        with pytest.raises(InvalidRequest, match="MemoryError"):
            await renderer.render([("greedy", "x")])
        assert await renderer.render([("user", "x")]) == "[user] x\n[assistant]"
    finally:
        await renderer.close()


@pytest.mark.slow
async def test_a_render_that_nobody_is_left_to_kill_ends_by_itself() -> None:
    start = {"template": TEMPLATE, "special_tokens": {}, "answer_timeout_s": 0.2}
    endless = {"messages": [{"role": "endless", "num_chars": 1}], "text": "x"}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "gateway.chat.template", stdin=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(f"{json.dumps(start)}\n{json.dumps(endless)}\n".encode())
    assert await process.wait() == -signal.SIGALRM


@pytest.mark.slow
async def test_an_answer_never_goes_to_another_after_a_cancel() -> None:
    renderer = ChatRenderer(TEMPLATE, {}, render_timeout_s=300.0)
    try:
        await renderer.render([("user", "warm")])
        first = asyncio.create_task(renderer.render([("user", "x" * 100_000)]))
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        assert await renderer.render([("user", "mine")]) == "[user] mine\n[assistant]"
    finally:
        await renderer.close()


@pytest.mark.slow
async def test_a_renderer_that_dies_fails_one_request_at_most() -> None:
    renderer = ChatRenderer(TEMPLATE, {}, render_timeout_s=300.0)
    try:
        await renderer.render([("user", "warm")])
        pid = renderer.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(EngineFault):
            await renderer.render([("user", "x")])
        assert await renderer.render([("user", "x")]) == "[user] x\n[assistant]"
    finally:
        await renderer.close()


async def test_a_broken_template_is_the_requests_error_not_a_crash() -> None:
    renderer = ChatRenderer("{% for %}", {}, render_timeout_s=300.0)
    try:
        with pytest.raises(InvalidRequest, match="TemplateSyntaxError"):
            await renderer.render([("user", "x")])
    finally:
        await renderer.close()
