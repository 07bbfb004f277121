// The tables that NCCL looks up, one a version. Each entry is an engine function behind the
// version's signature; what differs by types only is a template.
#include <algorithm>
#include <climits>
#include <cstring>
#include <type_traits>

#include "plugin/net/abi/net_v10.h"
#include "plugin/net/abi/net_v11.h"
#include "plugin/net/abi/net_v12.h"
#include "plugin/net/abi/net_v6.h"
#include "plugin/net/abi/net_v7.h"
#include "plugin/net/abi/net_v8.h"
#include "plugin/net/abi/net_v9.h"
#include "plugin/net/adapters.h"
#include "plugin/net/engine.h"

namespace {

namespace net = scape::net;
using net::fit;
using net::is_negative;

int init_v6(net_logger logger) { return net::init(logger, nullptr); }
int init_v10(net_logger logger, net_profiler) { return net::init(logger, nullptr); }
int init_v11(void** context, uint64_t, net_config*, net_logger logger, net_profiler) {
  if (context == nullptr) return NET_INVALID_ARGUMENT;
  return net::init(logger, context);
}

int listen_v6(int device, void* handle, void** comm) {
  return net::listen(nullptr, device, handle, comm);
}

// Nothing runs on the device: there is no handle for it.
void no_device_comm(void** device_comm) {
  if (device_comm != nullptr) *device_comm = nullptr;
}
int connect_v6(int device, void* handle, void** comm) {
  return net::connect(nullptr, device, handle, comm);
}
int connect_v7(int device, void* handle, void** comm, void** device_comm) {
  no_device_comm(device_comm);
  return net::connect(nullptr, device, handle, comm);
}
int connect_v10(int device, net_config*, void* handle, void** comm, void** device_comm) {
  return connect_v7(device, handle, comm, device_comm);
}
int connect_v11(void* context, int device, void* handle, void** comm, void** device_comm) {
  no_device_comm(device_comm);
  return net::connect(context, device, handle, comm);
}
int accept_v7(void* listen_comm, void** comm, void** device_comm) {
  no_device_comm(device_comm);
  return net::accept(listen_comm, comm);
}

template <typename Size>
int register_memory(void* comm, void* data, Size size, int type, void** memory) {
  if (is_negative(size)) return net::refuse("regMr of a negative size");
  return net::register_memory(comm, data, static_cast<size_t>(size), type, memory);
}
template <typename Size>
int isend(void* comm, void* data, Size size, int tag, void* memory, void** request) {
  if (is_negative(size)) return net::refuse("isend of a negative size");
  return net::isend(comm, data, static_cast<size_t>(size), tag, memory, request);
}
int isend_v10(void* comm, void* data, size_t size, int tag, void* memory, void*, void** request) {
  return net::isend(comm, data, size, tag, memory, request);
}

int irecv_v6(void* comm, int n, void** data, int* sizes, int* tags, void** memories,
             void** request) {
  size_t wide[NET_MAX_RECEIVES] = {};
  for (int i = 0; sizes != nullptr && i < std::min<int>(n, NET_MAX_RECEIVES); ++i) {
    if (sizes[i] < 0) return net::refuse("irecv of a negative size");
    wide[i] = static_cast<size_t>(sizes[i]);
  }
  return net::irecv(comm, n, data, sizes != nullptr ? wide : nullptr, tags, memories, request);
}
int irecv_v9(void* comm, int n, void** data, size_t* sizes, int* tags, void** memories,
             void** request) {
  return net::irecv(comm, n, data, sizes, tags, memories, request);
}
int irecv_v10(void* comm, int n, void** data, size_t* sizes, int* tags, void** memories, void**,
              void** request) {
  return net::irecv(comm, n, data, sizes, tags, memories, request);
}

// What is received in host memory is there for all when test says so.
int iflush(void*, int, void**, int*, void**, void** request) {
  if (request != nullptr) *request = nullptr;
  return NET_SUCCESS;
}

int get_device_memory(void*, void*, void**) { return net::refuse("getDeviceMr"); }
int receive_consumed(void*, int, void*) { return net::refuse("irecvConsumed"); }

int set_attributes(void*, net_attributes*) { return NET_SUCCESS; }

template <typename Table, typename P>
constexpr Table make_table() {
  Table table{};
  table.name = net::kPluginName;
  fit(table.init, init_v6, init_v10, init_v11);
  table.devices = net::get_devices<net::Face::kNet>;
  table.get_properties = net::get_properties<net::Face::kNet, P>;
  fit(table.listen, listen_v6, net::listen);
  fit(table.connect, connect_v6, connect_v7, connect_v10, connect_v11);
  fit(table.accept, net::accept, accept_v7);
  fit(table.register_memory, register_memory<int>, register_memory<size_t>);
  table.register_dmabuf = net::register_dmabuf;
  table.deregister_memory = net::deregister_memory;
  fit(table.isend, isend<int>, isend<size_t>, isend_v10);
  fit(table.irecv, irecv_v6, irecv_v9, irecv_v10);
  table.iflush = iflush;
  table.test = net::test;
  table.close_send = net::close_send;
  table.close_receive = net::close_receive;
  table.close_listen = net::close_listen;
  if constexpr (requires { table.get_device_memory; }) {
    table.get_device_memory = get_device_memory;
    table.receive_consumed = receive_consumed;
  }
  if constexpr (requires { table.make_virtual_device; }) {
    fit(table.make_virtual_device, net::make_virtual_device<net::Face::kNet, net_members_4>,
        net::make_virtual_device<net::Face::kNet, net_members_8>);
  }
  if constexpr (requires { table.finalize; }) {
    table.finalize = net::finalize;
    table.set_attributes = set_attributes;
  }
  return table;
}

}  // namespace

// NCCL looks these up by name, and reads them only.
#pragma GCC visibility push(default)
extern "C" {
constinit net_table_v6 ncclNetPlugin_v6 = make_table<net_table_v6, net_properties_v6>();
constinit net_table_v7 ncclNetPlugin_v7 = make_table<net_table_v7, net_properties_v7>();
constinit net_table_v8 ncclNetPlugin_v8 = make_table<net_table_v8, net_properties_v8>();
constinit net_table_v9 ncclNetPlugin_v9 = make_table<net_table_v9, net_properties_v9>();
constinit net_table_v10 ncclNetPlugin_v10 = make_table<net_table_v10, net_properties_v10>();
constinit net_table_v11 ncclNetPlugin_v11 = make_table<net_table_v11, net_properties_v11>();
constinit net_table_v12 ncclNetPlugin_v12 = make_table<net_table_v12, net_properties_v12>();
}
#pragma GCC visibility pop
