// Large pages, for memory that is passed over whole: they keep the walk of the address table short,
// which is up to a third of a pass's time on current CPUs.
//
// Both are wishes, and nothing depends on them: the system may have large pages switched off
// (/sys/kernel/mm/transparent_hugepage/enabled), or have none left. Only whole large pages inside
// the range change; the contents never do. Thread-safe.
#pragma once

#include <cstddef>

namespace scape {

inline constexpr size_t kLargePage = size_t{2} << 20;

// Of memory that has not been written yet: large pages as it is written.
void wish_large_pages(void* data, size_t bytes);

// Of memory that may be in use already: what is there is copied to large pages at once, where the
// system can (Linux 6.1), and page by page in the background where it cannot. What was never
// touched becomes resident, too.
void move_to_large_pages(const void* data, size_t bytes);

}  // namespace scape
