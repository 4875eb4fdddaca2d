"""LangChain's standard tests of a chat model, for ChatOpenAI at BASE_URL."""

import os
from typing import Any

from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChatOpenAI(ChatModelIntegrationTests):
    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {
            "base_url": os.environ["BASE_URL"],
            "api_key": "none",
            "model": "scripted",
            "stream_usage": True,
            "max_retries": 0,
        }

    @property
    def supports_json_mode(self) -> bool:
        return True

    @property
    def supports_anthropic_inputs(self) -> bool:
        return True

    @property
    def supports_model_override(self) -> bool:
        return True

    @property
    def model_override_value(self) -> str:
        return "scripted"


class TestChatOpenAIResponses(TestChatOpenAI):
    """The same by /v1/responses."""

    @property
    def chat_model_params(self) -> dict[str, Any]:
        return {**super().chat_model_params, "use_responses_api": True}
