#!/usr/bin/env bash
# askmany itself, without its requirements, which python.sh has installed: askmany.sh PREFIX SOURCE. Says what was installed.
set -euo pipefail
prefix="$1" source="$2"
wheel_folder="$(mktemp -d)"
"$prefix/bin/python" -m pip wheel --disable-pip-version-check --no-cache-dir --no-deps --quiet --wheel-dir "$wheel_folder" "$source"
"$prefix/bin/python" -m pip install --disable-pip-version-check --no-cache-dir --no-deps --quiet "$wheel_folder"/askmany-*.whl
rm -rf "$wheel_folder"
"$prefix/bin/python" -c 'import askmany; print("askmany", askmany.__version__)'
