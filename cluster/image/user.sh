#!/usr/bin/env bash
# The user that everything runs as, uid 1000 (images of Ubuntu have one of that number already), and the folder of the model cache.
# ROOT is prepended to every path, for tests.
set -euo pipefail
root="${ROOT:-}"
prefix=()
if [[ -n "$root" ]]; then
    prefix=(--prefix "$root")
fi
if grep -q ':x:1000:1000:' "$root/etc/passwd"; then
    userdel "${prefix[@]}" "$(grep ':x:1000:1000:' "$root/etc/passwd" | cut -d: -f1)"
fi
if grep -q ':x:1000:' "$root/etc/group"; then
    groupdel "${prefix[@]}" "$(grep ':x:1000:' "$root/etc/group" | cut -d: -f1)"
fi
groupadd "${prefix[@]}" --gid 1000 askmany
useradd "${prefix[@]}" --uid 1000 --gid 1000 --home-dir /home/askmany --shell /bin/bash askmany
mkdir -p "$root/home/askmany" "$root/models"
chown 1000:1000 "$root/home/askmany" "$root/models"
