#include "plugin/masked/buffer_state.h"

#include <algorithm>
#include <bit>
#include <cinttypes>
#include <cstring>
#include <type_traits>
#include <utility>

#include "base/crc.h"

namespace scape::plugin {
namespace {

constexpr char kMagic[8] = {'S', 'C', 'A', 'P', 'E', 'b', 'u', 'f'};
constexpr uint32_t kVersion = 2;

// The saved form is the header, then the arrays in the order of BufferState, then the CRC of all
// before it.
struct Header {
  char magic[8] = {};
  uint32_t version = 0;
  int32_t rank = 0;
  int32_t ranks = 0;
  int32_t dtype = 0;
  int32_t role = 0;
  int32_t rule = 0;
  int32_t reduction = 0;
  uint32_t residual_dirty = 0;
  uint32_t flag_pending = 0;
  uint32_t padding = 0;
  double factor = 0;
  uint64_t offset = 0;
  uint64_t count = 0;
  uint64_t step = 0;
  uint64_t restamp_at = 0;
  // Elements of each array.
  uint64_t moment = 0;
  uint64_t last = 0;
  uint64_t residual = 0;
  uint64_t mask = 0;
  uint64_t before = 0;
  uint64_t next = 0;
  uint64_t decay = 0;
  char name[64] = {};
};
static_assert(sizeof(Header) == 208 && std::is_trivially_copyable_v<Header>);
static_assert(std::endian::native == std::endian::little);

uint64_t saved_bytes(const Header& header) {
  return sizeof(header) + (header.moment + header.residual) * sizeof(float) +
         header.last * sizeof(uint16_t) +
         (header.mask + header.before + header.next) * sizeof(uint64_t) +
         header.decay * sizeof(double) + sizeof(uint32_t);
}

void put(std::byte** at, const void* data, size_t bytes) {
  if (bytes == 0) return;
  std::memcpy(*at, data, bytes);
  *at += bytes;
}

template <typename T>
void put(std::byte** at, const Array<T>& values, Stream stream) {
  values.copy_to(*at, stream);
  *at += values.size() * sizeof(T);
}

// The bytes of `count` elements; goes on behind them.
template <typename T>
const std::byte* take(const std::byte** data, uint64_t count) {
  return std::exchange(*data, *data + count * sizeof(T));
}

template <typename T>
std::vector<T> take_all(const std::byte** data, uint64_t count) {
  std::vector<T> values(count);
  const std::byte* const bytes = take<T>(data, count);
  if (count > 0) std::memcpy(values.data(), bytes, count * sizeof(T));
  return values;
}

Status damaged(const StateOwner& owner, const char* what) {
  return error(SCAPE_ERR_DATA,
               "saved state of buffer '%s' is damaged (%s); nothing was loaded: load another copy",
               owner.config.name.c_str(), what);
}

Status foreign(const StateOwner& owner, const char* what, const std::string& saved,
               const std::string& here) {
  return error(
      SCAPE_ERR_DATA,
      "saved state of buffer '%s' is of %s %s, but here it is %s; nothing was loaded: give each "
      "rank the state that it saved itself, and register the buffer as it was then",
      owner.config.name.c_str(), what, saved.c_str(), here.c_str());
}

Status other_schedule(const StateOwner& owner, const std::string& saved, const std::string& here) {
  return error(SCAPE_ERR_DATA,
               "saved state of buffer '%s' has a next step with %s, but its options here want %s; "
               "nothing was loaded: register it with the sparsity and the warm-up that it was "
               "saved with",
               owner.config.name.c_str(), saved.c_str(), here.c_str());
}

Status check_owner(const StateOwner& owner, const Header& header) {
  const auto check = [&](const char* what, uint64_t saved, uint64_t here) {
    if (saved == here) return Status::Ok();
    return foreign(owner, what, format("%" PRIu64, saved), format("%" PRIu64, here));
  };
  const std::string name(header.name, ::strnlen(header.name, sizeof(header.name)));
  if (name != owner.config.name)
    return foreign(owner, "name", "'" + name + "'", "'" + owner.config.name + "'");
  SCAPE_RETURN_IF_ERROR(
      check("world size", static_cast<uint64_t>(header.ranks), static_cast<uint64_t>(owner.ranks)));
  SCAPE_RETURN_IF_ERROR(
      check("rank", static_cast<uint64_t>(header.rank), static_cast<uint64_t>(owner.rank)));
  SCAPE_RETURN_IF_ERROR(check("offset", header.offset, owner.config.offset));
  SCAPE_RETURN_IF_ERROR(check("count", header.count, owner.count));
  const auto check_choice = [&](const char* what, int saved, int here, std::string (*text)(int)) {
    return saved == here ? Status::Ok() : foreign(owner, what, text(saved), text(here));
  };
  SCAPE_RETURN_IF_ERROR(check_choice("element type", header.dtype, owner.config.dtype, type_text));
  SCAPE_RETURN_IF_ERROR(check_choice("role", header.role, owner.config.role, role_text));
  return check_choice("update rule", header.rule, owner.config.rule, rule_text);
}

// The arrays' sizes can only be what the buffer needs, or nothing.
Status check_sizes(const StateOwner& owner, const Header& header) {
  const uint64_t words = kernels::mask_words(owner.count);
  const auto none_or = [](uint64_t size, uint64_t whole) { return size == 0 || size == whole; };
  const bool fits = none_or(header.moment, owner.count) && none_or(header.last, owner.count) &&
                    none_or(header.residual, owner.count) && none_or(header.mask, words) &&
                    none_or(header.before, words) && none_or(header.next, words) &&
                    header.moment == header.last && header.decay <= DecayTable::kLongest &&
                    header.restamp_at <= owner.count;
  return fits ? Status::Ok() : damaged(owner, "an array has an impossible size");
}

// What no call leaves behind, and what goes on from it would not survive.
Status check_values(const StateOwner& owner, ReduceOp op, const std::vector<double>& decay) {
  if (op != ReduceOp::kSum && op != ReduceOp::kAvg && op != ReduceOp::kPremulSum)
    return damaged(owner, "its reduction is none");
  for (const double factor : decay) {
    if (!(factor > 0 && factor <= 1)) return damaged(owner, "a decay is not in (0, 1]");
  }
  return Status::Ok();
}

Status check_mask(const StateOwner& owner, const std::vector<uint64_t>& mask) {
  if (!mask.empty() && owner.count % 64 != 0 && mask.back() >> (owner.count % 64) != 0)
    return damaged(owner, "a mask has bits beyond its end");
  return Status::Ok();
}

// A mask chosen under another schedule would not have the bits that the other ranks expect, and a
// step that was to be dense has none.
Status check_next(const StateOwner& owner, uint64_t step, const std::vector<uint64_t>& next) {
  const bool dense = owner.ranks == 1 || owner.count == 0 || sparsity_at(owner.config, step) == 0;
  if (next.empty() != dense)
    return other_schedule(owner, dense ? "a mask" : "no mask", dense ? "none" : "one");
  if (dense) return Status::Ok();
  for (int q = 0; q < owner.ranks; ++q) {
    const Partition part = partition_of(owner.count, owner.ranks, q);
    const size_t expected = bits_at(owner.config, step, part.size());
    const size_t found =
        kernels::ops().count_bits(next.data() + part.begin / 64, kernels::mask_words(part.size()));
    if (found != expected) {
      return other_schedule(owner, format("%zu masked elements in rank %d's part", found, q),
                            format("%zu", expected));
    }
  }
  return Status::Ok();
}

}  // namespace

uint64_t replicated_checksum(const BufferState& state, Stream stream) {
  uint32_t crc = crc32(0, &state.step, sizeof(state.step));
  const auto add = [&](const auto& values) {
    visit_on_host(*state.memory, stream, values.data(), values.size(),
                  [&](const auto* part, size_t n) { crc = crc32(crc, part, n * sizeof(*part)); });
  };
  add(state.moment);
  add(*state.last);
  add(state.mask);
  add(state.before);
  add(state.next);
  return crc;
}

void save_state(const StateOwner& owner, const BufferState& state, const float* residual,
                Stream stream, std::vector<std::byte>* out) {
  const std::vector<double> decay = state.decay.history();
  Header header;
  std::memcpy(header.magic, kMagic, sizeof(kMagic));
  header.version = kVersion;
  header.rank = owner.rank;
  header.ranks = owner.ranks;
  header.dtype = owner.config.dtype;
  header.role = owner.config.role;
  header.rule = owner.config.rule;
  header.reduction = static_cast<int32_t>(state.reduction.op);
  header.residual_dirty = state.residual_dirty;
  header.flag_pending = state.flag_pending;
  header.factor = state.reduction.factor;
  header.offset = owner.config.offset;
  header.count = owner.count;
  header.step = state.step;
  header.restamp_at = state.restamp_at;
  header.moment = state.moment.size();
  header.last = state.last->size();
  header.residual = residual != nullptr ? owner.count : 0;
  header.mask = state.mask.size();
  header.before = state.before.size();
  header.next = state.next.size();
  header.decay = decay.size();
  std::memcpy(header.name, owner.config.name.data(),
              std::min(owner.config.name.size(), sizeof(header.name)));

  out->resize(saved_bytes(header));
  std::byte* at = out->data();
  put(&at, &header, sizeof(header));
  put(&at, state.moment, stream);
  put(&at, *state.last, stream);
  const size_t residual_bytes = header.residual * sizeof(float);
  state.memory->copy_out(stream, at, residual, residual_bytes);
  at += residual_bytes;
  put(&at, state.mask, stream);
  put(&at, state.before, stream);
  put(&at, state.next, stream);
  put(&at, decay.data(), decay.size() * sizeof(double));
  const uint32_t crc = crc32(0, out->data(), out->size() - sizeof(crc));
  put(&at, &crc, sizeof(crc));
}

Status load_state(const StateOwner& owner, const std::byte* data, size_t size, BufferState* out) {
  Header header;
  uint32_t crc;
  if (size < sizeof(header) + sizeof(crc)) return damaged(owner, "it is cut");
  std::memcpy(&header, data, sizeof(header));
  if (std::memcmp(header.magic, kMagic, sizeof(kMagic)) != 0)
    return damaged(owner, "it is something else");
  if (header.version != kVersion) {
    return foreign(owner, "format version", format("%u", header.version), format("%u", kVersion));
  }
  std::memcpy(&crc, data + size - sizeof(crc), sizeof(crc));
  if (crc32(0, data, size - sizeof(crc)) != crc)
    return damaged(owner, "its checksum does not match, or it is cut");
  SCAPE_RETURN_IF_ERROR(check_owner(owner, header));
  SCAPE_RETURN_IF_ERROR(check_sizes(owner, header));
  if (size != saved_bytes(header)) return damaged(owner, "its length is wrong");

  const std::byte* at = data + sizeof(header);
  const std::byte* const moment = take<float>(&at, header.moment);
  const std::byte* const last = take<uint16_t>(&at, header.last);
  const std::byte* const residual = take<float>(&at, header.residual);
  const auto mask = take_all<uint64_t>(&at, header.mask);
  const auto before = take_all<uint64_t>(&at, header.before);
  const auto next = take_all<uint64_t>(&at, header.next);
  const auto decay = take_all<double>(&at, header.decay);
  const auto op = static_cast<ReduceOp>(header.reduction);
  SCAPE_RETURN_IF_ERROR(check_values(owner, op, decay));
  for (const auto* each : {&mask, &before, &next}) SCAPE_RETURN_IF_ERROR(check_mask(owner, *each));
  SCAPE_RETURN_IF_ERROR(check_next(owner, header.step, next));

  BufferState state(*out->memory, out->residual.home());
  state.step = header.step;
  state.reduction.op = op;
  state.reduction.factor = header.factor;
  state.residual_dirty = header.residual_dirty != 0;
  state.flag_pending = header.flag_pending != 0;
  state.restamp_at = header.restamp_at;
  state.moment.assign(moment, header.moment, {});
  state.last->assign(last, header.last, {});
  state.residual.assign(residual, header.residual, {});
  state.mask.assign(mask.data(), mask.size(), {});
  state.before.assign(before.data(), before.size(), {});
  state.next.assign(next.data(), next.size(), {});
  state.decay.restore(decay);
  *out = std::move(state);
  return Status::Ok();
}

}  // namespace scape::plugin
