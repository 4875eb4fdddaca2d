"""pytest plugin for vLLM's tests of its HTTP API, unmodified, against another server: stands in for
vLLM's package, of which these tests take names, and for tests/utils.py, which starts servers.

Tests that start no server are of vLLM's own classes, and are left out.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import anthropic
import openai
import pytest
import requests
from transformers import PreTrainedTokenizerFast

_FOLDER = Path(os.environ["SCRIPTED_MODEL"])
_START_S = 120.0


class RemoteOpenAIServer:
    """Starts `vllm serve`, as of vLLM's tests/utils.py."""

    DUMMY_API_KEY = "token-abc123"

    def __init__(
        self,
        model: str,
        vllm_serve_args: Sequence[str],
        *,
        env_dict: dict[str, str] | None = None,
        max_wait_seconds: float | None = None,  # noqa: ARG002
        **_unused: Any,
    ) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.host, self.port = free.getsockname()
        command = ["vllm", "serve", model, *vllm_serve_args, "--port", str(self.port)]
        self.proc = subprocess.Popen(command, env={**os.environ, **(env_dict or {})})
        self.url_root = f"http://{self.host}:{self.port}"
        deadline = time.monotonic() + _START_S
        while not self._is_up():
            if self.proc.poll() is not None or time.monotonic() > deadline:
                self.proc.kill()
                raise RuntimeError("the server did not start")
            time.sleep(0.2)

    def _is_up(self) -> bool:
        try:
            return requests.get(self.url_for("health"), timeout=5).status_code == 200
        except (requests.ConnectionError, requests.Timeout):
            return False

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.proc.terminate()
        self.proc.wait(30)

    def url_for(self, *parts: str) -> str:
        return "/".join((self.url_root, *(part.strip("/") for part in parts)))

    def get_client(self, **kwargs: Any) -> Any:
        return openai.OpenAI(**self._options("v1"), **{"timeout": 60, **kwargs})

    def get_async_client(self, **kwargs: Any) -> Any:
        return openai.AsyncOpenAI(**self._options("v1"), **{"timeout": 60, **kwargs})

    def get_client_anthropic(self, **kwargs: Any) -> Any:
        return anthropic.Anthropic(**self._options(), **{"timeout": 60, **kwargs})

    def get_async_client_anthropic(self, **kwargs: Any) -> Any:
        return anthropic.AsyncAnthropic(**self._options(), **{"timeout": 60, **kwargs})

    def _options(self, *path: str) -> dict[str, Any]:
        return {
            "base_url": self.url_for(*path),
            "api_key": self.DUMMY_API_KEY,
            "max_retries": 0,
        }


def get_tokenizer(*_: object, **__: object) -> Any:
    """The scripted model's, whatever model is named."""
    return PreTrainedTokenizerFast.from_pretrained(str(_FOLDER))


class _ModelConfig:
    def __init__(self, **_: object) -> None:
        pass

    def get_vocab_size(self) -> int:
        return len(get_tokenizer())


class _Name:
    """A name of vLLM's that a test imports; not to be used without a server."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Name()

    def __call__(self, *_: object, **__: object) -> Any:
        return _Name()

    def __bool__(self) -> bool:
        return False

    def __mro_entries__(self, _: object) -> tuple[type, ...]:
        return ()


class _HubApi:
    def snapshot_download(self, *_: object, **__: object) -> str:
        return str(_FOLDER)


def _only_with(*_: object, **__: object) -> Any:
    """A mark of tests that need devices."""
    return pytest.mark.skip("needs devices")


_KNOWN: dict[str, Any] = {
    "vllm.tokenizers.get_tokenizer": get_tokenizer,
    "vllm.config.ModelConfig": _ModelConfig,
    "vllm.transformers_utils.repo_utils.hf_api": _HubApi,
    "vllm.model_executor.model_loader.weight_utils.download_weights_from_hf": (
        lambda *_, **__: str(_FOLDER)
    ),
    "vllm.exceptions.VLLMValidationError": ValueError,
    "vllm.version.__version__": os.environ["SERVER_VERSION"],
    "tests.utils.RemoteOpenAIServer": RemoteOpenAIServer,
    "tests.utils.VLLM_PATH": Path(os.environ["VLLM_TESTS"]),
    "tests.utils.ROCM_EXTRA_ARGS": [],
    "tests.utils.multi_gpu_only": _only_with,
    "torch.iinfo": lambda _: _Limits,
    "tests.utils.requires_fp8": _only_with(),
}


class _Module(ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        known = _KNOWN.get(f"{self.__name__}.{name}")
        if known is None and (name == "pytestmark" or name.startswith("__")):
            raise AttributeError(name)
        return _Name() if known is None else known


class _Finder:
    """Finds vLLM's modules, and tests.utils, as modules of names."""

    def find_spec(self, name: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        if name == "vllm" or name.startswith("vllm.") or name == "tests.utils":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)  # type: ignore[arg-type]
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Limits:
    min, max = -(2**63), 2**63 - 1


sys.meta_path.insert(0, _Finder())  # type: ignore[arg-type]
#: Tests with a server take the limits of numbers from it alone.
sys.modules["torch"] = _Module("torch")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests without a server."""
    served = [item for item in items if _has_server(item)]
    config.hook.pytest_deselected(items=[item for item in items if item not in served])
    items[:] = served


def _has_server(item: pytest.Item) -> bool:
    if isinstance(item, pytest.Function):
        if {"server", "client"} & set(item.fixturenames):
            return True
        return RemoteOpenAIServer.__name__ in inspect.getsource(item.function)
    return False
