#!/bin/sh
# hidden_check.sh HARNESS LIBRARY ucx|ofi|both|broken|ucx_symbol|ofi_symbol: where a network library is missing, is
# something else of that name, or lacks one function, the plugin loads, says so in one line, and serves what is left;
# twenty times over.
set -eu
harness=$1 library=$2 what=$3
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
hide() { : >"$place/$1"; }  # a file that the loader finds first and cannot load
# stub FILE MODULE LACKING: a library with what the module takes from it, in its versions, but one function.
stub() {
  nm -D --undefined-only "$(dirname "$library")/$2" |
    awk -v lacking="$3" '$2 ~ /^(ucp|fi)_/ && $2 !~ "^" lacking "(@|$)" { print $2 }' >"$place/has"
  sed 's/@.*//; s/.*/void &(void) {}/' "$place/has" >"$place/stub.c"
  awk -F@ 'NF > 1 { names[$2] = names[$2] $1 "; " } END { for (v in names) print v " { " names[v] "};" }' \
    "$place/has" >"$place/stub.map"
  versions=
  [ ! -s "$place/stub.map" ] || versions="-Wl,--version-script=$place/stub.map"
  "${CC:-cc}" -shared -o "$place/$1" -Wl,-soname,"$1" $versions "$place/stub.c"
}
warnings=1
case $what in
  ucx) hide libucp.so.0 ;;
  ofi) hide libfabric.so.1; warnings=0 ;;  # UCX is what would be taken here in any case
  both) hide libucp.so.0; hide libfabric.so.1 ;;
  broken)  # there, without any of its functions
    echo | "${CC:-cc}" -shared -o "$place/libucp.so.0" -Wl,-soname,libucp.so.0 -x c - ;;
  ucx_symbol) stub libucp.so.0 libscape_ucx.so ucp_worker_create ;;
  ofi_symbol) stub libfabric.so.1 libscape_ofi.so fi_getinfo; warnings=0 ;;
esac
run() {  # version, SCAPE_NET, expected warnings, words expected in the output
  output=$(LD_LIBRARY_PATH="$place" SCAPE_NET=$2 "$harness" "$library" hidden version="$1" count=20 warnings="$3" 2>&1) || {
    echo "$output" >&2
    exit 1
  }
  echo "$output"
  echo "$output" | grep -q "$4" || { echo "no word of $4" >&2; exit 1; }
}
for version in 6 9 12; do
  case $what in
    ucx)
      run $version auto $warnings "init gives 0: .*libucp.so.0"
      run $version ucx 1 "init gives 2: .*libucp.so.0"
      ;;
    ofi)
      run $version auto $warnings "init gives 0"
      run $version ofi 1 "init gives 2: .*libfabric.so.1"
      ;;
    both) run $version auto $warnings "init gives 2: .*libucp.so.0.*libfabric.so.1" ;;
    broken)
      run $version auto $warnings "init gives 0: .*libscape_ucx.so"
      run $version ucx 1 "init gives 2: .*libscape_ucx.so"
      ;;
    ucx_symbol)
      run $version auto $warnings "init gives 0: .*ucp_worker_create"
      run $version ucx 1 "init gives 2: .*ucp_worker_create"
      ;;
    ofi_symbol)
      run $version auto $warnings "init gives 0"
      run $version ofi 1 "init gives 2: .*fi_getinfo"
      ;;
  esac
done
