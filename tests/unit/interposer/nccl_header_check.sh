#!/bin/sh
# nccl_header_check.sh COMPILER SOURCE_DIR NCCL_DIR: compiles the comparison with the nccl.h there. 77 (skipped) where the header is missing.
compiler=$1 source=$2 nccl=$3
here=$source/tests/unit/interposer
if [ ! -f "$nccl/include/nccl.h" ]; then
  echo "SKIPPED: no $nccl/include/nccl.h; tools/setup.sh test fetches it (needs the network)" >&2
  exit 77
fi
check() {
  "$compiler" -std=c++20 -fsyntax-only -Wno-deprecated-declarations "$@" -I"$source" -isystem "$here/cuda" \
    -isystem "$nccl/include" "$here/nccl_header_check.cc"
}
check || exit 1
grep -m1 -E 'define NCCL_VERSION_CODE' "$nccl/include/nccl.h"
