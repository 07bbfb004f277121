// CollNet's tables, one a version, over the engine in plugin/net/collnet.h.
#include <cstddef>
#include <cstdint>

#include "plugin/net/abi/collnet_v10.h"
#include "plugin/net/abi/collnet_v11.h"
#include "plugin/net/abi/collnet_v12.h"
#include "plugin/net/abi/collnet_v6.h"
#include "plugin/net/abi/collnet_v7.h"
#include "plugin/net/abi/collnet_v8.h"
#include "plugin/net/abi/collnet_v9.h"
#include "plugin/net/adapters.h"
#include "plugin/net/collnet.h"
#include "plugin/net/engine.h"

namespace {

namespace net = scape::net;
using net::fit;
using net::is_negative;
constexpr net::Face kFace = net::Face::kCollective;

int init_v6(net_logger logger) { return net::init(logger, nullptr); }
int init_v11(void** context, uint64_t, net_logger logger) {
  if (context == nullptr) return NET_INVALID_ARGUMENT;
  return net::init(logger, context);
}

// The net plugin's but for the largest call: longer ones are cut by NCCL, alike on all ranks.
template <typename P>
int get_properties(int device, P* out) {
  const int result = net::get_properties<kFace>(device, out);
  if constexpr (requires { out->max_collective_bytes; }) {
    if (result == NET_SUCCESS) out->max_collective_bytes = net::Group::kMaxBytes;
  }
  return result;
}

int listen_v11(void*, int device, void* handle, void** comm) {
  return net::coll_listen(device, handle, comm);
}

int connect(void* handles[], int ranks, int rank, void* listen_comm, void** coll_comm) {
  return net::coll_connect(handles, ranks, rank, listen_comm, coll_comm);
}

template <typename Size>
int register_memory(void* comm, void* data, Size size, int type, void** memory) {
  if (is_negative(size)) return net::refuse("regMr of a negative size");
  return net::coll_register_memory(comm, data, static_cast<size_t>(size), type, memory);
}

template <typename Count>
int iallreduce(void* comm, void* send, void* receive, Count count, int type, int op,
               void* send_memory, void* receive_memory, void** request) {
  if (is_negative(count)) return net::refuse("iallreduce of a negative count");
  return net::coll_all_reduce(comm, send, receive, static_cast<size_t>(count), type, op,
                              send_memory, receive_memory, request);
}

// NCCL passes one part; more are for whoever has them.
constexpr int kMostParts = 64;

template <typename P>
class Parts {
 public:
  Parts(const P* parts, int count) : count_(count) {
    for (int i = 0; parts != nullptr && i < count && i < kMostParts; ++i) {
      parts_[i] = {static_cast<net::GroupMemory*>(parts[i].memory),
                   static_cast<std::byte*>(parts[i].address), parts[i].size};
    }
    if (parts == nullptr) data_ = nullptr;
  }
  bool too_many() const { return count_ > kMostParts; }
  const net::Part* data() const { return data_; }

 private:
  int count_;
  net::Part parts_[kMostParts];
  const net::Part* data_ = parts_;
};

template <typename P>
int iallgather(void* comm, void* send, int count, P* parts, size_t bytes_per_rank, size_t offset,
               size_t bytes, void* send_memory, void** request) {
  const Parts<P> taken(parts, count);
  if (taken.too_many()) return net::refuse("iallgather into more than 64 parts");
  return net::coll_all_gather(comm, send, taken.data(), count, {bytes_per_rank, offset, bytes},
                              send_memory, request);
}

template <typename P>
int ireducescatter(void* comm, int count, P* parts, void* receive, size_t bytes_per_rank,
                   size_t offset, size_t bytes, int type, int op, void* receive_memory,
                   void** request) {
  const Parts<P> taken(parts, count);
  if (taken.too_many()) return net::refuse("ireducescatter of more than 64 parts");
  return net::coll_reduce_scatter(comm, taken.data(), count, receive,
                                  {bytes_per_rank, offset, bytes}, type, op, receive_memory,
                                  request);
}

// What is received in host memory is there for all when test says so.
int iflush(void*, void*, int, void*, void** request) {
  if (request != nullptr) *request = nullptr;
  return NET_SUCCESS;
}

template <typename Table, typename P>
constexpr Table make_table() {
  Table table{};
  table.name = net::kPluginName;
  fit(table.init, init_v6, init_v11);
  table.devices = net::get_devices<kFace>;
  table.get_properties = get_properties<P>;
  fit(table.listen, net::coll_listen, listen_v11);
  table.connect = connect;
  table.reduce_support = net::coll_reduce_support;
  fit(table.register_memory, register_memory<int>, register_memory<size_t>);
  table.register_dmabuf = net::register_dmabuf;
  table.deregister_memory = net::coll_deregister_memory;
  fit(table.iallreduce, iallreduce<int>, iallreduce<size_t>);
  if constexpr (requires { table.iallgather; }) {
    fit(table.iallgather, iallgather<collnet_part_v8>, iallgather<collnet_part_v9>,
        iallgather<collnet_part_v10>, iallgather<collnet_part_v11>, iallgather<collnet_part_v12>);
    fit(table.ireducescatter, ireducescatter<collnet_part_v8>, ireducescatter<collnet_part_v9>,
        ireducescatter<collnet_part_v10>, ireducescatter<collnet_part_v11>,
        ireducescatter<collnet_part_v12>);
  }
  table.iflush = iflush;
  table.test = net::coll_test;
  table.close_coll = net::coll_close;
  table.close_listen = net::coll_close_listen;
  if constexpr (requires { table.make_virtual_device; }) {
    fit(table.make_virtual_device, net::make_virtual_device<kFace, net_members_4>,
        net::make_virtual_device<kFace, net_members_8>);
  }
  if constexpr (requires { table.finalize; }) table.finalize = net::finalize;
  return table;
}

}  // namespace

// NCCL looks these up by name, and reads them only.
#pragma GCC visibility push(default)
extern "C" {
constinit collnet_table_v6 ncclCollNetPlugin_v6 = make_table<collnet_table_v6, net_properties_v6>();
constinit collnet_table_v7 ncclCollNetPlugin_v7 = make_table<collnet_table_v7, net_properties_v7>();
constinit collnet_table_v8 ncclCollNetPlugin_v8 = make_table<collnet_table_v8, net_properties_v8>();
constinit collnet_table_v9 ncclCollNetPlugin_v9 = make_table<collnet_table_v9, net_properties_v9>();
constinit collnet_table_v10 ncclCollNetPlugin_v10 =
    make_table<collnet_table_v10, net_properties_v10>();
constinit collnet_table_v11 ncclCollNetPlugin_v11 =
    make_table<collnet_table_v11, net_properties_v11>();
constinit collnet_table_v12 ncclCollNetPlugin_v12 =
    make_table<collnet_table_v12, net_properties_v12>();
}
#pragma GCC visibility pop
