"""A conversation with a call of a tool, by LiteLLM. Argument: the base URL."""

import json
import os
import sys
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would ask the internet, three times
import litellm
from weather import WEATHER


def complete(messages: list[Any], **options: Any) -> Any:
    return litellm.completion(
        model="openai/bundled",
        api_base=sys.argv[1],
        api_key="none",
        messages=messages,
        temperature=0,
        max_tokens=64,
        num_retries=0,
        **options,
    )


messages: list[Any] = [{"role": "user", "content": "How is the weather in Paris?"}]
choice = complete(messages, tools=[WEATHER], tool_choice="required").choices[0]
assert choice.finish_reason == "tool_calls"
for call in choice.message.tool_calls:
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")

messages.append(choice.message)
messages += [
    {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    for call in choice.message.tool_calls
]
final = complete(messages)
assert final.usage.completion_tokens > 0
pieces = complete(messages, stream=True)
text = "".join(piece.choices[0].delta.content or "" for piece in pieces)
assert text == final.choices[0].message.content
