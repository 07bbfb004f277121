#!/usr/bin/env bash
# without_gpu_check.sh DEVICE_CHECK: where no GPU is, the script says so in one line, with exit status 2, and writes
# nothing; --dry-run shows its stages all the same.
set -u
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
printf '#!/bin/sh\necho "No devices were found"\n' >"$folder/nvidia-smi"
chmod +x "$folder/nvidia-smi"
fail() { echo "$*"; exit 1; }

said=$(PATH="$folder:$PATH" "$1" "$folder/out" 2>&1)
status=$?
[ $status = 2 ] || fail "exit status $status: $said"
[ "$(wc -l <<<"$said")" = 1 ] || fail "more than a line: $said"
[[ $said == *"no GPU here"* ]] || fail "said: $said"
[ ! -e "$folder/out" ] || fail "it wrote something"

stages=$(PATH="$folder:$PATH" "$1" --dry-run "$folder/out") || fail "--dry-run: exit status $?"
[ "$(grep -c ' at most  *[0-9]* s: ' <<<"$stages")" = 6 ] || fail "$stages"
limits=$(sed -n 's/.* at most  *\([0-9]*\) s: .*/\1/p' <<<"$stages" | paste -sd+)
[ $((limits)) -le 480 ] || fail "the stages may take $((limits)) s together: $stages"
[ ! -e "$folder/out" ] || fail "--dry-run wrote something"
