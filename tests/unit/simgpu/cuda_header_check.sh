#!/bin/sh
# cuda_header_check.sh COMPILER SOURCE_DIR CUDA_INCLUDE_DIR: compiles the comparison with the cuda_runtime_api.h there.
# 77 (skipped) where it is missing or not of CUDA 13.
compiler=$1 source=$2 cuda=$3
ours=$source/tests/simgpu/include/cuda_runtime_api.h
if [ ! -f "$cuda/cuda_runtime_api.h" ]; then
  echo "SKIPPED: no $cuda/cuda_runtime_api.h; set SCAPE_CUDA_INCLUDE to a toolkit's include folder" >&2
  exit 77
fi
if ! grep -q -E 'define CUDART_VERSION +13' "$cuda/cuda_runtime_api.h"; then
  echo "SKIPPED: $cuda is not of CUDA 13" >&2
  exit 77
fi
scratch=$(mktemp -d) || exit 1
trap 'rm -rf "$scratch"' EXIT
# Every function and every enumerator of ours.
sed -n -E 's/^SIMGPU_API .*\b(cuda[A-Z][A-Za-z0-9]*)\(.*/SAME_FUNCTION(\1)/p; s/^  (cuda[A-Z][A-Za-z0-9]*) = .*/SAME_VALUE(\1)/p' \
  "$ours" > "$scratch/names.inc"
functions=$(grep -c FUNCTION "$scratch/names.inc")
values=$(grep -c VALUE "$scratch/names.inc")
if [ "$functions" -ne "$(grep -c '^SIMGPU_API' "$ours")" ] || [ "$values" -lt 100 ]; then
  echo "the list of names is not whole: $functions functions, $values values" >&2
  exit 1
fi
"$compiler" -std=c++20 -fsyntax-only -Wall -Werror -I"$source" -I"$scratch" -isystem "$cuda" \
  "$source/tests/unit/simgpu/cuda_header_check.cc" || exit 1
echo "$functions functions and $values values are CUDA's"
