// A preloaded library that does nothing.
extern "C" __attribute__((visibility("default"))) const int empty_library = 0;
