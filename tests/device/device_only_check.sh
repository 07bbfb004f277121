#!/usr/bin/env bash
# device_only_check.sh CMAKE SOURCE NVCC: SCAPE_DEVICE_ONLY looks for no library but CUDA's.
set -u
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
if ! CUDACXX=$3 "$1" -S "$2" -B "$folder" -DSCAPE_DEVICE_ONLY=ON -DSCAPE_CUDA=ON >"$folder/log" 2>&1; then
  cat "$folder/log"
  exit 1
fi
# What find_library(), find_path() and find_package() were asked for stands in the cache, found or not.
found=$(grep -oE '^[A-Za-z0-9_]+(_LIBRARY|_INCLUDE|_DIR):(FILEPATH|PATH)=.*' "$folder/CMakeCache.txt" |
  grep -vE '^(SCAPE_|CMAKE_|scape_)')
[ -z "$found" ] || { echo "it looks for:"; echo "$found"; exit 1; }
