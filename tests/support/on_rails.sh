#!/usr/bin/env bash
# Runs a command in a network namespace with two interfaces, rail0 and rail1, beside loopback: on_rails.sh COMMAND...
set -euo pipefail
name=scape-rails-$$
skip() { echo "skipped: $*"; exit 77; }
[ "$(id -u)" = 0 ] || skip "making a network namespace needs root"
command -v ip >/dev/null || skip "there is no ip (iproute2)"
# A killed run's is removed by the next.
for old in $(ip netns list 2>/dev/null | sed -n 's/^scape-rails-\([0-9]*\).*/\1/p'); do
  [ -d "/proc/$old" ] || ip netns delete "scape-rails-$old" || true
done
ip netns add "$name" 2>/dev/null || skip "a network namespace cannot be made here"
trap 'ip netns delete "$name"' EXIT
# Under a changed root that is no mount of its own it cannot.
ip netns exec "$name" true 2>/dev/null || skip "ip cannot enter a network namespace here"
ip -n "$name" link set lo up
for i in 0 1; do
  ip -n "$name" link add "rail$i" type veth peer name "far$i"
  ip -n "$name" addr add "10.74.$i.1/24" dev "rail$i"
  ip -n "$name" link set "far$i" up
  ip -n "$name" link set "rail$i" up
done
ip netns exec "$name" "$@"
