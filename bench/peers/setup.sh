#!/usr/bin/env bash
# Build the peers that Baton does not depend on, in an environment of their own beside this file: bench/peers/.venv.
# llama.cpp is compiled from source for this machine's CPU: it takes a C++ compiler, cmake and some minutes. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=bench/peers/.venv
llama_cpp=llama-cpp-python==0.3.36
gguf=gguf==0.19.0

if ! "$venv/bin/python" -c "import llama_cpp, gguf" >/dev/null 2>&1; then
    rm -rf "$venv"
    "${PYTHON:-.venv/bin/python}" -m venv "$venv"
    echo "bench/peers/setup.sh: building $llama_cpp" >&2
    CMAKE_ARGS="-DGGML_NATIVE=ON -DLLAVA_BUILD=OFF" \
        "$venv/bin/python" -m pip install --quiet --no-binary llama-cpp-python "$llama_cpp" "$gguf"
fi
"$venv/bin/python" -c "import gguf, llama_cpp; print('llama-cpp-python', llama_cpp.__version__)"
