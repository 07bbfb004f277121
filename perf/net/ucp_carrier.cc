#include "perf/net/carrier.h"

#ifdef SCAPE_PERF_UCX
#include <ucp/api/ucp.h>

#include <algorithm>
#include <string>
#include <utility>

namespace scape::perf {
namespace {

Status ucp_error(const char* call, ucs_status_t status) {
  return error(SCAPE_ERR_SYSTEM, "%s: %s; UCX_LOG_LEVEL=info tells more", call,
               ucs_status_string(status));
}

class UcpCarrier final : public Carrier {
 public:
  ~UcpCarrier() override {
    if (own_address_ != nullptr) ucp_worker_release_address(worker_, own_address_);
    if (worker_ != nullptr) ucp_worker_destroy(worker_);
    if (context_ != nullptr) ucp_cleanup(context_);
  }

  Status init(const std::string& device) {
    ucp_config_t* config = nullptr;
    ucs_status_t status = ucp_config_read(nullptr, nullptr, &config);
    if (status != UCS_OK) return ucp_error("ucp_config_read", status);
    // Several that are joined: UCX uses them all, in its own way.
    std::string names = device;
    std::replace(names.begin(), names.end(), '+', ',');
    // As the plugin's: "memory" stands for the memory that processes share.
    if (device != "memory") status = ucp_config_modify(config, "NET_DEVICES", names.c_str());
    if (status == UCS_OK) {
      ucp_params_t params{};
      params.field_mask = UCP_PARAM_FIELD_FEATURES;
      params.features = UCP_FEATURE_TAG;
      status = ucp_init(&params, config, &context_);
      if (status != UCS_OK) context_ = nullptr;
    }
    ucp_config_release(config);
    if (status != UCS_OK) return ucp_error("ucp_init", status);
    ucp_worker_params_t worker{};
    worker.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE;
    worker.thread_mode = UCS_THREAD_MODE_SINGLE;
    status = ucp_worker_create(context_, &worker, &worker_);
    if (status != UCS_OK) {
      worker_ = nullptr;
      return ucp_error("ucp_worker_create", status);
    }
    status = ucp_worker_get_address(worker_, &own_address_, &own_address_bytes_);
    if (status == UCS_OK) return Status::Ok();
    own_address_ = nullptr;
    return ucp_error("ucp_worker_get_address", status);
  }

  const std::string& name() const override { return name_; }

  Status open(Control& control, const Areas& areas) override {
    const std::string mine(reinterpret_cast<const char*>(own_address_), own_address_bytes_);
    SCAPE_RETURN_IF_ERROR(exchange(control, mine, &peer_address_));
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS;
    params.address = reinterpret_cast<const ucp_address_t*>(peer_address_.data());
    ucs_status_t status = ucp_ep_create(worker_, &params, &endpoint_);
    if (status != UCS_OK) return ucp_error("ucp_ep_create", status);
    const size_t bytes = areas.bytes * static_cast<size_t>(areas.connections);
    status = map(areas.send, bytes, &send_memory_);
    if (status == UCS_OK) status = map(areas.receive, bytes, &receive_memory_);
    return status == UCS_OK ? Status::Ok() : ucp_error("ucp_mem_map", status);
  }

  Status close(Control& control) override {
    SCAPE_RETURN_IF_ERROR(control.barrier());
    const ucp_request_param_t param{};
    const ucs_status_ptr_t closing = ucp_ep_close_nbx(endpoint_, &param);
    if (UCS_PTR_IS_PTR(closing)) {
      while (ucp_request_check_status(closing) == UCS_INPROGRESS) ucp_worker_progress(worker_);
      ucp_request_free(closing);
    }
    SCAPE_RETURN_IF_ERROR(control.barrier());
    for (ucp_mem_h memory : {send_memory_, receive_memory_}) ucp_mem_unmap(context_, memory);
    return Status::Ok();
  }

  Answer send(int connection, void* data, size_t bytes, int tag, Request* request) override {
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_MEMH;
    param.memh = send_memory_;
    request->receives = false;
    request->count = 1;
    request->handles[0] =
        ucp_tag_send_nbx(endpoint_, data, bytes, full_tag(connection, tag), &param);
    return check("ucp_tag_send_nbx", request->handles[0]);
  }

  Answer receive(int connection, int count, void** data, const size_t* bytes, int* tags,
                 Request* request) override {
    request->receives = true;
    request->count = count;
    for (int i = 0; i < count; ++i) {
      ucp_request_param_t param{};
      param.op_attr_mask = UCP_OP_ATTR_FIELD_MEMH | UCP_OP_ATTR_FLAG_NO_IMM_CMPL;
      param.memh = receive_memory_;
      request->handles[i] = ucp_tag_recv_nbx(worker_, data[i], bytes[i],
                                             full_tag(connection, tags[i]), ~uint64_t{0}, &param);
      if (check("ucp_tag_recv_nbx", request->handles[i]) == Answer::kFailed) return Answer::kFailed;
    }
    return Answer::kDone;
  }

  Answer test(Request* request) override {
    for (int i = 0; i < request->count; ++i) {
      if (request->handles[i] == nullptr) continue;
      ucs_status_t status = ucp_request_check_status(request->handles[i]);
      if (status == UCS_INPROGRESS) {
        ucp_worker_progress(worker_);
        status = ucp_request_check_status(request->handles[i]);
      }
      if (status == UCS_INPROGRESS) return Answer::kNotNow;
      ucp_tag_recv_info_t info{};
      if (request->receives) ucp_tag_recv_request_test(request->handles[i], &info);
      ucp_request_free(std::exchange(request->handles[i], nullptr));
      if (status != UCS_OK) {
        failure_ = ucp_error("a message", status);
        return Answer::kFailed;
      }
      request->sizes[i] = info.length;
    }
    return Answer::kDone;
  }

  Status failure() const override { return failure_; }

 private:
  static uint64_t full_tag(int connection, int tag) {
    return static_cast<uint64_t>(connection) << 32 | static_cast<uint32_t>(tag);
  }

  ucs_status_t map(void* data, size_t bytes, ucp_mem_h* out) {
    ucp_mem_map_params_t params{};
    params.field_mask = UCP_MEM_MAP_PARAM_FIELD_ADDRESS | UCP_MEM_MAP_PARAM_FIELD_LENGTH;
    params.address = data;
    params.length = bytes;
    return ucp_mem_map(context_, &params, out);
  }

  Answer check(const char* call, ucs_status_ptr_t request) {
    if (!UCS_PTR_IS_ERR(request)) return Answer::kDone;
    failure_ = ucp_error(call, UCS_PTR_STATUS(request));
    return Answer::kFailed;
  }

  const std::string name_ = "ucp";
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  ucp_address_t* own_address_ = nullptr;
  size_t own_address_bytes_ = 0;
  std::string peer_address_;
  ucp_ep_h endpoint_ = nullptr;
  ucp_mem_h send_memory_ = nullptr, receive_memory_ = nullptr;
  Status failure_;
};

}  // namespace

Status make_ucp_carrier(const std::string& device, std::unique_ptr<Carrier>* out) {
  auto carrier = std::make_unique<UcpCarrier>();
  SCAPE_RETURN_IF_ERROR(carrier->init(device));
  *out = std::move(carrier);
  return Status::Ok();
}

}  // namespace scape::perf

#else
namespace scape::perf {

Status make_ucp_carrier(const std::string&, std::unique_ptr<Carrier>*) {
  return error(SCAPE_ERR_NOT_FOUND,
               "--rival ucp: built without UCX; install libucx-dev and build again");
}

}  // namespace scape::perf
#endif
