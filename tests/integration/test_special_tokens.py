"""A text that has the tokenizer's special tokens already does not get them twice where its sender
says so: the SDK's way of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, processors

from baton.client import Client
from tests.support.live_tiers import live_system
from tests.support.oracle_model import make_oracle_model

FIRST = "<|im_start|>"


async def test_special_tokens_are_left_out_where_that_is_asked_for(tmp_path: Path) -> None:
    folder = make_oracle_model(tmp_path)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first = tokenizer.token_to_id(FIRST) or 0
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{FIRST} $0", special_tokens=[(FIRST, first)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    text = f"{FIRST}user"
    own = tokenizer.encode(text, add_special_tokens=False).ids
    options = {"model": str(folder)}
    async with live_system(worker_options=options, gateway_options=options) as system:
        asynchronous = system.client
        with Client(system.gateway, max_retries=0) as synchronous:
            for adds, ids in ((True, [first, *own]), (False, own)):
                tokenized = [
                    await asynchronous.tokenize(text, add_special_tokens=adds),
                    await asyncio.to_thread(synchronous.tokenize, text, add_special_tokens=adds),
                ]
                assert [list(each.token_ids) for each in tokenized] == [ids, ids]
                drawn: dict[str, Any] = {"add_special_tokens": adds, "max_tokens": 4, "seed": 7}
                answers = [
                    await asynchronous.generate(text, **drawn),
                    await asyncio.to_thread(synchronous.generate, text, **drawn),
                    await asynchronous.generate(ids, max_tokens=4, seed=7),
                ]
                assert {each.usage.prompt_tokens for each in answers} == {len(ids)}
                assert len({each.token_ids for each in answers}) == 1
