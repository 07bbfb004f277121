#!/bin/sh
# hidden_check.sh HARNESS LIBRARY ucx|ofi|both|broken: where a network library is missing, or is something else of
# that name, the plugin loads, says so in one line, and serves what is left.
set -eu
harness=$1 library=$2 what=$3
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
hide() { : >"$place/$1"; }  # a file that the loader finds first and cannot load
warnings=1
case $what in
  ucx) hide libucp.so.0 ;;
  ofi) hide libfabric.so.1; warnings=0 ;;  # UCX is what would be taken here in any case
  both) hide libucp.so.0; hide libfabric.so.1 ;;
  broken)  # there, without any of its functions
    echo | "${CC:-cc}" -shared -o "$place/libucp.so.0" -Wl,-soname,libucp.so.0 -x c - ;;
esac
run() {  # ... expected warnings, words expected in the output
  output=$(LD_LIBRARY_PATH="$place" "$harness" "$library" hidden version="$1" warnings="$2" 2>&1) || {
    echo "$output" >&2
    exit 1
  }
  echo "$output"
  echo "$output" | grep -q "$3" || { echo "no word of $3" >&2; exit 1; }
}
for version in 6 9 12; do
  case $what in
    ucx) run $version $warnings "init gives 0: .*libucp.so.0" ;;
    broken) run $version $warnings "init gives 0: .*libscape_ucx.so" ;;
    ofi)
      run $version $warnings "init gives 0"
      SCAPE_NET=ofi
      export SCAPE_NET
      run $version 1 "init gives 2: .*libfabric.so.1"
      unset SCAPE_NET
      ;;
    both) run $version $warnings "init gives 2: .*libucp.so.0.*libfabric.so.1" ;;
  esac
done
