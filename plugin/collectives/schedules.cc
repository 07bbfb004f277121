#include "plugin/collectives/schedules.h"

#include <algorithm>
#include <array>
#include <bit>
#include <functional>
#include <utility>
#include <vector>

#include "plugin/collectives/reduce.h"

namespace scape::plugin {
namespace {

using Id = ScheduleBuilder::Id;
constexpr Id kNone = ScheduleBuilder::kNone;

// Large transfers go in chunks of about this many bytes, so that what arrives is reduced while it
// is in the cache and the next chunk is already under way; kWindow chunks of one stream at a time.
constexpr size_t kChunkBytes = size_t{512} << 10;
constexpr size_t kWindow = 3;
// Round the ring a chunk has many stations, and what a link carries meanwhile hides what each takes
// to answer: smaller ones, more of them.
constexpr size_t kRingChunkBytes = size_t{256} << 10;
constexpr size_t kRingWindow = 6;

// Up to here one message time matters more than bytes.
constexpr size_t kFlatBytes = size_t{16} << 10;
constexpr size_t kDoublingBytes = size_t{32} << 10;
constexpr size_t kTreeBytes = size_t{32} << 10;

// The last kLength ids of one stream of steps, for "not before the one kLength ago is over".
template <size_t kLength = kWindow>
class Window {
 public:
  Id oldest() const { return ids_[next_]; }
  void push(Id id) {
    ids_[next_] = id;
    next_ = (next_ + 1) % kLength;
  }

 private:
  std::array<Id, kLength> ids_ = [] {
    std::array<Id, kLength> none;
    none.fill(kNone);
    return none;
  }();
  size_t next_ = 0;
};

Place at(Space space, size_t offset) { return {space, offset}; }
Place plus(Place place, size_t bytes) { return {place.space, place.offset + bytes}; }

// Chunk c of a range, when cut every `elements`.
Range chunk_of(Range range, size_t elements, size_t c) {
  const size_t begin = std::min(range.begin + c * elements, range.end);
  return {begin, std::min(begin + elements, range.end)};
}

size_t chunks_in(size_t count, size_t elements) {
  return count / elements + (count % elements != 0);
}

// Builds one rank's part of a call.
class Planner {
 public:
  explicit Planner(const Shape& shape)
      : shape_(shape),
        rank_(shape.rank),
        size_(shape.size),
        builder_(shape.rank, shape.size, shape.type),
        premultiplied_(shape.op == ReduceOp::kPremulSum),
        result_bytes_(size_of(shape.type)),
        operand_bytes_(premultiplied_ ? size_of(accumulation_type(shape.type))
                                      : size_of(shape.type)) {
    builder_.schedule().op = shape.op;
    builder_.schedule().operand_type = premultiplied_ ? accumulation_type(shape.type) : shape.type;
  }

  std::shared_ptr<const Schedule> finish() { return builder_.finish(); }

  // ---- all-reduce ----

  void all_reduce(Algorithm algorithm) {
    if (size_ == 1) return single();
    switch (algorithm) {
      case Algorithm::kRecursiveDoubling:
        return recursive_doubling();
      case Algorithm::kRing:
        return ring();
      case Algorithm::kDirect:
        return direct();
      default:
        return flat();
    }
  }

  void shared(const SharedLayout& layout) {
    size_t host = 0, me = 0, owners = SIZE_MAX;
    for (size_t h = 0; h < layout.hosts.size(); ++h) {
      const std::vector<int>& ranks = layout.hosts[h];
      owners = std::min(owners, ranks.size());
      const auto found = std::find(ranks.begin(), ranks.end(), rank_);
      if (found == ranks.end()) continue;
      host = h;
      me = static_cast<size_t>(found - ranks.begin());
    }
    const std::vector<int>& mates = layout.hosts[host];
    const Place nothing = at(Space::kScratch, 0);
    const Place mine = at(Space::kShared, me * layout.stride);
    const Id ready = premultiplied_ ? builder_.scale(mine, mine, shape_.count) : kNone;
    for (size_t j = 0; j < owners; ++j) {
      if (j != me) builder_.send(mates[j], nothing, 0, {ready});
    }
    if (me < owners) {
      arrived_ = {ready};
      for (size_t j = 0; j < mates.size(); ++j) {
        if (j != me) arrived_.push_back(builder_.recv(mates[j], nothing, 0));
      }
      // From here on the call is that of this slice's owners.
      const Range slice =
          slice_of(shape_.count, result_bytes_, static_cast<int>(owners), static_cast<int>(me));
      const size_t first = builder_.schedule().steps.size();
      for (size_t j = 0; j < mates.size(); ++j)
        summed_.push_back(at(Space::kShared, j * layout.stride + slice.begin * result_bytes_));
      result_ = at(Space::kShared, mates.size() * layout.stride + slice.begin * result_bytes_);
      for (const std::vector<int>& ranks : layout.hosts) group_.push_back(ranks[me]);
      rank_ = static_cast<int>(host);
      size_ = static_cast<int>(layout.hosts.size());
      shape_.count = slice.size();
      if (shape_.count > 0)
        all_reduce(choose_all_reduce(size_, shape_.count, shape_.type, ReduceOp::kSum));
      const size_t end = builder_.schedule().steps.size();
      for (size_t j = 0; j < mates.size(); ++j) {
        if (j == me) continue;
        const Id told = builder_.send(mates[j], nothing, 0);
        for (const Id id : arrived_) builder_.depend(told, id);
        for (size_t id = first; id < end; ++id) builder_.depend(told, static_cast<Id>(id));
      }
    }
    for (size_t j = 0; j < owners; ++j) {
      if (j != me) builder_.recv(mates[j], nothing, 0);
    }
  }

  void single() {
    if (!summed_.empty()) {
      const size_t elements = kChunkBytes / operand_bytes_;
      for (size_t c = 0; c < chunks_in(shape_.count, elements); ++c)
        operand(chunk_of({0, shape_.count}, elements, c));
      return;
    }
    const Operand own = operand({0, shape_.count});
    if (!premultiplied_) {
      builder_.copy(result(0), own.place, shape_.count * result_bytes_);
    } else {
      const Place sources[] = {own.place};
      builder_.reduce(result(0), sources, shape_.count, true, {own.ready});
    }
  }

  void flat() {
    const Operand own = operand({0, shape_.count});
    const size_t bytes = shape_.count * operand_bytes_;
    std::vector<Place> sources(static_cast<size_t>(size_));
    sources[static_cast<size_t>(rank_)] = own.place;
    std::vector<Id> before;
    for (int d = 1; d < size_; ++d) before.push_back(send(next(d), own.place, bytes, {own.ready}));
    for (int d = 1; d < size_; ++d) {
      const Place slot = builder_.scratch(bytes);
      sources[static_cast<size_t>(previous(d))] = slot;
      before.push_back(recv(previous(d), slot, bytes));
    }
    // In place the result overwrites what is being sent, hence after the sends too.
    const Id sum = builder_.reduce(result(0), sources, shape_.count, true, {own.ready});
    for (const Id id : before) builder_.depend(sum, id);
  }

  void recursive_doubling() {
    const int power = static_cast<int>(std::bit_floor(static_cast<unsigned>(size_)));
    const Operand own = operand({0, shape_.count});
    const size_t bytes = shape_.count * operand_bytes_;
    if (rank_ >= power) {
      const Id sent = send(rank_ - power, own.place, bytes, {own.ready});
      recv(rank_ - power, result(0), bytes, {sent});
      return;
    }
    Place current = own.place;
    Id ready = own.ready;
    const bool has_extra = rank_ + power < size_;
    if (has_extra) {
      const Place slot = builder_.scratch(bytes);
      const Id received = recv(rank_ + power, slot, bytes);
      const Place sources[] = {current, slot};
      current = builder_.scratch(bytes);
      ready = builder_.reduce(current, sources, shape_.count, false, {ready, received});
    }
    for (int distance = 1; distance < power; distance *= 2) {
      const int peer = rank_ ^ distance;
      const Place slot = builder_.scratch(bytes);
      const Id sent = send(peer, current, bytes, {ready});
      const Id received = recv(peer, slot, bytes);
      const Place lower = rank_ < peer ? current : slot, upper = rank_ < peer ? slot : current;
      const Place sources[] = {lower, upper};
      const bool last = distance * 2 == power;
      current = last ? result(0) : builder_.scratch(bytes);
      // In place the last one overwrites what the first one sent, hence after its send too.
      ready = builder_.reduce(current, sources, shape_.count, last, {ready, sent, received});
    }
    if (has_extra) send(rank_ + power, result(0), bytes, {ready});
  }

  void ring() {
    const int right = next(1), left = previous(1);
    // Chunks of one length, in whole cache lines: a short last one would hide nothing.
    const size_t slice = slice_of(shape_.count, result_bytes_, size_, 0).size();
    const size_t pieces = std::max<size_t>(chunks_in(slice * operand_bytes_, kRingChunkBytes), 1);
    const size_t line = std::max<size_t>(64 / operand_bytes_, 1);
    const size_t elements = std::max<size_t>(chunks_in(chunks_in(slice, pieces), line), 1) * line;
    const size_t chunks = chunks_in(slice, elements);
    const auto slice_chunk = [&](int q, size_t c) {
      q = ((q % size_) + size_) % size_;
      return chunk_of(slice_of(shape_.count, result_bytes_, size_, q), elements, c);
    };
    // Two slots a lane: one is being sent while the other is filled.
    struct Slot {
      Place place;
      Id free = kNone;
    };
    std::vector<std::array<Slot, 2>> lanes(std::min(chunks, kRingWindow));
    for (auto& lane : lanes) {
      for (Slot& slot : lane) slot.place = builder_.scratch(elements * operand_bytes_);
    }
    Window<kRingWindow> started, gathered;
    // A chunk of all slices at a time: its way round the ring twice. Chunks overlap, kRingWindow at
    // once.
    for (size_t c = 0; c < chunks; ++c) {
      auto& lane = lanes[c % lanes.size()];
      Id ready = kNone;
      Slot* held = nullptr;
      for (int s = 0; s + 1 < size_; ++s) {
        const Range out = slice_chunk(rank_ - 1 - s, c), in = slice_chunk(rank_ - 2 - s, c);
        if (out.size() > 0) {
          if (s == 0) {
            const Operand own = operand(out);
            started.push(
                send(right, own.place, out.size() * operand_bytes_, {own.ready, started.oldest()}));
          } else {
            held->free = send(right, held->place, out.size() * operand_bytes_, {ready});
          }
        }
        if (in.size() > 0) {
          Slot& slot = lane[static_cast<size_t>(s % 2)];
          const Operand own = operand(in);
          const Id received = recv(left, slot.place, in.size() * operand_bytes_, {slot.free});
          const bool last = s + 2 == size_;
          const Place sources[] = {slot.place, own.place};
          ready = builder_.reduce(last ? result(in.begin * result_bytes_) : slot.place, sources,
                                  in.size(), last, {received, own.ready});
          slot.free = ready;
          held = &slot;
        }
      }
      for (int g = 0; g + 1 < size_; ++g) {
        const Range out = slice_chunk(rank_ - g, c), in = slice_chunk(rank_ - g - 1, c);
        if (out.size() > 0) {
          send(right, result(out.begin * result_bytes_), out.size() * result_bytes_, {ready});
        }
        ready = kNone;
        if (in.size() > 0) {
          ready = recv(left, result(in.begin * result_bytes_), in.size() * result_bytes_,
                       {g == 0 ? gathered.oldest() : kNone});
        }
      }
      gathered.push(ready);
    }
  }

  void direct() {
    const auto slice = [this](int q) { return slice_of(shape_.count, result_bytes_, size_, q); };
    const Range own = slice(rank_);
    std::vector<Window<>> results(static_cast<size_t>(size_));
    reduce_slices(slice, result(own.begin * result_bytes_), [&](const SliceChunk& chunk) {
      for (int d = 1; d < size_; ++d) {
        if (chunk.own.size() == 0) break;
        send(next(d), result(chunk.own.begin * result_bytes_), chunk.own.size() * result_bytes_,
             {chunk.reduced});
      }
      for (int d = 1; d < size_; ++d) {
        const int q = previous(d);
        const Range in = chunk_of(slice(q), chunk.elements, chunk.index);
        if (in.size() == 0) continue;
        Window<>& window = results[static_cast<size_t>(q)];
        // In place it overwrites the operand that went to q.
        window.push(recv(q, result(in.begin * result_bytes_), in.size() * result_bytes_,
                         {(*chunk.sent)[static_cast<size_t>(q)], window.oldest()}));
      }
    });
  }

  // ---- the others ----

  void reduce_scatter(std::span<const size_t> counts) {
    const std::vector<size_t> begin = begins_of(counts, 1);
    const auto slice = [&](int q) {
      return Range{begin[static_cast<size_t>(q)], begin[static_cast<size_t>(q) + 1]};
    };
    if (size_ == 1) return single();
    reduce_slices(slice, at(Space::kRecv, 0), [](const SliceChunk&) {});
  }

  void reduce_to(int root) {
    const size_t bytes = shape_.count * operand_bytes_;
    if (size_ == 2 || bytes * static_cast<size_t>(size_) <= 4 * kFlatBytes)
      return reduce_at_root(root);
    // Slices to their owners, and on to the root.
    const auto slice = [this](int q) { return slice_of(shape_.count, result_bytes_, size_, q); };
    const Range own = slice(rank_);
    const Place result = rank_ == root ? at(Space::kRecv, own.begin * result_bytes_)
                                       : builder_.scratch(own.size() * result_bytes_);
    reduce_slices(slice, result, [&](const SliceChunk& chunk) {
      if (rank_ != root) {
        if (chunk.own.size() > 0) {
          builder_.send(root, plus(result, (chunk.own.begin - own.begin) * result_bytes_),
                        chunk.own.size() * result_bytes_, {chunk.reduced});
        }
        return;
      }
      for (int d = 1; d < size_; ++d) {
        const int q = previous(d);
        const Range in = chunk_of(slice(q), chunk.elements, chunk.index);
        if (in.size() == 0) continue;
        builder_.recv(q, at(Space::kRecv, in.begin * result_bytes_), in.size() * result_bytes_,
                      {(*chunk.sent)[static_cast<size_t>(q)]});
      }
    });
  }

  void all_gather(std::span<const size_t> counts) {
    const std::vector<size_t> begin = begins_of(counts, result_bytes_);
    const auto part = [&](int q) {
      return Range{begin[static_cast<size_t>(q)], begin[static_cast<size_t>(q) + 1]};
    };
    const Range own = part(rank_);
    exchange([&](int) { return std::pair(at(Space::kSend, 0), own.size()); },
             [&](int q) { return std::pair(at(Space::kRecv, part(q).begin), part(q).size()); });
    copy_chunked(at(Space::kRecv, own.begin), at(Space::kSend, 0), own.size());
  }

  void all_to_all() {
    const size_t bytes = shape_.count * result_bytes_;
    Place from = at(Space::kSend, 0);
    Id saved = kNone;
    if (shape_.in_place) {
      const size_t all = bytes * static_cast<size_t>(size_);
      const Place copy = builder_.scratch(all);
      saved = builder_.copy(copy, from, all);
      from = copy;
    }
    const auto offset = [&](int q) { return static_cast<size_t>(q) * bytes; };
    exchange([&](int q) { return std::pair(plus(from, offset(q)), bytes); },
             [&](int q) { return std::pair(at(Space::kRecv, offset(q)), bytes); }, saved);
    const Id kept =
        builder_.copy(at(Space::kRecv, offset(rank_)), plus(from, offset(rank_)), bytes);
    builder_.depend(kept, saved);
  }

  void broadcast(int root) {
    const size_t bytes = shape_.count * result_bytes_;
    const int v = (rank_ - root + size_) % size_;  // the root is 0
    const auto real = [&](int virtual_rank) { return (virtual_rank + root) % size_; };
    std::vector<int> children;
    int parent = -1;
    if (size_ == 2 || bytes <= kTreeBytes) {  // a binomial tree
      if (v != 0) parent = real(v & (v - 1));
      int widest = 1;
      while (v + widest < size_ && (v & widest) == 0) widest *= 2;
      for (int distance = widest / 2; distance >= 1; distance /= 2)
        children.push_back(real(v + distance));
    } else {  // a chain: every rank forwards each chunk while the next one comes
      if (v != 0) parent = real(v - 1);
      if (v + 1 < size_) children.push_back(real(v + 1));
    }
    const Place from = at(v == 0 ? Space::kSend : Space::kRecv, 0);
    const size_t chunks = chunks_in(bytes, kChunkBytes);
    Window<> received;
    std::vector<Window<>> sent(children.size());
    for (size_t c = 0; c < chunks; ++c) {
      const Range chunk = chunk_of({0, bytes}, kChunkBytes, c);
      Id ready = kNone;
      if (parent >= 0) {
        ready =
            builder_.recv(parent, at(Space::kRecv, chunk.begin), chunk.size(), {received.oldest()});
        received.push(ready);
      }
      for (size_t i = 0; i < children.size(); ++i) {
        sent[i].push(builder_.send(children[i], plus(from, chunk.begin), chunk.size(),
                                   {ready, sent[i].oldest()}));
      }
    }
    if (v == 0) copy_chunked(at(Space::kRecv, 0), at(Space::kSend, 0), bytes);
    // Nothing else tells the root that the others called the same: a token climbs the tree.
    std::vector<Id> tokens;
    for (const int child : children)
      tokens.push_back(builder_.recv(child, at(Space::kScratch, 0), 0));
    if (parent >= 0) {
      const Id token = builder_.send(parent, at(Space::kScratch, 0), 0);
      for (const Id id : tokens) builder_.depend(token, id);
    }
  }

  void gather(int root) {
    const size_t bytes = shape_.count * result_bytes_;
    const auto offset = [&](int q) { return static_cast<size_t>(q) * bytes; };
    exchange(
        [&](int q) { return std::pair(at(Space::kSend, 0), q == root ? bytes : 0); },
        [&](int q) { return std::pair(at(Space::kRecv, offset(q)), rank_ == root ? bytes : 0); });
    if (rank_ == root) copy_chunked(at(Space::kRecv, offset(rank_)), at(Space::kSend, 0), bytes);
    token_from(root);
  }

  void scatter(int root) {
    const size_t bytes = shape_.count * result_bytes_;
    const auto offset = [&](int q) { return static_cast<size_t>(q) * bytes; };
    exchange(
        [&](int q) { return std::pair(at(Space::kSend, offset(q)), rank_ == root ? bytes : 0); },
        [&](int q) { return std::pair(at(Space::kRecv, 0), q == root ? bytes : 0); });
    if (rank_ == root) copy_chunked(at(Space::kRecv, 0), at(Space::kSend, offset(rank_)), bytes);
    token_to(root);
  }

 private:
  int next(int distance) const { return (rank_ + distance) % size_; }
  int previous(int distance) const { return (rank_ - distance + size_) % size_; }

  // Where each rank's part begins, and where the last one ends.
  static std::vector<size_t> begins_of(std::span<const size_t> counts, size_t element) {
    std::vector<size_t> begin(counts.size() + 1, 0);
    for (size_t q = 0; q < counts.size(); ++q) begin[q + 1] = begin[q] + counts[q] * element;
    return begin;
  }

  // To and from a rank of the group that does the call.
  int peer(int q) const { return group_.empty() ? q : group_[static_cast<size_t>(q)]; }
  Id send(int q, Place from, size_t bytes, std::initializer_list<Id> after = {}) {
    return builder_.send(peer(q), from, bytes, after);
  }
  Id recv(int q, Place to, size_t bytes, std::initializer_list<Id> after = {}) {
    return builder_.recv(peer(q), to, bytes, after);
  }
  Place result(size_t offset) const { return plus(result_, offset); }

  struct Operand {
    Place place;
    Id ready = kNone;
  };

  // Where this rank's operand for a range of elements is, multiplied where the op asks for it, or
  // the sum over its host.
  Operand operand(Range range) {
    if (!summed_.empty()) {
      std::vector<Place> sources;
      for (const Place& place : summed_)
        sources.push_back(plus(place, range.begin * result_bytes_));
      const Place sum = result(range.begin * result_bytes_);
      const Id id = builder_.reduce(sum, sources, range.size(), size_ == 1);
      for (const Id before : arrived_) builder_.depend(id, before);
      return {sum, id};
    }
    if (!premultiplied_) return {at(Space::kSend, range.begin * operand_bytes_), kNone};
    if (range.size() == 0) return {at(Space::kScratch, 0), kNone};
    const Place place = builder_.scratch(range.size() * operand_bytes_);
    return {place,
            builder_.scale(place, at(Space::kSend, range.begin * result_bytes_), range.size())};
  }

  struct SliceChunk {
    size_t index = 0, elements = 0;
    Range own;                              // of this rank's slice
    Id reduced = kNone;                     // the step that made it
    const std::vector<Id>* sent = nullptr;  // per rank: the send of this chunk of its slice
  };

  // Sends each rank its slice and sums this rank's, in rank order, to `result` on. then() adds what
  // follows each chunk; it must do so alike on all ranks.
  void reduce_slices(const std::function<Range(int)>& slice, Place result,
                     const std::function<void(const SliceChunk&)>& then) {
    const size_t peers = static_cast<size_t>(size_ - 1);
    const size_t bytes =
        std::clamp(4 * kChunkBytes / std::max<size_t>(peers, 1), kChunkBytes / 8, kChunkBytes);
    SliceChunk chunk;
    chunk.elements = bytes / operand_bytes_;
    size_t longest = 0;
    for (int q = 0; q < size_; ++q) longest = std::max(longest, slice(q).size());
    const size_t chunks = chunks_in(longest, chunk.elements);
    const Range own = slice(rank_);
    const size_t slot_elements = std::min(own.size(), chunk.elements);
    std::vector<Place> slots(std::min(chunks, kWindow) * peers);
    for (Place& slot : slots) slot = builder_.scratch(slot_elements * operand_bytes_);
    std::vector<Window<>> sends(static_cast<size_t>(size_));
    std::vector<Id> sent(static_cast<size_t>(size_), kNone);
    Window<> reduced;
    for (size_t c = 0; c < chunks; ++c) {
      for (int d = 1; d < size_; ++d) {
        const int q = next(d);
        const Range out = chunk_of(slice(q), chunk.elements, c);
        Id& id = sent[static_cast<size_t>(q)];
        id = kNone;
        if (out.size() == 0) continue;
        const Operand mine = operand(out);
        Window<>& window = sends[static_cast<size_t>(q)];
        id = send(q, mine.place, out.size() * operand_bytes_, {mine.ready, window.oldest()});
        window.push(id);
      }
      chunk.index = c;
      chunk.own = chunk_of(own, chunk.elements, c);
      chunk.reduced = kNone;
      chunk.sent = &sent;
      if (chunk.own.size() > 0) {
        const Operand mine = operand(chunk.own);
        std::vector<Place> sources(static_cast<size_t>(size_), mine.place);
        std::vector<Id> received;
        for (int d = 1; d < size_; ++d) {
          const Place slot = slots[(c % kWindow) * peers + static_cast<size_t>(d - 1)];
          sources[static_cast<size_t>(previous(d))] = slot;
          received.push_back(
              recv(previous(d), slot, chunk.own.size() * operand_bytes_, {reduced.oldest()}));
        }
        chunk.reduced = builder_.reduce(plus(result, (chunk.own.begin - own.begin) * result_bytes_),
                                        sources, chunk.own.size(), true, {mine.ready});
        for (const Id id : received) builder_.depend(chunk.reduced, id);
        reduced.push(chunk.reduced);
      }
      then(chunk);
    }
  }

  // Everything to the root, which sums in rank order.
  void reduce_at_root(int root) {
    const size_t elements = kChunkBytes / operand_bytes_;
    const size_t chunks = chunks_in(shape_.count, elements);
    const size_t peers = static_cast<size_t>(size_ - 1);
    Window<> window;
    if (rank_ != root) {
      for (size_t c = 0; c < chunks; ++c) {
        const Range chunk = chunk_of({0, shape_.count}, elements, c);
        const Operand mine = operand(chunk);
        window.push(builder_.send(root, mine.place, chunk.size() * operand_bytes_,
                                  {mine.ready, window.oldest()}));
      }
    } else {
      std::vector<Place> slots(std::min(chunks, kWindow) * peers);
      for (Place& slot : slots)
        slot = builder_.scratch(std::min(shape_.count, elements) * operand_bytes_);
      for (size_t c = 0; c < chunks; ++c) {
        const Range chunk = chunk_of({0, shape_.count}, elements, c);
        const Operand mine = operand(chunk);
        std::vector<Place> sources(static_cast<size_t>(size_), mine.place);
        std::vector<Id> received;
        for (int d = 1; d < size_; ++d) {
          const Place slot = slots[(c % kWindow) * peers + static_cast<size_t>(d - 1)];
          sources[static_cast<size_t>(previous(d))] = slot;
          received.push_back(
              builder_.recv(previous(d), slot, chunk.size() * operand_bytes_, {window.oldest()}));
        }
        const Id sum = builder_.reduce(at(Space::kRecv, chunk.begin * result_bytes_), sources,
                                       chunk.size(), true, {mine.ready});
        for (const Id id : received) builder_.depend(sum, id);
        window.push(sum);
      }
    }
    token_from(root);
  }

  using Part = std::function<std::pair<Place, size_t>(int)>;

  // A part of bytes to and from every other rank, chunk by chunk, the neighbours first.
  void exchange(const Part& outgoing, const Part& incoming, Id after = kNone) {
    std::vector<Window<>> sends(static_cast<size_t>(size_)), receives(static_cast<size_t>(size_));
    size_t longest = 0;
    for (int q = 0; q < size_; ++q) {
      if (q != rank_) longest = std::max({longest, outgoing(q).second, incoming(q).second});
    }
    for (size_t c = 0; c < chunks_in(longest, kChunkBytes); ++c) {
      for (int d = 1; d < size_; ++d) {
        const auto [place, bytes] = outgoing(next(d));
        const Range chunk = chunk_of({0, bytes}, kChunkBytes, c);
        Window<>& window = sends[static_cast<size_t>(next(d))];
        if (chunk.size() > 0) {
          window.push(builder_.send(next(d), plus(place, chunk.begin), chunk.size(),
                                    {after, window.oldest()}));
        }
      }
      for (int d = 1; d < size_; ++d) {
        const auto [place, bytes] = incoming(previous(d));
        const Range chunk = chunk_of({0, bytes}, kChunkBytes, c);
        Window<>& window = receives[static_cast<size_t>(previous(d))];
        if (chunk.size() > 0) {
          window.push(builder_.recv(previous(d), plus(place, chunk.begin), chunk.size(),
                                    {after, window.oldest()}));
        }
      }
    }
  }

  void copy_chunked(Place to, Place from, size_t bytes) {
    for (size_t c = 0; c < chunks_in(bytes, kChunkBytes); ++c) {
      const Range chunk = chunk_of({0, bytes}, kChunkBytes, c);
      builder_.copy(plus(to, chunk.begin), plus(from, chunk.begin), chunk.size());
    }
  }

  // An empty message against the flow of data, which proves that the other side calls the same.
  void token_from(int root) {
    if (rank_ != root) {
      builder_.recv(root, at(Space::kScratch, 0), 0);
      return;
    }
    for (int d = 1; d < size_; ++d) builder_.send(next(d), at(Space::kScratch, 0), 0);
  }
  void token_to(int root) {
    if (rank_ != root) {
      builder_.send(root, at(Space::kScratch, 0), 0);
      return;
    }
    for (int d = 1; d < size_; ++d) builder_.recv(next(d), at(Space::kScratch, 0), 0);
  }

  Shape shape_;
  int rank_, size_;
  ScheduleBuilder builder_;
  bool premultiplied_;
  size_t result_bytes_, operand_bytes_;
  Place result_ = {Space::kRecv, 0};
  // Of an owner in shared memory: the owners of its slice on each host, the operands of this one,
  // and the steps after which those are there.
  std::vector<int> group_;
  std::vector<Place> summed_;
  std::vector<Id> arrived_;
};

template <typename Fill>
std::shared_ptr<const Schedule> plan(const Shape& shape, const Fill& fill) {
  Planner planner(shape);
  if (shape.count > 0) fill(planner);
  return planner.finish();
}

}  // namespace

const char* name_of(Algorithm algorithm) {
  switch (algorithm) {
    case Algorithm::kAuto:
      return "auto";
    case Algorithm::kFlat:
      return "flat";
    case Algorithm::kRecursiveDoubling:
      return "recursive doubling";
    case Algorithm::kRing:
      return "ring";
    case Algorithm::kDirect:
      return "direct";
  }
  return "?";
}

Range slice_of(size_t count, size_t element_bytes, int size, int q) {
  const size_t line = std::max<size_t>(64 / element_bytes, 1);
  const size_t lines = chunks_in(count, line);
  const size_t ranks = static_cast<size_t>(size), index = static_cast<size_t>(q);
  // The first lines % ranks slices are one line longer.
  const size_t each = lines / ranks, longer = lines % ranks;
  const size_t begin = each * index + std::min(index, longer);
  const size_t end = begin + each + (index < longer ? 1 : 0);
  return {std::min(begin * line, count), std::min(end * line, count)};
}

Algorithm choose_all_reduce(int size, size_t count, DataType type, ReduceOp op) {
  const bool rounds = accumulation_type(type) != type;
  const size_t element =
      op == ReduceOp::kPremulSum ? size_of(accumulation_type(type)) : size_of(type);
  const size_t bytes = count * element;
  const size_t peers = static_cast<size_t>(size - 1);
  if (bytes * peers <= kFlatBytes) return Algorithm::kFlat;
  if (rounds) return Algorithm::kDirect;
  if (size == 2) return Algorithm::kDirect;
  return bytes <= kDoublingBytes ? Algorithm::kRecursiveDoubling : Algorithm::kRing;
}

std::shared_ptr<const Schedule> all_reduce_schedule(const Shape& shape, Algorithm algorithm) {
  if (algorithm == Algorithm::kAuto) {
    algorithm = choose_all_reduce(shape.size, shape.count, shape.type, shape.op);
  }
  // Partial sums of these would have to travel rounded.
  const bool rounds = accumulation_type(shape.type) != shape.type;
  if (rounds && algorithm != Algorithm::kFlat) algorithm = Algorithm::kDirect;
  return plan(shape, [&](Planner& planner) { planner.all_reduce(algorithm); });
}

bool shares_all_reduce(size_t hosts, DataType type, ReduceOp op) {
  const bool rounds = accumulation_type(type) != type;
  return !rounds || (hosts == 1 && op != ReduceOp::kPremulSum);
}

std::shared_ptr<const Schedule> shared_all_reduce_schedule(const Shape& shape,
                                                           const SharedLayout& layout) {
  return plan(shape, [&](Planner& planner) { planner.shared(layout); });
}

std::shared_ptr<const Schedule> reduce_scatter_schedule(const Shape& shape,
                                                        std::span<const size_t> counts) {
  return plan(shape, [&](Planner& planner) { planner.reduce_scatter(counts); });
}

std::shared_ptr<const Schedule> all_gather_schedule(const Shape& shape,
                                                    std::span<const size_t> counts) {
  Planner planner(shape);
  planner.all_gather(counts);
  return planner.finish();
}

std::shared_ptr<const Schedule> all_to_all_schedule(const Shape& shape) {
  return plan(shape, [](Planner& planner) { planner.all_to_all(); });
}

std::shared_ptr<const Schedule> broadcast_schedule(const Shape& shape, int root) {
  return plan(shape, [&](Planner& planner) { planner.broadcast(root); });
}

std::shared_ptr<const Schedule> reduce_schedule(const Shape& shape, int root) {
  return plan(shape, [&](Planner& planner) {
    shape.size == 1 ? planner.single() : planner.reduce_to(root);
  });
}

std::shared_ptr<const Schedule> gather_schedule(const Shape& shape, int root) {
  return plan(shape, [&](Planner& planner) { planner.gather(root); });
}

std::shared_ptr<const Schedule> scatter_schedule(const Shape& shape, int root) {
  return plan(shape, [&](Planner& planner) { planner.scatter(root); });
}

}  // namespace scape::plugin
