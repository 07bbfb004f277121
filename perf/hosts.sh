#!/usr/bin/env bash
# Runs a command on test hosts: N network namespaces of this machine on one switch, each with its own rate.
#
#   perf/hosts.sh [-n HOSTS] [-p RANKS] [-l LINKS] [-r RATE] [-d DELAY] -- COMMAND [ARGUMENT ...]
#
#   -n HOSTS   how many (4)
#   -p RANKS   processes on each (1)
#   -l LINKS   of each host, eth0, eth1, ..., each to a network of its own (1)
#   -r RATE    of each link, both ways, as tc writes it (1gbit)
#   -d DELAY   one way, as tc writes it, such as 100us (none)
#   -q         no closing table of the bytes that crossed each link
#
# Each process gets RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as torchrun sets
# them. Hosts know each other as host0, host1, ... They share no memory and no process ids, so that libraries do not
# take them for one: else UCX and libfabric's shm would go round the link. The table at the end is read from the links'
# own counters, so it shows what really crossed. The status is the first one that is not 0; when a process fails the
# others are ended. Everything is taken down at the end, also after Ctrl-C; what a killed run left is removed by the
# next. Needs root and iproute2.
set -euo pipefail

hosts=4 ranks=1 links=1 rate=1gbit delay="" table=1
usage() { sed -n '2,/^set -/s/^# \{0,1\}//p' "$0" | sed '/^set -/d' >&2; exit 2; }
number() { [[ $2 =~ ^[1-9][0-9]*$ ]] && [ "$2" -le "$3" ] || { echo "hosts.sh: $1 is \"$2\"; it takes 1 .. $3" >&2; exit 2; }; }
while [ $# -gt 0 ]; do
  case $1 in
    -n | -p | -l | -r | -d) [ $# -ge 2 ] || usage ;;&
    -n) number -n "$2" 64; hosts=$2; shift 2 ;;
    -p) number -p "$2" 64; ranks=$2; shift 2 ;;
    -l) number -l "$2" 8; links=$2; shift 2 ;;
    -r) rate=$2; shift 2 ;;
    -d) delay=$2; shift 2 ;;
    -q) table=0; shift ;;
    --) shift; break ;;
    -*) usage ;;
    *) break ;;
  esac
done
[ $# -gt 0 ] || usage
for program in ip tc unshare; do
  command -v $program >/dev/null || { echo "hosts.sh: needs $program: apt-get install iproute2 util-linux" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "hosts.sh: making network namespaces needs root: run it with sudo" >&2; exit 2; }

prefix=scape-hosts
name=$prefix-$$
switch=$name-switch
names=$(mktemp)

# What runs there is ended. Deleting a namespace takes its links along.
remove() {
  local host
  for host in $(ip netns list 2>/dev/null | awk -v p="$1-" 'index($1, p) == 1 {print $1}'); do
    ip netns pids "$host" 2>/dev/null | xargs -r kill -KILL 2>/dev/null || true
    ip netns delete "$host"
  done
}
take_down() {
  trap - EXIT INT TERM HUP
  remove "$name"
  rm -f "$names"
}
trap 'exit 130' INT
trap 'exit 143' TERM HUP
trap take_down EXIT

for old in $(ip netns list 2>/dev/null | sed -n "s/^$prefix-\([0-9]*\)-switch.*/\1/p"); do
  [ -d "/proc/$old" ] || remove "$prefix-$old"
done

# One core takes all packets of a link's end: else those of one connection are handled by whichever core sent them,
# pass each other, and TCP sends many of them twice.
cores=$(nproc)
steer() {
  ip netns exec "$1" sh -c "printf %x $((1 << ($3 % (cores < 31 ? cores : 31)))) >/sys/class/net/$2/queues/rx-0/rps_cpus"
}

# A burst of more than 64 KiB would let short messages through at any rate; one of less makes long ones late.
shape() {
  ip netns exec "$1" tc qdisc replace dev "$2" root handle 1: tbf rate "$rate" burst 64kb latency 20ms
  [ -z "$delay" ] || ip netns exec "$1" tc qdisc replace dev "$2" parent 1: handle 2: netem delay "$delay" limit 100000
}
ip netns add "$switch"
for ((l = 0; l < links; ++l)); do
  ip -n "$switch" link add name "switch$l" type bridge
  ip -n "$switch" link set "switch$l" up
done
for ((h = 0; h < hosts; ++h)); do
  ip netns add "$name-$h"
  ip -n "$name-$h" link set lo up
  echo "10.73.0.$((h + 1)) host$h" >>"$names"
  for ((l = 0; l < links; ++l)); do
    ip -n "$switch" link add "port$h-$l" type veth peer name "eth$l" netns "$name-$h"
    ip -n "$switch" link set "port$h-$l" master "switch$l" up
    ip -n "$name-$h" addr add "10.73.$l.$((h + 1))/24" dev "eth$l"
    # As a network card that cuts segments itself. One of more than the burst would be cut here, at the cost of the cores.
    ip -n "$name-$h" link set "eth$l" gso_max_size 32768 up
    shape "$name-$h" "eth$l"
    shape "$switch" "port$h-$l"
    steer "$name-$h" "eth$l" "$h"
    steer "$switch" "port$h-$l" "$h"
  done
done

bytes() { ip netns exec "$name-$1" cat "/sys/class/net/eth$2/statistics/$3_bytes"; }

echo "127.0.0.1 localhost" >>"$names"

# all N LAUNCH runs "LAUNCH I", I = 0 .. N-1, side by side, until all have ended or the first has failed, whose status
# it gives. Each reports its end through a pipe: `wait -n` knows nothing of a process that ended before it was called.
# LAUNCH finds standard error at 5: what bash says of a process that was killed goes nowhere.
all='
  all() {
    local i status=0
    exec 3>&1 5>&2 4< <(for ((i = 0; i < $1; ++i)); do
      { end=0; "$2" $i "${@:3}" >&3 3>&- || end=$?; echo $end; } 2>/dev/null &
    done)
    for ((i = 0; i < $1 && status == 0; ++i)); do read -r status <&4 || status=137; done
    exec 3>&- 4<&- 5>&-
    return $status
  }'

# Of one host: its own names and memory, then its ranks.
export HOSTS_RANKS=$ranks HOSTS_NAMES=$names MASTER_ADDR=10.73.0.1 MASTER_PORT=29500
export WORLD_SIZE=$((hosts * ranks)) LOCAL_WORLD_SIZE=$ranks
host=$all'
  echo "host$HOSTS_HOST" >/proc/sys/kernel/hostname
  mount --bind "$HOSTS_NAMES" /etc/hosts
  mount -t tmpfs -o mode=1777 tmpfs /dev/shm
  rank() {
    local LOCAL_RANK=$1 RANK=$((HOSTS_HOST * HOSTS_RANKS + $1)) NCCL_HOSTID=host$HOSTS_HOST
    export LOCAL_RANK RANK NCCL_HOSTID
    "${@:2}" 2>&5 5>&- || {
      end=$?
      echo "hosts.sh: rank $RANK on $NCCL_HOSTID ended with status $end" >&5
      return $end
    }
  }
  all "$HOSTS_RANKS" rank "$@"'
host() {
  HOSTS_HOST=$1 ip netns exec "$name-$1" unshare --uts --ipc --pid --mount --mount-proc --fork --kill-child \
    bash -c "$host" host "${@:2}" 2>&5 5>&-
}
eval "$all"
status=0
all "$hosts" host "$@" || status=$?

if [ $table = 1 ]; then
  printf '# hosts %d, ranks on each %d, link%s %s%s\n' "$hosts" "$ranks" "$([ "$links" = 1 ] || echo "s $links of")" \
    "$rate" "${delay:+, delay $delay}" >&2
  for ((h = 0; h < hosts; ++h)); do
    for ((l = 0; l < links; ++l)); do
      which=host$h
      [ "$links" = 1 ] || which=$which/eth$l
      printf '# %s sent %15d bytes, received %15d\n' "$which" "$(bytes "$h" $l tx)" "$(bytes "$h" $l rx)" >&2
    done
  done
fi
exit $status
