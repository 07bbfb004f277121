#define SCAPE_REDUCE_NAME reduce_baseline
#include "plugin/collectives/reduce_inl.h"
