"""Several models on one gateway: each request goes to its own, by name, over both doors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from baton.client import AsyncClient
from baton.errors import InvalidRequest, ModelNotFound, NoWorkers
from baton.service import ReadyReport
from gateway.server import serve_gateway
from tests.openai_api.test_raw_http import fetch
from tests.support.live_tiers import (
    decode_worker,
    options_of_gateway,
    prefill_worker,
    reporting,
)
from tests.support.oracle_model import make_oracle_model

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

#: A template of its own: the other model has none.
PROMPT = "the rain " * 30


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ReadyReport]:
    """Two pairs, `big` and `small`, with different vocabularies and contexts."""
    folder = make_oracle_model(tmp_path_factory.mktemp("model"))
    bare = make_oracle_model(tmp_path_factory.mktemp("bare"))
    (bare / "chat_template.jinja").unlink()
    async with AsyncExitStack() as stack:
        prefills, decodes = [], []
        for name, more in (("big", {}), ("small", {"max_model_len": 300})):
            options = {"model": str(folder), "served_model_name": name, **more}
            prefill = prefill_worker(worker_id=f"p-{name}", **options)
            decode = decode_worker(worker_id=f"d-{name}", **options, max_local_prefill_tokens=0)
            prefills.append(await stack.enter_async_context(prefill))
            decodes.append(await stack.enter_async_context(decode))
        options = options_of_gateway(
            prefills,
            decodes,
            model=str(folder),
            served_model_name="big",
            more_models=f"small={bare}",
            served_model_aliases="gpt-4o,tiny=small",
        )
        yield await stack.enter_async_context(reporting(serve_gateway, options))


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: ReadyReport) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(gateway.address, max_retries=0) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def http(gateway: ReadyReport) -> AsyncIterator[openai.AsyncOpenAI]:
    url = f"http://{gateway.http_address}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as made:
        yield made


@pytest.mark.parametrize(
    ("name", "pair"), [("big", "big"), ("gpt-4o", "big"), ("small", "small"), ("tiny", "small")]
)
async def test_a_request_is_served_by_its_models_own_pair(
    client: AsyncClient, http: openai.AsyncOpenAI, name: str, pair: str
) -> None:
    done = await client.generate(PROMPT, model=name, temperature=0, max_tokens=6, ignore_eos=True)
    assert (done.timing.prefill_worker, done.timing.decode_worker) == (f"p-{pair}", f"d-{pair}")
    answer = await http.completions.create(
        model=name,
        prompt=PROMPT,
        temperature=0,
        max_tokens=6,
        extra_body={"ignore_eos": True, "return_timing": True},
    )
    assert answer.model == name
    assert answer.choices[0].text == done.choices[0].text
    assert (answer.model_extra or {})["timing"]["decode_worker"] == f"d-{pair}"


async def test_each_has_its_own_context_and_template(
    client: AsyncClient, http: openai.AsyncOpenAI
) -> None:
    long = [5] * 400
    await client.generate(long, model="big", max_tokens=1)
    with pytest.raises(InvalidRequest, match="299"):
        await client.generate(long, model="small", max_tokens=1)
    messages = [{"role": "user", "content": "x"}]
    await http.chat.completions.create(model="big", messages=messages, max_tokens=1)  # type: ignore[arg-type]
    with pytest.raises(openai.BadRequestError, match="no chat template"):
        await http.chat.completions.create(model="small", messages=messages, max_tokens=1)  # type: ignore[arg-type]


async def test_all_are_listed(
    client: AsyncClient, http: openai.AsyncOpenAI, gateway: ReadyReport
) -> None:
    listed = [model async for model in http.models.list()]
    assert [model.id for model in listed] == ["big", "gpt-4o", "small", "tiny"]
    assert [(model.model_extra or {})["root"] for model in listed] == [
        *("big", "big"),
        *("small", "small"),
    ]
    by_name = {model.name: model for model in await client.models()}
    assert {name: model.max_model_len for name, model in by_name.items()} == {
        "big": 4096,
        "small": 300,
    }
    for name, model in by_name.items():
        assert {w.worker_id for w in model.workers} == {f"p-{name}", f"d-{name}"}
    _, live = await fetch(gateway.http_address, "/page/live")
    document = json.loads(live)
    assert [model["name"] for model in document["models"]] == ["big", "small"]
    assert len(document["workers"]) == 4


async def test_no_name_and_unknown_names_are_refused_by_name(
    client: AsyncClient, http: openai.AsyncOpenAI, gateway: ReadyReport
) -> None:
    with pytest.raises(InvalidRequest, match="'big', 'small'") as caught:
        await client.generate("x", max_tokens=1)
    assert [violation.field for violation in caught.value.violations] == ["model"]
    with pytest.raises(ModelNotFound, match="there are 'big', 'small'"):
        await client.generate("x", model="nonesuch", max_tokens=1)
    with pytest.raises(openai.NotFoundError, match="there are 'big', 'small'") as missing:
        await http.completions.create(model="nonesuch", prompt="x")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    for path, asked in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
        ("/tokenize", {"prompt": "x"}),
        ("/detokenize", {"tokens": [5]}),
    ):
        response, body = await fetch(gateway.http_address, path, asked)
        assert response.status == 400
        assert "'big', 'small'" in json.loads(body)["error"]["message"]


async def test_a_worker_may_come_back_with_another_model(tmp_path: Path) -> None:
    """And one of a model that is not served is refused, and listed with its reason."""
    model = str(make_oracle_model(tmp_path))

    def worker(name: str, address: str) -> Any:
        port = int(address.rpartition(":")[2])
        return decode_worker(model=model, served_model_name=name, worker_id="d", port=port)

    async with AsyncExitStack() as stack:
        async with worker("a", ":0") as address:
            options = options_of_gateway(
                [], [address], model=model, served_model_name="a", more_models=f"b={model}"
            )
            report = await stack.enter_async_context(reporting(serve_gateway, options))
            client = await stack.enter_async_context(AsyncClient(report.address, max_retries=0))
            assert [w.state for w in (await client.model("a")).workers] == ["ready"]
            with pytest.raises(NoWorkers, match="before a decode worker of 'b' was reached"):
                await client.model("c")
        for name, state, reason in (("b", "ready", ""), ("c", "refused", "model")):
            async with worker(name, address):
                await until(client, state, reason)


async def test_each_may_have_parsers_of_its_own(tmp_path: Path) -> None:
    model = str(make_oracle_model(tmp_path))
    text = "<think>Hm.</think>So."
    async with AsyncExitStack() as stack:
        workers = [
            await stack.enter_async_context(decode_worker(model=model, served_model_name=name))
            for name in ("a", "b")
        ]
        options = options_of_gateway(
            [],
            workers,
            model=model,
            served_model_name="a",
            reasoning_parser="none",
            more_models=f"b={model}:reasoning_parser=qwen3",
        )
        report = await stack.enter_async_context(reporting(serve_gateway, options))
        for name, expected in (("a", (text, None)), ("b", ("So.", "Hm."))):
            asked = {
                "model": name,
                "messages": [{"role": "user", "content": "x"}],
                "max_tokens": 99,
                "structured_outputs": {"choice": [text], "enable_in_reasoning": True},
            }
            _, body = await fetch(report.http_address, "/v1/chat/completions", asked)
            message = json.loads(body)["choices"][0]["message"]
            assert (message["content"], message.get("reasoning_content")) == expected


async def until(client: AsyncClient, state: str, reason: str) -> None:
    """The only worker of `b`, or of an unknown model, is in a state for a reason."""
    async with asyncio.timeout(60):
        while True:
            workers = (await client.model("b")).workers
            if [worker.state for worker in workers] == [state] and reason in workers[0].reason:
                return
            await asyncio.sleep(0.02)
