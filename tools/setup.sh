#!/usr/bin/env bash
# Installs what the build, the tests and the demo need and a fresh Debian 12 lacks:
#   tools/setup.sh build    Debian packages only
#   tools/setup.sh demo     and a Python with PyTorch
#   tools/setup.sh demo-net and what test hosts are made with
#   tools/setup.sh test     and Clang, nvcc, and the NCCL wheels that the declarations are checked against
#   tools/setup.sh fuzz     Debian packages only: clang with libFuzzer and its sanitizers
#   tools/setup.sh arm      Debian packages only: compilers for 64-bit Arm, an emulator, and Arm's libraries
# What is there already is left alone; nothing needs root where the packages are there.
set -euo pipefail
cd "$(dirname "$0")/.."

what=${1:-build}
torch_version=2.13.0
nccl_versions="2.32.3 2.28.9"
nvcc_version=13.0.88
cudart_version=13.0.96

say() { printf 'setup: %s\n' "$*"; }

packages="g++ cmake ninja-build pkg-config libucx-dev libfabric-dev libhwloc-dev libhwy-dev libgtest-dev libgmock-dev libbenchmark-dev libcli11-dev nlohmann-json3-dev"
case $what in
  build) ;;
  demo) packages="$packages python3 python3-venv python3-dev" ;;
  demo-net) packages="$packages python3 python3-venv python3-dev iproute2" ;;
  test) packages="$packages python3 python3-venv python3-dev git binutils clang procps iproute2 libboost-context-dev qemu-user openmpi-bin libopenmpi-dev" ;;
  fuzz) packages="$packages python3 libboost-context-dev clang libclang-rt-14-dev llvm" ;;
  arm)
    packages="cmake ninja-build pkg-config python3 git g++-aarch64-linux-gnu qemu-user nlohmann-json3-dev"
    for library in ucx fabric hwloc hwy gtest gmock boost-context; do packages="$packages lib$library-dev:arm64"; done
    ;;
  *) echo "usage: tools/setup.sh build|demo|demo-net|test|fuzz|arm" >&2; exit 2 ;;
esac

missing=""
for package in $packages; do
  dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' || missing="$missing $package"
done
if [ -n "$missing" ]; then
  say "installing:$missing"
  as_root=""
  if [ "$(id -u)" != 0 ]; then
    if ! command -v sudo >/dev/null; then
      echo "setup: these packages are missing and need root to install: apt-get install$missing" >&2
      exit 1
    fi
    as_root=sudo
  fi
  [ "$what" != arm ] || $as_root dpkg --add-architecture arm64
  $as_root apt-get update -qq
  $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
fi
case $what in build | fuzz | arm) exit 0 ;; esac

# A Python with torch >= 2.4 is taken as it is, through a virtual environment that sees it; else one is made.
venv=build/venv
if [ ! -x $venv/bin/python ]; then
  base=${PYTHON:-python3}
  "$base" -c 'import ensurepip, venv' 2>/dev/null || base=/usr/bin/python3
  mkdir -p build
  if "$base" -c 'import sys, torch; v = torch.__version__.split("."); sys.exit((int(v[0]), int(v[1])) < (2, 4))' 2>/dev/null; then
    say "taking the torch of $base"
    "$base" -m venv --system-site-packages $venv
  else
    say "making $venv with torch $torch_version"
    "$base" -m venv $venv
  fi
fi
have() { $venv/bin/python -c "import $1" 2>/dev/null; }
wanted=""
have torch || wanted="torch==$torch_version"
for module in numpy matplotlib pytest; do
  have $module || wanted="$wanted $module"
done
if [ -n "$wanted" ]; then
  say "pip install $wanted"
  $venv/bin/pip install --quiet --disable-pip-version-check $wanted
fi
[ "$what" = test ] || exit 0

# The CUDA kernels have to compile; the wheels are what a machine without a toolkit gets.
if [ -z "${CUDACXX:-}" ] && ! command -v nvcc >/dev/null && [ ! -x /usr/local/cuda/bin/nvcc ] &&
  ! ls $venv/lib/python3*/site-packages/nvidia/cu13/bin/nvcc >/dev/null 2>&1; then
  say "pip install nvcc $nvcc_version"
  $venv/bin/pip install --quiet --disable-pip-version-check "nvidia-cuda-nvcc==$nvcc_version" \
    "nvidia-nvvm==$nvcc_version" "nvidia-cuda-crt==$nvcc_version" "nvidia-cuda-runtime==$cudart_version"
fi

for version in $nccl_versions; do
  folder=build/nccl/$version
  [ -f $folder/nvidia/nccl/include/nccl.h ] && continue
  say "fetching the NCCL $version wheel, for its header and library"
  rm -rf "$folder"
  $venv/bin/pip install --quiet --disable-pip-version-check --no-deps --target "$folder" "nvidia-nccl-cu13==$version"
done
