"""A conversation with a call of a tool, by LangChain. Argument: the base URL."""

import sys
from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


llm = ChatOpenAI(
    base_url=sys.argv[1], api_key="none", model="bundled", temperature=0, max_completion_tokens=64
)
asked = HumanMessage("How is the weather in Paris?")

caller = llm.bind_tools([weather], tool_choice="required", strict=True, parallel_tool_calls=False)
message = caller.invoke([asked])
(call,) = message.tool_calls
answer = weather.invoke(call)
assert answer.content in ("sunny in Paris", "sunny in Rome")

pieces = list(caller.stream([asked]))
whole = pieces[0]
for piece in pieces[1:]:
    whole += piece
assert [(c["name"], c["args"]) for c in whole.tool_calls] == [(call["name"], call["args"])]

conversation = [asked, message, answer]
final = llm.invoke(conversation)
assert final.usage_metadata["output_tokens"] > 0
assert "".join(str(piece.content) for piece in llm.stream(conversation)) == final.content
