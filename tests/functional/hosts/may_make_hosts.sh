# For sourcing: ends the test as skipped where test hosts cannot be made.
trial=scape-may-i-$$
status=0
{ [ "$(id -u)" = 0 ] && ip netns add $trial && ip netns exec $trial true; } 2>/dev/null || status=$?
ip netns delete $trial 2>/dev/null || true
if [ $status != 0 ]; then
  echo "skipped: network namespaces cannot be made here; it needs root and iproute2"
  exit 77
fi
