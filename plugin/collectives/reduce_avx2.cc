#define SCAPE_REDUCE_NAME reduce_avx2
#include "plugin/collectives/reduce_inl.h"
