"""All suites."""

from __future__ import annotations

from tests.http_clients.langchain_suite.suite import LANGCHAIN
from tests.http_clients.llama_cpp_suite.suite import LLAMA_CPP
from tests.http_clients.openresponses_suite.suite import OPENRESPONSES
from tests.http_clients.split_suite.suite import SPLIT
from tests.http_clients.vllm_suite.suite import VLLM

SUITES = (VLLM, SPLIT, LANGCHAIN, OPENRESPONSES, LLAMA_CPP)
