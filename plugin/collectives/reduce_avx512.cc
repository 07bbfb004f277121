#define SCAPE_REDUCE_NAME reduce_avx512
#include "plugin/collectives/reduce_inl.h"
