#!/usr/bin/env bash
# Checks and measures device mode on a machine with a GPU, in less than 8 minutes:
#
#   perf/device_check.sh [--dry-run | --build-only] [FOLDER]
#
# Needs a CUDA 12.8 or later toolkit with nvcc, a C++20 compiler, CMake 3.20 or later, and a python3 with PyTorch for
# the runs over NCCL; no network, and none of the libraries that host mode is built over. FOLDER (default: $OUT, else
# build/device) gets device.json, with every figure and result, and the stages' logs. Each stage has a time limit of
# its own, and a failed one does not keep the others from running.
#   --dry-run      print what the stages would run
#   --build-only   the first stage alone, which needs no GPU
# Exit status: 0 all well, 1 a stage failed or a figure is not what it has to be, 2 no GPU or a tool is missing.
set -uo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
build=$root/build/device
mode=run
case ${1:-} in
  --dry-run) mode=dry; shift ;;
  --build-only) mode=build; shift ;;
esac
case ${1:-} in
  -*) echo "usage: perf/device_check.sh [--dry-run | --build-only] [FOLDER]" >&2; exit 2 ;;
esac
folder=${1:-${OUT:-$build}}

give_up() { echo "device_check: $*" >&2; exit 2; }

devices=""
command -v nvidia-smi >/dev/null && devices=$(nvidia-smi --query-gpu=name,driver_version,compute_cap --format=csv,noheader 2>/dev/null)
# Where there is none it says so on stdout.
grep -q ', *[0-9]*\.[0-9]*$' <<<"$devices" || devices=""
[ "$mode" != run ] || [ -n "$devices" ] || give_up "no GPU here (nvidia-smi shows none): nothing was checked"
for tool in cmake python3 timeout; do
  command -v $tool >/dev/null || give_up "$tool is missing; install it, or put it on the PATH"
done
capability=$(head -n 1 <<<"$devices" | sed 's/.*, *//; s/\.//')
library=$build/lib/libscape_nccl.so
[ "$mode" = dry ] || mkdir -p "$folder" || give_up "$folder cannot be made"
results=$(mktemp)
trap 'rm -f "$results"' EXIT

# stage NAME LIMIT COMMAND...: its output goes to FOLDER/NAME.log, its result to $results. Exit status 77, or a line
# that begins with "skipped", says that it could not be done here.
stage() {
  local name=$1 limit=$2 begin=$SECONDS status result
  shift 2
  if [ "$mode" = dry ]; then
    printf '%-10s at most %3s s: %s\n' "$name" "$limit" "$*"
    [ "$1" != bash ] || declare -f "${3%% *}"
    return
  fi
  echo "== $name"
  timeout -k 5 "$limit" "$@" >"$folder/$name.log" 2>&1
  status=$?
  result=failed
  [ $status != 0 ] || result=ok
  [ $status != 124 ] && [ $status != 137 ] || result="took longer than $limit s"
  [ $status != 77 ] || result=skipped
  grep -q '^skipped' "$folder/$name.log" && [ "$result" = ok ] && result=skipped
  printf '%s\t%s\t%s\n' "$name" "$result" $((SECONDS - begin)) >>"$results"
  case $result in
    ok) grep -h '^bar .*MISSED' "$folder/$name.log" ;;
    skipped) grep -h '^skipped' "$folder/$name.log" ;;
    *) grep -hE 'Error: |SCAPE (WARN|ERROR)|^FAILED' "$folder/$name.log" | head -n 6
      tail -n 4 "$folder/$name.log" ;;
  esac
}

build_all() {
  # Warnings of compilers that nobody has met yet are no errors here.
  cmake -S "$root" -B "$build" -DCMAKE_BUILD_TYPE=RelWithDebInfo "-DCMAKE_CXX_FLAGS_RELWITHDEBINFO=-O3 -g1 -DNDEBUG" \
    -DSCAPE_DEVICE_ONLY=ON -DSCAPE_CUDA=ON -DSCAPE_WERROR=OFF "-DSCAPE_CUDA_ARCHITECTURES=$capability" &&
    cmake --build "$build" --parallel "$(nproc)" --target scape_nccl scape_cuda device_kernels_check scape_cuda_bench
}
ranks() {
  python3 -c 'import torch' 2>/dev/null || { echo "skipped: this python3 has no PyTorch"; return 0; }
  env LD_PRELOAD="$library" SCAPE_MODE=device SCAPE_LOG=info PYTHONPATH="$root/python" \
    python3 -m torch.distributed.run --standalone --nproc-per-node "$1" "$root/tests/device/nccl_rank.py" cuda
}
# memcheck sees what is outside arrays, racecheck what threads of a block do to each other.
sanitizer() {
  local tool=compute-sanitizer
  command -v $tool >/dev/null || tool=/usr/local/cuda/bin/compute-sanitizer
  command -v "$tool" >/dev/null || { echo "skipped: compute-sanitizer is not here"; return 0; }
  local check=memcheck
  for check in memcheck racecheck; do
    echo "# $check"
    "$tool" --tool $check --error-exitcode 9 "$build/bin/device_kernels_check" 4099 >"$build/sanitizer.out" 2>&1
    local status=$?
    cat "$build/sanitizer.out"
    grep -q 'Device not supported' "$build/sanitizer.out" &&
      { echo "skipped: compute-sanitizer does not serve this device"; return 0; }
    [ $status = 0 ] || return $status
  done
}

export root build library capability
export -f build_all ranks sanitizer
limit=150
[ "$mode" != build ] || limit=1800  # that machine may have few cores
stage build $limit bash -c build_all
if [ "$mode" != build ]; then
  stage kernels 100 "$build/bin/device_kernels_check"
  stage bench 80 "$build/bin/scape_cuda_bench" --json "$folder/bench.json"
  stage nccl_one 45 bash -c 'ranks 1'
  stage nccl_two 45 bash -c 'ranks 2'
  stage sanitizer 60 bash -c sanitizer
fi
[ "$mode" != dry ] || exit 0

toolkit=$("$(sed -n 's/^SCAPE_NVCC:[A-Z]*=//p' "$build/CMakeCache.txt" 2>/dev/null)" --version 2>/dev/null |
  sed -n 's/.*release .*, V//p')
DEVICES=$devices TOOLKIT=$toolkit python3 - "$results" "$folder" <<'PYTHON'
import json
import os
import sys

results, folder = sys.argv[1:]
devices = [dict(zip(("name", "driver", "compute_capability"), (part.strip() for part in line.split(","))))
           for line in os.environ["DEVICES"].splitlines()]
report = {"devices": devices, "toolkit": os.environ["TOOLKIT"], "stages": [], "kernels": [], "rows": [], "bars": []}
for line in open(results):
    name, result, seconds = line.rstrip("\n").split("\t")
    report["stages"].append({"stage": name, "result": result, "seconds": int(seconds)})


def lines(name):
    path = os.path.join(folder, name + ".log")
    ran = any(stage["stage"] == name for stage in report["stages"])
    return open(path, errors="replace").read().splitlines() if ran else []


for line in lines("kernels"):
    if line.startswith(("ok ", "FAILED ")):
        result, rest = line.split(None, 1)
        report["kernels"].append({"operation": rest[:20].strip(), "result": result.lower(), "detail": rest[20:].strip()})
report["nccl"] = {name: [line for line in lines(name) if line.startswith(("ok:", "skipped"))]
                  for name in ("nccl_one", "nccl_two")}
bench = os.path.join(folder, "bench.json")
if lines("bench") and os.path.exists(bench):
    try:
        report.update(json.load(open(bench)))
    except ValueError as error:
        report["bench_error"] = str(error)
with open(os.path.join(folder, "device.json"), "w") as out:
    json.dump(report, out, indent=1)
    out.write("\n")

print()
for device in devices:
    print(f"{device['name']}, driver {device['driver']}, compute capability {device['compute_capability']}")
print(f"{'stage':<12} {'result':<26} {'s':>4}")
for stage in report["stages"]:
    print(f"{stage['stage']:<12} {stage['result']:<26} {stage['seconds']:>4}")
for bar in report["bars"]:
    print(f"{bar['bar']:<22} {bar['per_mille'] / 10:>5.1f} % set {bar['value']:>8.2f} {bar['unit']:<7} "
          f"wanted {bar['wanted']:<13} {'reached' if bar['reached'] else 'MISSED'}")
print(f"all of it: {folder}/device.json")
bad = [stage for stage in report["stages"] if stage["result"] not in ("ok", "skipped")]
bad += [bar for bar in report["bars"] if not bar["reached"]]
sys.exit(1 if bad else 0)
PYTHON
