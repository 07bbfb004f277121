// The same from C++.
#include <scape/scape.h>

#include <cstdio>
#include <vector>

int main() {
  std::vector<float> gradient(1024);
  scape_registration registration = nullptr;
  const scape_status status =
      scape_register(gradient.data(), gradient.size(), SCAPE_FLOAT32, nullptr, &registration);
  std::printf("%s: %d\n", scape_is_active() != 0 ? "present" : "absent", static_cast<int>(status));
  if (status == SCAPE_OK) return scape_unregister(registration) == SCAPE_OK ? 0 : 1;
  return status == SCAPE_ERR_INACTIVE ? 0 : 1;
}
