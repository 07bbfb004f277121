#!/bin/sh
# symbols_check.sh LIBRARY: it shows ncclNetPlugin_v6 to _v12 and ncclCollNetPlugin_v6 to _v12, as data, and nothing
# else.
shown=$(nm -D --defined-only "$1" | awk '{ print $2, $3 }' | sort)
meant=$(for version in 6 7 8 9 10 11 12; do
  echo "D ncclNetPlugin_v$version"
  echo "D ncclCollNetPlugin_v$version"
done | sort)
[ "$shown" = "$meant" ] || { echo "$1 shows: $shown" >&2; exit 1; }
