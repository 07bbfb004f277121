// Every function of the NCCL API, once: exports, forwarding pointers, refusals and prototypes all
// come from this list. Included several times with different definitions of the macros; each row is
//
//   MACRO(return type, name without its "nccl", (parameters), (arguments))
//
//   SCAPE_NCCL_COMMON(...)  answered in every mode, before one is settled
//   SCAPE_NCCL_HOST(...)    host mode implements it
//   SCAPE_NCCL_DEVICE(...)  makes no sense without a GPU: host mode refuses it with a reason
//
// A macro that is not defined takes the definition of SCAPE_NCCL_FUNCTION. Type names are those of
// namespace scape::nccl, which the including scope must see.
#if !defined(SCAPE_NCCL_COMMON)
#define SCAPE_NCCL_COMMON SCAPE_NCCL_FUNCTION
#endif
#if !defined(SCAPE_NCCL_HOST)
#define SCAPE_NCCL_HOST SCAPE_NCCL_FUNCTION
#endif
#if !defined(SCAPE_NCCL_DEVICE)
#define SCAPE_NCCL_DEVICE SCAPE_NCCL_FUNCTION
#endif

// clang-format off
SCAPE_NCCL_COMMON(ncclResult_t, GetVersion, (int* version), (version))
SCAPE_NCCL_COMMON(const char*, GetErrorString, (ncclResult_t result), (result))
SCAPE_NCCL_COMMON(const char*, GetLastError, (ncclComm_t comm), (comm))

SCAPE_NCCL_HOST(ncclResult_t, MemAlloc, (void** ptr, size_t size), (ptr, size))
SCAPE_NCCL_HOST(ncclResult_t, MemFree, (void* ptr), (ptr))
SCAPE_NCCL_HOST(ncclResult_t, GetUniqueId, (ncclUniqueId* id), (id))
SCAPE_NCCL_HOST(ncclResult_t, CommInitRank, (ncclComm_t* comm, int nranks, ncclUniqueId id, int rank), (comm, nranks, id, rank))
SCAPE_NCCL_HOST(ncclResult_t, CommInitRankConfig, (ncclComm_t* comm, int nranks, ncclUniqueId id, int rank, ncclConfig_t* config), (comm, nranks, id, rank, config))
SCAPE_NCCL_HOST(ncclResult_t, CommInitRankScalable, (ncclComm_t* comm, int nranks, int rank, int ids_count, ncclUniqueId* ids, ncclConfig_t* config), (comm, nranks, rank, ids_count, ids, config))
SCAPE_NCCL_HOST(ncclResult_t, CommInitAll, (ncclComm_t* comms, int ndev, const int* devlist), (comms, ndev, devlist))
SCAPE_NCCL_HOST(ncclResult_t, CommFinalize, (ncclComm_t comm), (comm))
SCAPE_NCCL_HOST(ncclResult_t, CommDestroy, (ncclComm_t comm), (comm))
SCAPE_NCCL_HOST(ncclResult_t, CommAbort, (ncclComm_t comm), (comm))
SCAPE_NCCL_HOST(ncclResult_t, CommRevoke, (ncclComm_t comm, int flags), (comm, flags))
SCAPE_NCCL_HOST(ncclResult_t, CommSplit, (ncclComm_t comm, int color, int key, ncclComm_t* newcomm, ncclConfig_t* config), (comm, color, key, newcomm, config))
SCAPE_NCCL_HOST(ncclResult_t, CommShrink, (ncclComm_t comm, int* excluded, int excluded_count, ncclComm_t* newcomm, ncclConfig_t* config, int flags), (comm, excluded, excluded_count, newcomm, config, flags))
SCAPE_NCCL_HOST(ncclResult_t, CommGetUniqueId, (ncclComm_t comm, ncclUniqueId* id), (comm, id))
SCAPE_NCCL_HOST(ncclResult_t, CommGrow, (ncclComm_t comm, int nranks, const ncclUniqueId* id, int rank, ncclComm_t* newcomm, ncclConfig_t* config), (comm, nranks, id, rank, newcomm, config))
SCAPE_NCCL_HOST(ncclResult_t, CommGetAsyncError, (ncclComm_t comm, ncclResult_t* async_error), (comm, async_error))
SCAPE_NCCL_HOST(ncclResult_t, CommCount, (const ncclComm_t comm, int* count), (comm, count))
SCAPE_NCCL_HOST(ncclResult_t, CommCuDevice, (const ncclComm_t comm, int* device), (comm, device))
SCAPE_NCCL_HOST(ncclResult_t, CommUserRank, (const ncclComm_t comm, int* rank), (comm, rank))
SCAPE_NCCL_HOST(ncclResult_t, CommRegister, (const ncclComm_t comm, void* buff, size_t size, void** handle), (comm, buff, size, handle))
SCAPE_NCCL_HOST(ncclResult_t, CommDeregister, (const ncclComm_t comm, void* handle), (comm, handle))
SCAPE_NCCL_HOST(ncclResult_t, RedOpCreatePreMulSum, (ncclRedOp_t* op, void* scalar, ncclDataType_t datatype, ncclScalarResidence_t residence, ncclComm_t comm), (op, scalar, datatype, residence, comm))
SCAPE_NCCL_HOST(ncclResult_t, RedOpDestroy, (ncclRedOp_t op, ncclComm_t comm), (op, comm))
SCAPE_NCCL_HOST(ncclResult_t, GroupStart, (), ())
SCAPE_NCCL_HOST(ncclResult_t, GroupEnd, (), ())
SCAPE_NCCL_HOST(ncclResult_t, GroupSimulateEnd, (ncclSimInfo_t* info), (info))

SCAPE_NCCL_HOST(ncclResult_t, AllReduce, (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, count, datatype, op, comm, stream))
SCAPE_NCCL_HOST(ncclResult_t, Broadcast, (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, count, datatype, root, comm, stream))
SCAPE_NCCL_HOST(ncclResult_t, Bcast, (void* buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream), (buff, count, datatype, root, comm, stream))
SCAPE_NCCL_HOST(ncclResult_t, Reduce, (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, count, datatype, op, root, comm, stream))
SCAPE_NCCL_HOST(ncclResult_t, ReduceScatter, (const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, recvcount, datatype, op, comm, stream))
SCAPE_NCCL_HOST(ncclResult_t, AllGather, (const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, sendcount, datatype, comm, stream))
SCAPE_NCCL_HOST(ncclResult_t, AlltoAll, (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, count, datatype, comm, stream))
SCAPE_NCCL_HOST(ncclResult_t, Gather, (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, count, datatype, root, comm, stream))
SCAPE_NCCL_HOST(ncclResult_t, Scatter, (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream), (sendbuff, recvbuff, count, datatype, root, comm, stream))
SCAPE_NCCL_HOST(ncclResult_t, Send, (const void* sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream), (sendbuff, count, datatype, peer, comm, stream))
SCAPE_NCCL_HOST(ncclResult_t, Recv, (void* recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm, cudaStream_t stream), (recvbuff, count, datatype, peer, comm, stream))

SCAPE_NCCL_HOST(ncclResult_t, AllReduceConfig, (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config), (sendbuff, recvbuff, count, datatype, op, comm, stream, config))
SCAPE_NCCL_HOST(ncclResult_t, BroadcastConfig, (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config), (sendbuff, recvbuff, count, datatype, root, comm, stream, config))
SCAPE_NCCL_HOST(ncclResult_t, ReduceConfig, (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config), (sendbuff, recvbuff, count, datatype, op, root, comm, stream, config))
SCAPE_NCCL_HOST(ncclResult_t, AllGatherConfig, (const void* sendbuff, void* recvbuff, size_t sendcount, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config), (sendbuff, recvbuff, sendcount, datatype, comm, stream, config))
SCAPE_NCCL_HOST(ncclResult_t, ReduceScatterConfig, (const void* sendbuff, void* recvbuff, size_t recvcount, ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config), (sendbuff, recvbuff, recvcount, datatype, op, comm, stream, config))
SCAPE_NCCL_HOST(ncclResult_t, AlltoAllConfig, (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config), (sendbuff, recvbuff, count, datatype, comm, stream, config))
SCAPE_NCCL_HOST(ncclResult_t, GatherConfig, (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config), (sendbuff, recvbuff, count, datatype, root, comm, stream, config))
SCAPE_NCCL_HOST(ncclResult_t, ScatterConfig, (const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream, const ncclCollConfig_t* config), (sendbuff, recvbuff, count, datatype, root, comm, stream, config))

SCAPE_NCCL_DEVICE(void, ResetDebugInit, (), ())
SCAPE_NCCL_DEVICE(ncclResult_t, CommSuspend, (ncclComm_t comm, int flags), (comm, flags))
SCAPE_NCCL_DEVICE(ncclResult_t, CommResume, (ncclComm_t comm), (comm))
SCAPE_NCCL_DEVICE(ncclResult_t, CommMemStats, (ncclComm_t comm, ncclCommMemStat_t stat, uint64_t* value), (comm, stat, value))
SCAPE_NCCL_DEVICE(ncclResult_t, CommWindowRegister, (ncclComm_t comm, void* buff, size_t size, ncclWindow_t* window, int flags), (comm, buff, size, window, flags))
SCAPE_NCCL_DEVICE(ncclResult_t, CommWindowDeregister, (ncclComm_t comm, ncclWindow_t window), (comm, window))
SCAPE_NCCL_DEVICE(ncclResult_t, WinGetUserPtr, (ncclComm_t comm, ncclWindow_t window, void** pointer), (comm, window, pointer))
SCAPE_NCCL_DEVICE(ncclResult_t, PutSignal, (const void* localbuff, size_t count, ncclDataType_t datatype, int peer, ncclWindow_t window, size_t offset, int signal, int context, unsigned int flags, ncclComm_t comm, cudaStream_t stream), (localbuff, count, datatype, peer, window, offset, signal, context, flags, comm, stream))
SCAPE_NCCL_DEVICE(ncclResult_t, Signal, (int peer, int signal, int context, unsigned int flags, ncclComm_t comm, cudaStream_t stream), (peer, signal, context, flags, comm, stream))
SCAPE_NCCL_DEVICE(ncclResult_t, WaitSignal, (int count, ncclWaitSignalDesc_t* signals, ncclComm_t comm, cudaStream_t stream), (count, signals, comm, stream))
SCAPE_NCCL_DEVICE(ncclResult_t, SetEncryption, (const ncclEncryptionConfig_t* config), (config))

SCAPE_NCCL_DEVICE(ncclResult_t, ParamBind, (ncclParamHandle_t* handle, const char* key), (handle, key))
SCAPE_NCCL_DEVICE(ncclResult_t, ParamGetI8, (ncclParamHandle_t handle, int8_t* out), (handle, out))
SCAPE_NCCL_DEVICE(ncclResult_t, ParamGetI16, (ncclParamHandle_t handle, int16_t* out), (handle, out))
SCAPE_NCCL_DEVICE(ncclResult_t, ParamGetI32, (ncclParamHandle_t handle, int32_t* out), (handle, out))
SCAPE_NCCL_DEVICE(ncclResult_t, ParamGetI64, (ncclParamHandle_t handle, int64_t* out), (handle, out))
SCAPE_NCCL_DEVICE(ncclResult_t, ParamGetU8, (ncclParamHandle_t handle, uint8_t* out), (handle, out))
SCAPE_NCCL_DEVICE(ncclResult_t, ParamGetU16, (ncclParamHandle_t handle, uint16_t* out), (handle, out))
SCAPE_NCCL_DEVICE(ncclResult_t, ParamGetU32, (ncclParamHandle_t handle, uint32_t* out), (handle, out))
SCAPE_NCCL_DEVICE(ncclResult_t, ParamGetU64, (ncclParamHandle_t handle, uint64_t* out), (handle, out))
SCAPE_NCCL_DEVICE(ncclResult_t, ParamGetStr, (ncclParamHandle_t handle, const char** out), (handle, out))
SCAPE_NCCL_DEVICE(ncclResult_t, ParamGet, (ncclParamHandle_t handle, void* out, int capacity, int* length), (handle, out, capacity, length))
SCAPE_NCCL_DEVICE(ncclResult_t, ParamGetParameter, (const char* key, const char** value, int* length), (key, value, length))
SCAPE_NCCL_DEVICE(ncclResult_t, ParamGetAllParameterKeys, (const char*** table, int* length), (table, length))
SCAPE_NCCL_DEVICE(void, ParamDumpAll, (), ())

SCAPE_NCCL_DEVICE(ncclResult_t, CommQueryProperties, (ncclComm_t comm, void* properties), (comm, properties))
SCAPE_NCCL_DEVICE(ncclResult_t, DevCommCreate, (ncclComm_t comm, const void* requirements, void* device_comm), (comm, requirements, device_comm))
SCAPE_NCCL_DEVICE(ncclResult_t, DevCommDestroy, (ncclComm_t comm, const void* device_comm), (comm, device_comm))
SCAPE_NCCL_DEVICE(ncclResult_t, GetLsaMultimemDevicePointer, (ncclWindow_t window, size_t offset, void** pointer), (window, offset, pointer))
SCAPE_NCCL_DEVICE(ncclResult_t, GetMultimemDevicePointer, (ncclWindow_t window, size_t offset, ncclMultimemHandle_t multimem, void** pointer), (window, offset, multimem, pointer))
SCAPE_NCCL_DEVICE(ncclResult_t, GetLsaDevicePointer, (ncclWindow_t window, size_t offset, int lsa_rank, void** pointer), (window, offset, lsa_rank, pointer))
SCAPE_NCCL_DEVICE(ncclResult_t, GetPeerDevicePointer, (ncclWindow_t window, size_t offset, int peer, void** pointer), (window, offset, peer, pointer))
SCAPE_NCCL_DEVICE(ncclResult_t, GetMultimemDeviceLeInfo, (ncclWindow_t window, size_t offset, void* id, size_t* id_offset), (window, offset, id, id_offset))
SCAPE_NCCL_DEVICE(ncclResult_t, GetCftDeviceLeInfo, (ncclWindow_t window, size_t offset, int peer, ncclTeam_t team, void* id, size_t* id_offset), (window, offset, peer, team, id, id_offset))
SCAPE_NCCL_DEVICE(ncclResult_t, GetPeerDeviceLeInfo, (ncclWindow_t window, size_t offset, int peer, void* id, size_t* id_offset), (window, offset, peer, id, id_offset))
SCAPE_NCCL_DEVICE(ncclTeam_t, TeamWorld, (ncclComm_t comm), (comm))
SCAPE_NCCL_DEVICE(ncclTeam_t, TeamLsa, (ncclComm_t comm), (comm))
SCAPE_NCCL_DEVICE(ncclTeam_t, TeamRail, (ncclComm_t comm), (comm))
SCAPE_NCCL_DEVICE(ncclTeam_t, TeamCft, (ncclComm_t comm, int mode), (comm, mode))
SCAPE_NCCL_DEVICE(ncclTeam_t, TeamCftMultimem, (ncclComm_t comm), (comm))
SCAPE_NCCL_DEVICE(int, TeamRankToWorld, (ncclComm_t comm, ncclTeam_t team, int rank), (comm, team, rank))
SCAPE_NCCL_DEVICE(int, TeamRankToLsa, (ncclComm_t comm, ncclTeam_t team, int rank), (comm, team, rank))
SCAPE_NCCL_DEVICE(ncclResult_t, LsaBarrierCreateRequirement, (ncclTeam_t team, int barriers, void* handle, void* requirements), (team, barriers, handle, requirements))
SCAPE_NCCL_DEVICE(ncclResult_t, GinBarrierCreateRequirement, (ncclComm_t comm, ncclTeam_t team, int barriers, void* handle, void* requirements), (comm, team, barriers, handle, requirements))
SCAPE_NCCL_DEVICE(int, LLA2ACalcSlots, (int max_elements, int max_element_size), (max_elements, max_element_size))
SCAPE_NCCL_DEVICE(ncclResult_t, LLA2ACreateRequirement, (int blocks, int slots, void* handle, void* requirements), (blocks, slots, handle, requirements))
SCAPE_NCCL_DEVICE(ncclResult_t, GinOutboxCreateRequirement, (int blocks, int size_log2, void* handle, void* requirements), (blocks, size_log2, handle, requirements))
SCAPE_NCCL_DEVICE(ncclResult_t, GinInboxA2ACreateRequirement, (ncclTeam_t peers, int blocks, int size_log2, void* handle, void* requirements), (peers, blocks, size_log2, handle, requirements))
// clang-format on

#undef SCAPE_NCCL_COMMON
#undef SCAPE_NCCL_HOST
#undef SCAPE_NCCL_DEVICE
#undef SCAPE_NCCL_FUNCTION
