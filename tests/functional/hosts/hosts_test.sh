#!/usr/bin/env bash
# perf/hosts.sh itself, and host mode between its hosts: hosts_test.sh HOSTS_SH ALL_REDUCE_PERF
set -euo pipefail
hosts=$1 all_reduce=$2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

fail() { echo "FAILED: $*" >&2; exit 1; }
. "$(dirname "$0")/may_make_hosts.sh"
left() { ip netns list | grep -c "^scape-hosts-$1-" || true; }

# Every process knows its place, and hosts are apart.
"$hosts" -n 2 -p 2 -- bash -c 'echo "$RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $NCCL_HOSTID $(uname -n)" \
  "$(ls /dev/shm | wc -l) $MASTER_ADDR:$MASTER_PORT"' >"$folder/out" 2>"$folder/err" ||
  fail "status $?: $(cat "$folder/err")"
sort "$folder/out" >"$folder/places"
diff - "$folder/places" <<END || fail "places"
0/4 0/2 host0 host0 0 10.73.0.1:29500
1/4 1/2 host0 host0 0 10.73.0.1:29500
2/4 0/2 host1 host1 0 10.73.0.1:29500
3/4 1/2 host1 host1 0 10.73.0.1:29500
END

# Processes that end before the last one is started do not make a run fail.
for _ in $(seq 20); do
  "$hosts" -n 2 -p 3 -q -- true 2>"$folder/err" || fail "status $? of true: $(cat "$folder/err")"
done

# The status is that of the process that failed, the others are ended, and nothing is left.
started=$SECONDS status=0
"$hosts" -n 3 -q -- bash -c '[ $RANK = 1 ] && exit 7; exec sleep 1234567' 2>"$folder/err" &
run=$!
wait $run || status=$?
[ $status = 7 ] || fail "status $status, not 7"
grep -q "rank 1 on host1 ended with status 7" "$folder/err" || fail "who failed: $(cat "$folder/err")"
! pgrep -f "sleep 1234567" >/dev/null || fail "processes are left"
[ $((SECONDS - started)) -lt 30 ] || fail "the others went on"
[ "$(left $run)" = 0 ] || fail "namespaces are left"

# A killed run leaves its hosts; the next run removes them.
"$hosts" -n 2 -q -- sleep 100 &
killed=$!
for _ in $(seq 100); do [ "$(left $killed)" = 3 ] && break; sleep 0.1; done
kill -KILL $killed
wait $killed 2>/dev/null || true
[ "$(left $killed)" -gt 0 ] || fail "nothing was left to remove"
"$hosts" -n 1 -q -- true
[ "$(left $killed)" = 0 ] || fail "what a killed run left is still there"

# Each of several links is a network of its own, with its own counters.
"$hosts" -n 2 -l 2 -- bash -c '[ $RANK = 0 ] || for i in 1 2 3; do printf %1000s >/dev/udp/10.73.1.1/9; done
  echo $(ls /sys/class/net)' \
  >"$folder/out" 2>"$folder/err" || fail "two links: $(cat "$folder/out" "$folder/err")"
[ "$(grep -c "eth0 eth1 lo" "$folder/out")" = 2 ] || fail "interfaces: $(cat "$folder/out")"
eth0=$(awk '$2 == "host1/eth0" {print $4}' "$folder/err") eth1=$(awk '$2 == "host1/eth1" {print $4}' "$folder/err")
[ "$eth1" -gt 3000 ] && [ "$eth0" -lt 3000 ] || fail "eth0 sent $eth0 bytes, eth1 $eth1"

# Wrong use is refused by name.
for wrong in "-n 0" "-n x" "-p -1"; do
  status=0
  "$hosts" $wrong -- true 2>"$folder/err" || status=$?
  [ $status = 2 ] && grep -q "it takes 1 .. 64" "$folder/err" || fail "$wrong: $(cat "$folder/err")"
done

# Right results between hosts, and the bytes cross the link instead of going round it: 10 calls (5 of each form) of
# 1 MiB between two ranks put at least 10 MiB on it, whichever transport.
for transport in ucx ofi; do
  SCAPE_TRANSPORT=$transport SCAPE_MODE=host "$hosts" -n 2 -- "$all_reduce" -b 1M -e 1M -n 4 -w 1 \
    >"$folder/out" 2>"$folder/err" || fail "$transport: $(cat "$folder/out" "$folder/err")"
  grep -q "Out of bounds values : 0 OK" "$folder/out" || fail "$transport: $(cat "$folder/out")"
  sent=$(awk '$2 == "host0" {print $4}' "$folder/err")
  [ "$sent" -gt $((10 << 20)) ] || fail "$transport: only $sent bytes crossed the link"
  SCAPE_TRANSPORT=$transport SCAPE_MODE=host "$hosts" -n 2 -- "$all_reduce" -b 1M -e 1M -n 4 -w 1 -s 0.9 \
    >"$folder/out" 2>"$folder/err" || fail "$transport, sparse: $(cat "$folder/out" "$folder/err")"
  grep -q "Out of bounds values : 0 OK" "$folder/out" || fail "$transport, sparse: $(cat "$folder/out")"
done
