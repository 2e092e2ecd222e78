#!/usr/bin/env bash
# Packages of the system: system.sh [MORE...]. wget is what KubeRay's health probes call; procps is for whoever looks inside.
# APT_GET_OPTIONS=--simulate resolves and installs nothing.
set -euo pipefail
read -r -a options <<< "${APT_GET_OPTIONS:-}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install "${options[@]}" --yes --no-install-recommends ca-certificates procps wget "$@"
if [[ " ${APT_GET_OPTIONS:-} " != *" --simulate "* ]]; then
    rm -rf /var/lib/apt/lists/*
fi
