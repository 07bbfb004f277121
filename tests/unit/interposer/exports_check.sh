#!/bin/sh
# exports_check.sh LIBRARY NCCL_DIR: every ncclX and pncclX of the real library is exported by ours. 77 (skipped)
# where the real one is missing.
library=$1 real=$2/lib/libnccl.so.2
if [ ! -f "$real" ]; then
  echo "SKIPPED: no $real; tools/setup.sh test fetches it (needs the network)" >&2
  exit 77
fi
# Not in any header, and of no use to a program.
internal='ncclResetDebugInitInternal'
names() {
  nm -D --defined-only "$1" | awk '$2 == "T" || $2 == "W" { print $3 }' | grep -E '^p?nccl[A-Z]' | sort -u
}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
names "$real" | grep -vxF "$internal" >"$folder/real"
names "$library" >"$folder/ours"
missing=$(comm -23 "$folder/real" "$folder/ours")
if [ -n "$missing" ] || [ "$(wc -l <"$folder/real")" -lt 50 ]; then
  echo "$real exports what $library does not:" $missing >&2
  exit 1
fi
echo "$(wc -l <"$folder/real") functions of $real, all there"
