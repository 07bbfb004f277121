#!/usr/bin/env bash
# Two hosts with two links each: a device of the net plugin that is made of two carries large messages over both, in
# about half the time; and so does a communicator. rails_test.sh HOSTS_SH NET_PERF ALL_REDUCE_PERF ucx|ofi
set -euo pipefail
hosts=$1 net_perf=$2 all_reduce=$3 library=$4
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

fail() { echo "FAILED: $*" >&2; cat "$folder"/out "$folder"/err >&2; exit 1; }
. "$(dirname "$0")/may_make_hosts.sh"

# measure DEVICE FILTER sets the bandwidth in GB/s, and eth0 and eth1: the bytes that host0 sent over each.
export SCAPE_NET=$library UCX_TLS=tcp,self FI_PROVIDER=tcp NCCL_DEBUG=INFO
measure() {
  SCAPE_NET_IF=$2 "$hosts" -n 2 -l 2 -r 200mbit -- "$net_perf" -b 2M -e 2M --connections 1 --window 4 \
    --device "$1" --rounds 1 -n 6 >"$folder/out" 2>"$folder/err" || fail "status $?, device $1"
  grep -q "Out of bounds values : 0 OK" "$folder/out" || fail "wrong bytes, device $1"
  bandwidth=$(awk '$3 == "plugin" && $2 == 1 {print $6}' "$folder/out")
  eth0=$(awk '$2 == "host0/eth0" {print $4}' "$folder/err")
  eth1=$(awk '$2 == "host0/eth1" {print $4}' "$folder/err")
}

# One link: the first, or what the filter leaves.
measure 0 ""
one=$bandwidth
[ "$eth0" -gt $((8 << 20)) ] && [ "$eth1" -lt $((1 << 20)) ] || fail "device 0 sent $eth0 bytes over eth0 and $eth1 over eth1"
measure 0 "=eth1"
[ "$eth1" -gt $((8 << 20)) ] && [ "$eth0" -lt $((1 << 20)) ] || fail "eth1 alone sent $eth1 bytes, and eth0 $eth0"
grep -q 'on eth1 ([^,]*, 10 Gb/s); SCAPE_NET_IF="=eth1"' "$folder/err" || fail "the filter is not shown"

# Both. What else the machine does may slow any one measurement down, but nothing makes one link as fast as two.
for _ in 1 2 3; do
  measure 0,1 "eth"
  both=$(awk "BEGIN {print $bandwidth / $one}")
  awk "BEGIN {exit !($both > 1.5)}" && break
done
echo "one link $one GB/s, two $bandwidth GB/s ($both times as much), of which eth0 sent $eth0 bytes and eth1 $eth1"
grep -q "device 2: eth0+eth1" "$folder/out" || fail "no device of two"
awk "BEGIN {exit !($eth0 > 0.4 * ($eth0 + $eth1) && $eth1 > 0.4 * ($eth0 + $eth1))}" || fail "the links' shares"
awk "BEGIN {exit !($both > 1.5)}" || fail "two links are only $both times as fast as one"

# A communicator, over one and over both.
reduce() {
  SCAPE_TRANSPORT=$library SCAPE_MODE=host SCAPE_LOG=info SCAPE_NET_IF=$1 "$hosts" -n 2 -l 2 -r 200mbit -- "$all_reduce" \
    -b 2M -e 2M -n 4 -w 1 >"$folder/out" 2>"$folder/err" || fail "status $?, all-reduce over $1"
  grep -q "Out of bounds values : 0 OK" "$folder/out" || fail "all-reduce over $1"
  time=$(awk '$3 == "float" {print $6}' "$folder/out")
  eth0=$(awk '$2 == "host0/eth0" {print $4}' "$folder/err")
  eth1=$(awk '$2 == "host0/eth1" {print $4}' "$folder/err")
}
reduce "=eth1"
one=$time
[ "$eth1" -gt $((8 << 20)) ] && [ "$eth0" -lt $((1 << 20)) ] || fail "eth1 alone sent $eth1 bytes, and eth0 $eth0"
for _ in 1 2 3; do
  reduce "=eth0,eth1"
  both=$(awk "BEGIN {print $one / $time}")
  awk "BEGIN {exit !($both > 1.4)}" && break
done
echo "all-reduce: one link $one us, two $time us, of which eth0 sent $eth0 bytes and eth1 $eth1"
grep -q "network devices: eth0, eth1, which share" "$folder/err" || fail "the devices are not shown"
awk "BEGIN {exit !($eth0 > 0.4 * ($eth0 + $eth1) && $eth1 > 0.4 * ($eth0 + $eth1))}" || fail "the links' shares of an all-reduce"
awk "BEGIN {exit !($both > 1.4)}" || fail "two links are only $both times as fast as one"
