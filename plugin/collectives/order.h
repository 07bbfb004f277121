// The order in which every reduction is summed, and a simulation that gives the same bits.
//
// For given size, count, type and op the order is fixed: two runs give the same bits, and all ranks
// the same. x_r is rank r's operand (times its factor for kPremulSum); avg divides once, at the
// end.
//
//   kFlat, kDirect        ((x_0 + x_1) + x_2) + ... + x_{P-1}. All reduce-scatters and reduces too.
//   kRecursiveDoubling    p = the largest power of two <= P. y_i = x_i, or x_i + x_{i+p} where i +
//   p < P.
//                         Then neighbours at distance 1, 2, 4, ...: (y_0 + y_1) + (y_2 + y_3), and
//                         so on, the lower rank's half on the left.
//   in shared memory      y_h = the sum over host h's ranks, lowest first; then y over hosts, slice
//   by
//                         slice of the owners', as for an all-reduce of that size.
//   kRing                 slice q (slice_of): ((x_{q+1} + x_{q+2}) + ...) + x_q, indices modulo P.
//
// Which one a call takes: choose_all_reduce(). 8- and 16-bit floats are always flat or direct:
// summed in fp32 and rounded once.
#pragma once

#include <cstddef>
#include <memory>
#include <span>

#include "plugin/collectives/schedule.h"
#include "plugin/collectives/schedules.h"
#include "plugin/communicator.h"

namespace scape::plugin {

// What an all-reduce over inputs.size() ranks gives, bit for bit, computed in this process; by the
// algorithm that such a call takes, or the one named. For kPremulSum `reductions` names each rank's
// factor; it may hold one entry for all. out: count elements, none of the inputs.
Status simulate_all_reduce(std::span<const void* const> inputs, void* out, size_t count,
                           DataType type, std::span<const Reduction> reductions,
                           Algorithm algorithm = Algorithm::kAuto);
Status simulate_all_reduce(std::span<const void* const> inputs, void* out, size_t count,
                           DataType type, Reduction reduction);

// Runs all ranks' schedules against each other in this process. send[r] and recv[r] are rank r's
// buffers, shared[r], where given, the shared memory of its host. INTERNAL when they do not fit
// together: a message without its counterpart, of another size, or a step that never becomes ready.
Status simulate(std::span<const std::shared_ptr<const Schedule>> schedules,
                std::span<const void* const> send, std::span<void* const> recv,
                std::span<const Reduction> reductions, std::span<std::byte* const> shared = {});

}  // namespace scape::plugin
