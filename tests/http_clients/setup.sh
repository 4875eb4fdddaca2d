#!/usr/bin/env bash
# Install what the tests of this folder run against Baton's HTTP, unmodified, in environments of their own beside this file:
# load tools (.venv-load, about 2 GB with torch, which guidellm and vLLM import), frameworks (.venv-frameworks), Open WebUI
# (.venv-open-webui, 0.8 GB), and, for `python -m tests.http_clients.run`, vLLM's tests (.venv-vllm, .vllm) and llama.cpp's
# (.venv-llama_cpp, .llama_cpp).
# Baton depends on none of it. Safe to run again. TORCH_INDEX_URL: as for scripts/venv.sh.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-python3}
torch_index=${TORCH_INDEX_URL:+--index-url=$TORCH_INDEX_URL}

made() { # made NAME: is there an environment of just these packages?
    cmp --quiet "$1.txt" ".venv-$1/installed.txt"
}

make() { # make NAME: an empty one
    echo "tests/http_clients/setup.sh: installing .venv-$1" >&2
    rm -rf ".venv-$1"
    "$python" -m venv ".venv-$1"
}

if ! made load; then
    make load
    # shellcheck disable=SC2086 # no index is no argument
    .venv-load/bin/pip install --quiet $torch_index "torch>=2.11,<=2.13.0"
    .venv-load/bin/pip install --quiet "setuptools>=77,<81" setuptools-scm setuptools-rust wheel packaging cmake ninja jinja2 numpy
    grep -v ^vllm load.txt | .venv-load/bin/pip install --quiet --requirement /dev/stdin
    # From source for no device, and without what it needs to serve models: `vllm bench serve` is a client.
    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.33.0 .venv-load/bin/pip install --quiet --no-deps --no-build-isolation --no-binary vllm $(grep ^vllm load.txt)
    cp load.txt .venv-load/installed.txt
fi
if ! made vllm; then
    make vllm
    .venv-vllm/bin/pip install --quiet --requirement vllm.txt
    # Only its tests, and the chat templates that they name; tests/conftest.py and tests/utils.py need vLLM's engine.
    rm -rf .vllm
    mkdir .vllm
    (cd .vllm && ../.venv-vllm/bin/unearth --no-binary --download . "vllm==0.33.0" >/dev/null)
    tar -xzf .vllm/vllm-0.33.0.tar.gz -C .vllm --strip-components=1 --wildcards "*/tests/entrypoints" "*/tests/__init__.py" "*/examples/*.jinja" \
        "*/nixl_integration/test_edge_cases.py" "*/nixl_integration/test_disagg_accuracy.py"
    rm .vllm/vllm-0.33.0.tar.gz
    cp vllm.txt .venv-vllm/installed.txt
fi
if ! made llama_cpp; then
    make llama_cpp
    .venv-llama_cpp/bin/pip install --quiet --requirement llama_cpp.txt
    rm -rf .llama_cpp
    mkdir .llama_cpp
    (cd .llama_cpp && ../.venv-llama_cpp/bin/unearth --no-binary --download . "llama-cpp-python==0.3.36" >/dev/null)
    tar -xzf .llama_cpp/llama_cpp_python-0.3.36.tar.gz -C .llama_cpp --strip-components=6 --wildcards "*/tools/server/tests/*"
    rm .llama_cpp/llama_cpp_python-0.3.36.tar.gz
    cp llama_cpp.txt .venv-llama_cpp/installed.txt
fi
if ! made frameworks; then
    make frameworks
    .venv-frameworks/bin/pip install --quiet --requirement frameworks.txt
    cp frameworks.txt .venv-frameworks/installed.txt
fi
if ! made open-webui; then
    make open-webui
    # What its slim image has, which the wheel lists: without torch, and without models of its own.
    .venv-open-webui/bin/pip install --quiet --no-deps --requirement open-webui.txt
    .venv-open-webui/bin/pip install --quiet --requirement .venv-open-webui/lib/python3*/site-packages/requirements-slim.txt
    cp open-webui.txt .venv-open-webui/installed.txt
fi
