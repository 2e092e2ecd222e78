#!/usr/bin/env bash
# The packages: python.sh PYTHON PREFIX REQUIREMENTS makes a virtual environment at PREFIX and installs what the file lists.
# PIP_INSTALL_OPTIONS="--dry-run" resolves and installs nothing.
set -euo pipefail
python="$1" prefix="$2" requirements="$3"
read -r -a options <<< "${PIP_INSTALL_OPTIONS:-}"
"$python" -m venv "$prefix"
"$prefix/bin/python" -m pip install --disable-pip-version-check --no-cache-dir "${options[@]}" --requirement "$requirements"
