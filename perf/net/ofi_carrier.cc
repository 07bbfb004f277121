#include "perf/net/carrier.h"

#ifdef SCAPE_PERF_OFI
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_tagged.h>

#include <cstdlib>
#include <deque>
#include <utility>
#include <vector>

namespace scape::perf {
namespace {

constexpr uint32_t kApi = FI_VERSION(1, 14);

Status fi_error(const char* call, ssize_t status) {
  return error(SCAPE_ERR_SYSTEM, "%s: %s; FI_LOG_LEVEL=warn tells more", call,
               fi_strerror(static_cast<int>(std::abs(status))));
}

template <typename Object>
void close_object(Object*& object) {
  if (object != nullptr) fi_close(&object->fid);
  object = nullptr;
}

class OfiCarrier final : public Carrier {
 public:
  ~OfiCarrier() override {
    close_object(endpoint_);
    close_object(send_memory_);
    close_object(receive_memory_);
    close_object(queue_);
    close_object(vector_);
    close_object(domain_);
    close_object(fabric_);
    if (info_ != nullptr) fi_freeinfo(info_);
  }

  Status init(const std::string& device) {
    SCAPE_RETURN_IF_ERROR(find(device));
    int status = fi_fabric(info_->fabric_attr, &fabric_, nullptr);
    if (status != 0) return fi_error("fi_fabric", status);
    status = fi_domain(fabric_, info_, &domain_, nullptr);
    if (status != 0) return fi_error("fi_domain", status);
    fi_av_attr vector{};
    vector.type = FI_AV_TABLE;
    vector.count = 1;
    status = fi_av_open(domain_, &vector, &vector_, nullptr);
    if (status != 0) return fi_error("fi_av_open", status);
    fi_cq_attr queue{};
    queue.format = FI_CQ_FORMAT_TAGGED;
    queue.wait_obj = FI_WAIT_NONE;
    status = fi_cq_open(domain_, &queue, &queue_, nullptr);
    if (status != 0) return fi_error("fi_cq_open", status);
    status = fi_endpoint(domain_, info_, &endpoint_, nullptr);
    if (status != 0) return fi_error("fi_endpoint", status);
    status = fi_ep_bind(endpoint_, &vector_->fid, 0);
    if (status != 0) return fi_error("fi_ep_bind", status);
    status = fi_ep_bind(endpoint_, &queue_->fid, FI_TRANSMIT | FI_RECV);
    if (status != 0) return fi_error("fi_ep_bind", status);
    status = fi_enable(endpoint_);
    return status == 0 ? Status::Ok() : fi_error("fi_enable", status);
  }

  const std::string& name() const override { return name_; }

  Status open(Control& control, const Areas& areas) override {
    std::string mine(512, '\0'), theirs;
    size_t length = mine.size();
    if (const int status = fi_getname(&endpoint_->fid, mine.data(), &length); status != 0) {
      return fi_error("fi_getname", status);
    }
    mine.resize(length);
    SCAPE_RETURN_IF_ERROR(exchange(control, mine, &theirs));
    if (fi_av_insert(vector_, theirs.data(), 1, &peer_, 0, nullptr) != 1) {
      return error(SCAPE_ERR_SYSTEM, "fi_av_insert refuses the other rank's address");
    }
    if ((info_->domain_attr->mr_mode & FI_MR_LOCAL) == 0) return Status::Ok();
    const bool chooses_keys = (info_->domain_attr->mr_mode & FI_MR_PROV_KEY) == 0;
    const size_t bytes = areas.bytes * static_cast<size_t>(areas.connections);
    int status = fi_mr_reg(domain_, areas.send, bytes, FI_SEND, 0, chooses_keys ? 1 : 0, 0,
                           &send_memory_, nullptr);
    if (status == 0) {
      status = fi_mr_reg(domain_, areas.receive, bytes, FI_RECV, 0, chooses_keys ? 2 : 0, 0,
                         &receive_memory_, nullptr);
    }
    if (status != 0) return fi_error("fi_mr_reg", status);
    send_descriptor_ = fi_mr_desc(send_memory_);
    receive_descriptor_ = fi_mr_desc(receive_memory_);
    return Status::Ok();
  }

  Status close(Control& control) override { return control.barrier(); }

  Answer send(int connection, void* data, size_t bytes, int tag, Request* request) override {
    request->receives = false;
    request->count = 1;
    // Not injected, as the plugin's: what is given away without a completion, in any number,
    // overruns a receiver (libfabric 1.17's shm then fails).
    Slot* const slot = take();
    const ssize_t status =
        fi_tsend(endpoint_, data, bytes, send_descriptor_, peer_, full_tag(connection, tag), slot);
    request->handles[0] = slot;
    if (status == 0) return Answer::kDone;
    free_.push_back(slot);
    if (status != -FI_EAGAIN) return fail("fi_tsend", status);
    return drive() ? Answer::kNotNow : Answer::kFailed;
  }

  Answer receive(int connection, int count, void** data, const size_t* bytes, int* tags,
                 Request* request) override {
    request->receives = true;
    request->count = count;
    for (int i = 0; i < count; ++i) {
      Slot* const slot = take();
      request->handles[i] = slot;
      ssize_t status = -FI_EAGAIN;
      while (status == -FI_EAGAIN) {
        status = fi_trecv(endpoint_, data[i], bytes[i], receive_descriptor_, FI_ADDR_UNSPEC,
                          full_tag(connection, tags[i]), 0, slot);
        if (status == -FI_EAGAIN && !drive()) return Answer::kFailed;
      }
      if (status != 0) return fail("fi_trecv", status);
    }
    return Answer::kDone;
  }

  Answer test(Request* request) override {
    bool driven = false;
    for (int i = 0; i < request->count; ++i) {
      auto* const slot = static_cast<Slot*>(request->handles[i]);
      if (slot == nullptr) continue;
      if (!slot->done && !std::exchange(driven, true) && !drive()) return Answer::kFailed;
      if (!slot->done) return Answer::kNotNow;
      request->sizes[i] = slot->bytes;
      free_.push_back(slot);
      request->handles[i] = nullptr;
    }
    return Answer::kDone;
  }

  Status failure() const override { return failure_; }

 private:
  // Completions name it by its address.
  struct Slot {
    fi_context2 context;
    bool done;
    size_t bytes;
  };

  static uint64_t full_tag(int connection, int tag) {
    return static_cast<uint64_t>(connection) << 32 | static_cast<uint32_t>(tag);
  }

  // The first provider for tagged messages that has the device, or the first there is.
  Status find(const std::string& device) {
    fi_info* const hints = fi_allocinfo();
    if (hints == nullptr) return fi_error("fi_allocinfo", FI_ENOMEM);
    hints->caps = FI_TAGGED;
    hints->mode = FI_CONTEXT | FI_CONTEXT2;
    hints->ep_attr->type = FI_EP_RDM;
    hints->tx_attr->msg_order = hints->rx_attr->msg_order = FI_ORDER_SAS;
    hints->domain_attr->threading = FI_THREAD_DOMAIN;
    hints->domain_attr->mr_mode = FI_MR_LOCAL | FI_MR_ALLOCATED | FI_MR_PROV_KEY | FI_MR_VIRT_ADDR;
    fi_info* all = nullptr;
    const int status = fi_getinfo(kApi, nullptr, nullptr, 0, hints, &all);
    fi_freeinfo(hints);
    if (status != 0) return fi_error("fi_getinfo", status);
    const fi_info* chosen = all;
    for (const fi_info* info = all; info != nullptr; info = info->next) {
      if (device != info->domain_attr->name) continue;
      chosen = info;
      break;
    }
    info_ = fi_dupinfo(chosen);
    fi_freeinfo(all);
    if (info_ == nullptr) return fi_error("fi_dupinfo", FI_ENOMEM);
    name_ = std::string("ofi:") + info_->fabric_attr->prov_name;
    return Status::Ok();
  }

  Slot* take() {
    if (free_.empty()) free_.push_back(&slots_.emplace_back());
    Slot* const slot = free_.back();
    free_.pop_back();
    slot->done = false;
    return slot;
  }

  bool drive() {
    fi_cq_tagged_entry entries[16];
    const ssize_t count = fi_cq_read(queue_, entries, 16);
    if (count == -FI_EAGAIN) return true;
    if (count < 0) {
      fi_cq_err_entry entry{};
      fi_cq_readerr(queue_, &entry, 0);
      fail("a message", entry.err != 0 ? entry.err : count);
      return false;
    }
    for (ssize_t i = 0; i < count; ++i) {
      auto* const slot = static_cast<Slot*>(entries[i].op_context);
      if (slot == nullptr) continue;
      slot->done = true;
      slot->bytes = entries[i].len;
    }
    return true;
  }

  Answer fail(const char* call, ssize_t status) {
    failure_ = fi_error(call, status);
    return Answer::kFailed;
  }

  std::string name_;
  fi_info* info_ = nullptr;
  fid_fabric* fabric_ = nullptr;
  fid_domain* domain_ = nullptr;
  fid_av* vector_ = nullptr;
  fid_cq* queue_ = nullptr;
  fid_ep* endpoint_ = nullptr;
  fid_mr* send_memory_ = nullptr;
  fid_mr* receive_memory_ = nullptr;
  void* send_descriptor_ = nullptr;
  void* receive_descriptor_ = nullptr;
  fi_addr_t peer_ = FI_ADDR_UNSPEC;
  std::deque<Slot> slots_;  // addresses stay
  std::vector<Slot*> free_;
  Status failure_;
};

}  // namespace

Status make_ofi_carrier(const std::string& device, std::unique_ptr<Carrier>* out) {
  auto carrier = std::make_unique<OfiCarrier>();
  SCAPE_RETURN_IF_ERROR(carrier->init(device));
  *out = std::move(carrier);
  return Status::Ok();
}

}  // namespace scape::perf

#else
namespace scape::perf {

Status make_ofi_carrier(const std::string&, std::unique_ptr<Carrier>*) {
  return error(SCAPE_ERR_NOT_FOUND,
               "--rival ofi: built without libfabric; install libfabric-dev and build again");
}

}  // namespace scape::perf
#endif
