// The one registry of SCAPE_* variables: SCAPE_SETTING_*(field, NAME, default, range or choices,
// help). `settings()`, `scape-info` and docs/settings.md come from this list. Included several
// times with different definitions of the macros.
//
//   SCAPE_SETTING_CHOICE(field, name, default, "a|b|c", help)   an int: the choice's index
//   SCAPE_SETTING_STRING(field, name, default, help)            a std::string
//   SCAPE_SETTING_BOOL(field, name, default, help)              a bool (0|1|on|off|true|false)
//   SCAPE_SETTING_INT(field, name, default, min, max, help)     an int64_t, bounds included
//   SCAPE_SETTING_REAL(field, name, default, min, max, help)    a double, bounds included
//   SCAPE_SETTING_PORTS(field, name, help)                      a PortRange; any port when empty
//   SCAPE_SETTING_CPUS(field, name, help)                       a CpuChoice (auto|none|0-3,8)

SCAPE_SETTING_CHOICE(
    mode, "SCAPE_MODE", "auto", "auto|host|device",
    "host serves NCCL calls on host memory; device passes them to the real NCCL; auto "
    "takes device where a GPU and a real NCCL are usable")
SCAPE_SETTING_BOOL(enable, "SCAPE_ENABLE", true, "0 leaves every registered buffer dense")
SCAPE_SETTING_BOOL(
    required, "SCAPE_REQUIRED", false,
    "1 ends the program when a registration is refused or the library is not preloaded")
SCAPE_SETTING_CHOICE(log, "SCAPE_LOG", "warn", "none|error|warn|info|debug",
                     "most detailed level logged")
SCAPE_SETTING_STRING(log_file, "SCAPE_LOG_FILE", "",
                     "file that log lines are appended to; stderr when empty")
SCAPE_SETTING_BOOL(
    unset_preload, "SCAPE_UNSET_PRELOAD", false,
    "1 takes the library out of LD_PRELOAD at its first use, so that children start without it")
SCAPE_SETTING_STRING(nccl_lib, "SCAPE_NCCL_LIB", "",
                     "path of the real libnccl.so.2; found by itself when empty")
SCAPE_SETTING_CHOICE(
    transport, "SCAPE_TRANSPORT", "auto", "auto|ucx|ofi",
    "transport of host communicators: UCX, or libfabric (ofi); in device mode, where it is named, "
    "masked payloads and masks travel over it by way of the host, and auto leaves them to the real "
    "NCCL; auto takes UCX in host mode")
SCAPE_SETTING_CHOICE(
    net, "SCAPE_NET", "auto", "auto|ucx|ofi",
    "network library of NCCL's net plugin: UCX, libfabric (ofi), or the better for the hardware")
SCAPE_SETTING_STRING(
    net_stats, "SCAPE_NET_STATS", "",
    "file that the net plugin's counters are written to: Prometheus's text where it ends in .prom, "
    "else JSON; %h, %p and %r stand for host, process and rank; a folder takes a file for each "
    "process; none when empty")
SCAPE_SETTING_REAL(net_stats_interval_s, "SCAPE_NET_STATS_INTERVAL", 0, 0, 86400,
                   "seconds between writings of that file while NCCL calls; 0: at the start and "
                   "the end only")
SCAPE_SETTING_CHOICE(simd, "SCAPE_SIMD", "auto", "auto|scalar|baseline|avx2|avx512|neon",
                     "kernels to use; auto takes the best that the CPU has")
SCAPE_SETTING_REAL(timeout_s, "SCAPE_TIMEOUT", 300, 0.1, 86400,
                   "seconds a collective may wait for its peers before it fails")
SCAPE_SETTING_REAL(bootstrap_timeout_s, "SCAPE_BOOTSTRAP_TIMEOUT", 120, 0.1, 86400,
                   "seconds a communicator's creation may wait for its peers before it fails")
SCAPE_SETTING_STRING(
    net_if, "SCAPE_NET_IF", "",
    "network devices that messages may use, in the form of NCCL_SOCKET_IFNAME, of those that "
    "UCX_NET_DEVICES or FI_*_IFACE leave, and where several are named they share large messages; "
    "when empty, and those are too, NCCL_SOCKET_IFNAME chooses")
SCAPE_SETTING_STRING(
    socket_ifname, "NCCL_SOCKET_IFNAME", "",
    "interfaces the bootstrap may use: a comma-separated list of prefixes, ^ excludes, = matches "
    "exactly")
SCAPE_SETTING_CHOICE(socket_family, "NCCL_SOCKET_FAMILY", "any", "any|AF_INET|AF_INET6",
                     "address family the bootstrap may use")
SCAPE_SETTING_PORTS(
    port_range, "SCAPE_PORT_RANGE",
    "TCP ports that the bootstrap, the lifelines and the net plugin may listen on; any when empty")
SCAPE_SETTING_STRING(host_id, "NCCL_HOSTID", "",
                     "name of this host; ranks with one name may share memory. Host name and boot "
                     "when empty")
SCAPE_SETTING_BOOL(shared_memory, "SCAPE_SHARED_MEMORY", true,
                   "0 sends payloads through the transport between ranks of one host, too")
SCAPE_SETTING_BOOL(large_pages, "SCAPE_LARGE_PAGES", true,
                   "in host mode, puts a registered buffer on large pages at its first call, which "
                   "its passes over "
                   "memory take up to a third less time on; 0 leaves its pages as they are")
SCAPE_SETTING_CPUS(
    progress_cpus, "SCAPE_PROGRESS_CPUS",
    "CPUs for the progress thread: auto keeps it off a pinned caller's core and next to the "
    "caller's memory, none leaves it to the system, a list such as 0-3,8 names them; never others "
    "than the process may use")
SCAPE_SETTING_REAL(
    sparsity, "SCAPE_SPARSITY", 0.99, 0, 0.999999,
    "fraction of a registered buffer's elements not sent, where its registration names none")
SCAPE_SETTING_INT(dense_steps, "SCAPE_DENSE_STEPS", 20, 1, 1000000000,
                  "first steps of a buffer that travel dense, where its registration names none")
SCAPE_SETTING_INT(ramp_steps, "SCAPE_RAMP_STEPS", 200, 1, 1000000000,
                  "step from which the full sparsity holds, where its registration names none")
SCAPE_SETTING_REAL(ramp_sparsity, "SCAPE_RAMP_SPARSITY", 0.9, 0, 0.999999,
                   "most sparsity between the dense steps and the end of the ramp")
SCAPE_SETTING_CHOICE(payload, "SCAPE_PAYLOAD", "fp32", "fp32|bf16",
                     "type the payload travels in, where the registration names none")
SCAPE_SETTING_CHOICE(residual, "SCAPE_RESIDUAL", "device", "device|inplace|host",
                     "where what was not sent waits, where the registration names no place: device "
                     "memory, the gradient buffer (inplace: fp32 and the fused role only), or "
                     "page-locked memory of the host; in host mode device and host are the same")
SCAPE_SETTING_INT(residual_chunk, "SCAPE_RESIDUAL_CHUNK", 8388608, 8192, 1073741824,
                  "bytes of a residual in host memory that go to the device at a time, into one of "
                  "two chunks that a communicator's buffers share there; whole 8 KiB count")
SCAPE_SETTING_STRING(
    lib, "SCAPE_LIB", "",
    "libscape_nccl.so, or its folder, that scape-run preloads; found by itself when empty")
SCAPE_SETTING_CHOICE(
    fault, "SCAPE_FAULT", "none",
    "none|meeting|connecting|connected|dense|agreement|side_channel|share|pack|exchange|unpack|"
    "step|select|masks|closing",
    "point at which this process kills itself, to try how the other ranks take it")
SCAPE_SETTING_INT(fault_after, "SCAPE_FAULT_AFTER", 1, 1, 1000000000,
                  "the how manieth time at that point it is")
