#!/bin/sh
# consumer_check.sh CMAKE BUILD_DIR CONSUMER GENERATOR CC CXX: installs the build to a fresh place, builds the
# consumer against it, and runs it with and without the library preloaded.
set -eu
cmake=$1 build=$2 consumer=$3 generator=$4 cc=$5 cxx=$6
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
"$cmake" --install "$build" --component scape --prefix "$place/prefix" >/dev/null
"$cmake" -S "$consumer" -B "$place/build" -G "$generator" -DCMAKE_PREFIX_PATH="$place/prefix" \
  -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" >"$place/log" 2>&1 || { cat "$place/log" >&2; exit 1; }
"$cmake" --build "$place/build" >"$place/log" 2>&1 || { cat "$place/log" >&2; exit 1; }
library=$place/prefix/lib/libscape_nccl.so
[ -e "$place/prefix/lib/nccl/libnccl.so.2" ] || { echo "lib/nccl/libnccl.so.2 is not installed" >&2; exit 1; }
for program in consumer_c consumer_cxx; do
  without=$("$place/build/$program")
  with=$(LD_PRELOAD="$library" SCAPE_MODE=host "$place/build/$program")
  [ "$without" = "absent: 1" ] || { echo "$program without the library: $without" >&2; exit 1; }
  [ "$with" = "present: 0" ] || { echo "$program with the library: $with" >&2; exit 1; }
done
