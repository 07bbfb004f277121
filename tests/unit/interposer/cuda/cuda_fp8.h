// Stands in for the CUDA header of this name; a real nccl.h includes it and uses nothing of it.
#pragma once
