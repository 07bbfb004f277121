// Stands in for the CUDA header of this name where a real nccl.h is compiled: just what that names.
#pragma once
#define CUDART_VERSION 13000
typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
