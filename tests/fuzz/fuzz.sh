#!/usr/bin/env bash
# Runs the fuzz targets of a build of the preset `fuzz`, one after the other:
#   tests/fuzz/fuzz.sh [-s SECONDS] [-m] [TARGET ...]
#
#   -s SECONDS   for each target (20)
#   -m           afterwards takes what reaches code that the corpus does not into tests/fuzz/corpus
#
# All targets when none is named. What it finds on the way is kept in build/fuzz/corpus, and goes on from there; an input
# that ends a target stays in build/fuzz/findings, where its name says how. The status is 0 when there is none.
set -euo pipefail
cd "$(dirname "$0")/../.."

seconds=20 merge=""
while getopts s:m option; do
  case $option in
    s) seconds=$OPTARG ;;
    m) merge=1 ;;
    *) sed -n '2,/^set /s/^# \{0,1\}//p' "$0" >&2; exit 2 ;;
  esac
done
shift $((OPTIND - 1))

build=build/fuzz
corpus=tests/fuzz/corpus
mkdir -p $build/findings
export SCAPE_LOG=none
export ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1:check_initialization_order=1
export UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1
export LSAN_OPTIONS=suppressions=$PWD/tests/sanitizers/lsan.supp:print_suppressions=0

[ $# -gt 0 ] || set -- $(ls $corpus)
status=0
for name in "$@"; do
  mkdir -p $build/corpus/"$name"
  echo "fuzz: $name, $seconds s"
  $build/bin/fuzz_"$name" -max_total_time="$seconds" -timeout=20 -rss_limit_mb=2048 -use_value_profile=1 -verbosity=0 \
    -print_final_stats=1 -artifact_prefix=$build/findings/"$name"- $build/corpus/"$name" $corpus/"$name" || status=1
  [ -z "$merge" ] || $build/bin/fuzz_"$name" -merge=1 -verbosity=0 $corpus/"$name" $build/corpus/"$name"
done
exit $status
