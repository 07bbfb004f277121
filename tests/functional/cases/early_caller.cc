// Links the library that calls early, and says how it went.
extern "C" void print_early_answers();

int main() {
  print_early_answers();
  return 0;
}
