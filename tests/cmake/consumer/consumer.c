/* Registers a buffer where the library is in the process, and carries on where it is not. */
#include <scape/scape.h>
#include <stdio.h>

int main(void) {
  static float gradient[1024];
  scape_config config;
  scape_registration registration;
  scape_status status = scape_config_init(&config, sizeof config);
  if (status == SCAPE_OK) {
    config.name = "grads.0";
    config.sparsity = 0.9;
    status = scape_register(gradient, 1024, SCAPE_FLOAT32, &config, &registration);
  }
  printf("%s: %d\n", scape_is_active() ? "present" : "absent", (int)status);
  if (status == SCAPE_OK) return scape_unregister(registration) == SCAPE_OK ? 0 : 1;
  return status == SCAPE_ERR_INACTIVE && scape_last_error()[0] != '\0' ? 0 : 1;
}
