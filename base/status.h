// Status: how every function of the project reports failure.
//
// No exception crosses a room's boundary. A Status is a code and a sentence that names the
// argument or rank concerned, the value met, and the next step; it is empty when all is well.
#pragma once

#include <cstdarg>
#include <memory>
#include <string>
#include <utility>

#include "scape/scape.h"

namespace scape {

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(scape_status code, std::string message)
      : detail_(std::make_shared<const Detail>(Detail{code, std::move(message)})) {}

  static Status Ok() { return {}; }

  bool ok() const { return detail_ == nullptr; }
  scape_status code() const { return detail_ ? detail_->code : SCAPE_OK; }
  // The sentence; empty when ok().
  const std::string& message() const;

 private:
  struct Detail {
    scape_status code;
    std::string message;
  };
  std::shared_ptr<const Detail> detail_;
};

// An error Status with a printf-formatted sentence.
Status error(scape_status code, const char* format, ...) __attribute__((format(printf, 2, 3)));

// printf into a string.
std::string format(const char* format, ...) __attribute__((format(printf, 1, 2)));
std::string vformat(const char* format, std::va_list args);

}  // namespace scape

// Returns from the enclosing function when `expression`, a Status, is an error.
#define SCAPE_RETURN_IF_ERROR(expression)                                    \
  do {                                                                       \
    if (::scape::Status scape_status_ = (expression); !scape_status_.ok()) { \
      return scape_status_;                                                  \
    }                                                                        \
  } while (0)
