#!/bin/sh
# needed_check.sh LIBRARY: it needs nothing beyond libc's family, so that it can be preloaded anywhere.
readelf -d "$1" | grep -q SONAME || { echo "$1: readelf sees no shared library" >&2; exit 1; }
extra=$(readelf -d "$1" | sed -n 's/.*(NEEDED).*\[\(.*\)\].*/\1/p' |
  grep -vE '^(libc\.so\.6|libm\.so\.6|libdl\.so\.2|libpthread\.so\.0|ld-linux.*)$')
[ -z "$extra" ] || { echo "$1 needs" $extra >&2; exit 1; }
