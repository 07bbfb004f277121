/* scape.h: the one public header of Scape. Plain C11, usable from C++.
 *
 * Scape makes registered all-reduces sparse. Preload the library, name the buffers, train:
 *
 *   LD_PRELOAD=/path/to/libscape_nccl.so ./train
 *
 *   scape_config config;
 *   scape_config_init(&config, sizeof config);
 *   config.name = "grads.0";
 *   config.sparsity = 0.99;                      // 99 % of the elements are not sent
 *   scape_registration handle;
 *   if (scape_register(grad, n, SCAPE_FLOAT32, &config, &handle) != SCAPE_OK)
 *     fprintf(stderr, "%s\n", scape_last_error());   // training stays dense
 *   ...
 *   ncclAllReduce(grad, grad, n, ncclFloat, ncclAvg, comm, stream);   // n * 1 % travels
 *   scape_adams_step(grad, n, param, lr, weight_decay, stream);      // AdamS on masked elements
 *
 * Linking: none needed. Every function here is looked up at run time in the process (the preloaded
 * library). Where it is absent, each call returns SCAPE_ERR_INACTIVE, scape_last_error() says so,
 * and the program trains dense. Build with SCAPE_LINKED defined to declare the functions as
 * ordinary symbols instead (the library itself does, and programs that link it may).
 *
 * Threads: every function may be called from any thread. Unless said otherwise a call is local:
 * it waits for no other rank. Streams: `stream` is the cudaStream_t that the buffer's collective
 * used; it is ignored in host mode, where a call returns when its result is there.
 */
#ifndef SCAPE_SCAPE_H_
#define SCAPE_SCAPE_H_

#if !defined(SCAPE_LINKED)
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#endif
#include <stddef.h>
#include <stdint.h>

#define SCAPE_VERSION_MAJOR 0
#define SCAPE_VERSION_MINOR 1
#define SCAPE_VERSION_PATCH 0
#define SCAPE_VERSION_CODE \
  (SCAPE_VERSION_MAJOR * 10000 + SCAPE_VERSION_MINOR * 100 + SCAPE_VERSION_PATCH)

#ifdef __cplusplus
/* The type that C compilers choose, spelt out: any value of it may be passed, and is refused. */
#define SCAPE_ENUM : unsigned
extern "C" {
#else
#define SCAPE_ENUM
#endif

typedef enum scape_status SCAPE_ENUM {
  SCAPE_OK = 0,
  SCAPE_ERR_INACTIVE = 1,  /* the library is not in the process, or SCAPE_ENABLE=0 */
  SCAPE_ERR_ARGUMENT = 2,  /* an argument is out of range */
  SCAPE_ERR_USAGE = 3,     /* the call does not fit the state it meets */
  SCAPE_ERR_NOT_FOUND = 4, /* no such registration or buffer */
  SCAPE_ERR_MISMATCH = 5,  /* ranks disagree; the message names both values */
  SCAPE_ERR_MEMORY = 6,    /* out of memory, or the caller's buffer is too small */
  SCAPE_ERR_SYSTEM = 7,    /* the operating system or the transport refused */
  SCAPE_ERR_REMOTE = 8,    /* another rank failed, aborted or died */
  SCAPE_ERR_TIMEOUT = 9,   /* peers did not answer in time */
  SCAPE_ERR_DATA = 10,     /* saved state is damaged, or of another rank, world or version */
  SCAPE_ERR_INTERNAL = 11  /* a fault of the library */
} scape_status;

/* Element type of a registered buffer, and of what travels (`config.payload`). */
typedef enum scape_dtype SCAPE_ENUM {
  SCAPE_FLOAT32 = 0,
  SCAPE_BFLOAT16 = 1,
  SCAPE_FLOAT16 = 2
} scape_dtype;

/* What the caller gets back from the all-reduce of a registered buffer; docs/algorithm.md, "Roles".
 * In all of them u = gradient + residual and "masked" means: in the mask of this step. */
typedef enum scape_role SCAPE_ENUM {
  /* The all-reduce leaves the caller's buffer alone; scape_adams_step() must follow and does the
   * AdamS update of the masked elements. Recommended. */
  SCAPE_ROLE_FUSED = 0,
  /* The caller all-reduces x = beta1 * m + (1 - beta1) * g, m as last returned. It gets the
   * synchronized first moment: new on masked elements, replicated elsewhere. The caller's optimizer
   * reads the mask and the ages. */
  SCAPE_ROLE_FIRST_MOMENT = 1,
  /* The caller all-reduces gradients for a third-party AdamS whose step is followed by
   * scape_post_step(): masked elements get the mean gradient per step; elements that leave the mask
   * get what zeroes the optimizer's m; others get 0. */
  SCAPE_ROLE_GRADIENT_HOOKED = 2,
  /* The caller all-reduces gradients for an unmodified optimizer: masked elements get the mean of
   * u, others 0. Costs quality; the library warns once. */
  SCAPE_ROLE_GRADIENT = 3
} scape_role;

/* Where the residual lives. What comes of a step does not depend on it. */
typedef enum scape_residual SCAPE_ENUM {
  /* In memory of the library, of the device in device mode. */
  SCAPE_RESIDUAL_INTERNAL = 0,
  /* In the caller's gradient buffer (fused role, fp32, sendbuff == recvbuff only): gradients
   * accumulate into it and masked elements are cleared by scape_adams_step(); nothing else may
   * write it. */
  SCAPE_RESIDUAL_IN_PLACE = 1,
  /* In page-locked host memory of the library, through which steps stream it in device mode: 4
   * bytes of device memory an element less, for what crosses the link to the host
   * (docs/device-mode.md). In host mode it is the same as internal. */
  SCAPE_RESIDUAL_HOST = 2
} scape_residual;

/* Lazy: an element's age enters its update (the default). Plain: the age counts as 1 throughout and
 * owners do not rotate; kept for comparison. */
typedef enum scape_rule SCAPE_ENUM { SCAPE_RULE_LAZY = 0, SCAPE_RULE_PLAIN = 1 } scape_rule;

/* Options of a registration. Fill with scape_config_init(), then change fields. Ranks must agree on
 * all of them: the first all-reduce of a buffer starts a comparison whose failure names both values
 * on every rank. */
typedef struct scape_config {
  size_t size;         /* set by scape_config_init(); fields beyond it take their defaults */
  const char* name;    /* copied; up to 63 bytes; identifies the buffer on all ranks and in saved
                          state; NULL: "buffer" */
  scape_role role;     /* SCAPE_ROLE_FUSED */
  scape_dtype payload; /* fp32 or bf16; SCAPE_PAYLOAD */
  scape_residual residual; /* internal; SCAPE_RESIDUAL */
  scape_rule rule;         /* SCAPE_RULE_LAZY */
  double sparsity; /* fraction NOT sent, in [0, 1): 0.99 sends 1 %; 0 is dense; SCAPE_SPARSITY */
  double beta1;    /* 0.9, in [0, 1) */
  double beta2;    /* 0.95, in [0, 1) */
  double eps;      /* 1e-8, > 0 */
  double age_cap;  /* c: a masked element's step is at most this many times lr; 100, >= 1 */
  /* Warm-up. Steps t < dense_steps travel dense; until ramp_steps the sparsity is
   * min(ramp_sparsity, sparsity); from then on it is `sparsity`. Where total_steps > 0 and a field
   * is 0, it is 1 % of total_steps (dense) or 10 % (ramp); else SCAPE_DENSE_STEPS,
   * SCAPE_RAMP_STEPS. */
  uint64_t total_steps;
  uint64_t dense_steps;
  uint64_t ramp_steps;
  double ramp_sparsity; /* SCAPE_RAMP_SPARSITY, 0.9 */
} scape_config;

/* A registration: an address range and its options. Opaque; valid until scape_unregister(). */
typedef struct scape_registration_opaque* scape_registration;

/* Options of a single call.
 *
 * The list in NCCL 2.32's ncclCollConfig_t.ext takes options that NCCL itself ignores. A call of
 * ncclAllReduceConfig() that has these is masked without a registration: the name is the buffer's
 * identity on all ranks and in saved state, its address may change from call to call, and its first
 * call is dense whatever the warm-up. The functions below that take (buffer, count) mean the last
 * call that had this address. The options of a name stay the same from call to call, and alike on
 * all ranks: ranks that differ, or of which one leaves them out, get an error that names both.
 * Refused: a range that is registered, a type or an operation that cannot be masked
 * (ncclInvalidArgument), other collectives. The state of a name ends with its communicator.
 *
 *   double sparsity = 0.99;
 *   ncclConfigExt_t fraction = {NULL, {SCAPE_VENDOR_ID, SCAPE_CALL_SPARSITY}, {.raw = &sparsity}};
 *   ncclConfigExt_t name = {&fraction, {SCAPE_VENDOR_ID, SCAPE_CALL_NAME}, {.s = "layer0.grad"}};
 *   ncclCollConfig_t config = NCCL_COLLCONFIG_INITIALIZER;
 *   config.ext = &name;
 *   ncclAllReduceConfig(grad, grad, n, ncclFloat, ncclAvg, comm, stream, &config);
 */
#define SCAPE_VENDOR_ID 0x5ca9e7 /* ncclConfigExt_t.key.vendorId */
typedef enum scape_call_option
    SCAPE_ENUM {                          /* ncclConfigExt_t.key.optionId */
                 SCAPE_CALL_NAME = 1,     /* val.s: 1 to 63 bytes; the one that must be there */
                 SCAPE_CALL_ROLE = 2,     /* val.i: a scape_role */
                 SCAPE_CALL_SPARSITY = 3, /* val.raw: a const double*, the fraction NOT sent */
                 SCAPE_CALL_RULE = 4,     /* val.i: a scape_rule */
                 SCAPE_CALL_CONFIG = 5 /* val.raw: a const scape_config* with all else; the options
                                          above prevail over it */
    } scape_call_option;

/* Counters of one buffer, one registration, or the process. Bytes are counted at the transport. */
typedef struct scape_stats {
  size_t size;                /* set by the caller to sizeof(scape_stats) before the call */
  uint64_t intercepted_calls; /* hooked collectives that met a registered range */
  uint64_t sparse_calls;      /* of these, masked */
  uint64_t dense_calls;       /* of these, dense for whatever reason (warm-up included) */
  uint64_t fallback_calls;    /* of these, dense although a masked call was due; a line says why */
  uint64_t skipped_steps;     /* steps that a non-finite value made a skip */
  uint64_t nonfinite_values;  /* non-finite values met off the mask and cleared */
  uint64_t payload_bytes;     /* masked values handed to the communicator */
  uint64_t mask_bytes;        /* encoded masks handed to the communicator */
  uint64_t wire_bytes_sent;   /* by the process's transports, everything included; 0 where the
                                 counters are those of one buffer or registration */
  uint64_t wire_bytes_received;
  uint64_t refreshes;     /* masks chosen */
  uint64_t refresh_waits; /* calls that had to wait for the next mask */
  uint64_t pack_ns;       /* time in each part, nanoseconds; sums over calls */
  uint64_t exchange_ns;
  uint64_t unpack_ns;
  uint64_t score_ns;
  uint64_t refresh_ns; /* on the progress thread */
  uint64_t refresh_wait_ns;
  uint64_t step_ns;         /* scape_adams_step() */
  uint64_t mask_elements;   /* masked elements of the last call */
  uint64_t buffer_elements; /* all elements of the last call */
  uint64_t mask_overlap;    /* masked elements that were masked in the call before, last call */
  uint64_t step;            /* t: calls of the buffer so far */
} scape_stats;

/* How the functions below are declared: as symbols (SCAPE_LINKED), or as small inline functions
 * that look the symbol up in the process at their first call. */
#define SCAPE_API __attribute__((visibility("default")))
#if defined(SCAPE_LINKED)
#define SCAPE_FUNCTION(type, name, absent, params, args) SCAPE_API type name params;
#else
static inline void* scape_lookup_(void** slot, const char* name) {
  void* found = __atomic_load_n(slot, __ATOMIC_ACQUIRE);
  if (found == NULL) {
    found = dlsym((void*)0 /* RTLD_DEFAULT */, name);
    __atomic_store_n(slot, found, __ATOMIC_RELEASE);
  }
  return found;
}
/* What a registration without the library comes to. SCAPE_REQUIRED takes the words that the library
 * takes; any other counts as 1, so that a slip of the pen never trains dense unnoticed. */
static inline scape_status scape_absent_(void) {
  const char* required = getenv("SCAPE_REQUIRED");
  int valid;
  if (required == NULL || strcmp(required, "0") == 0 || strcmp(required, "off") == 0 ||
      strcmp(required, "false") == 0) {
    return SCAPE_ERR_INACTIVE;
  }
  valid =
      strcmp(required, "1") == 0 || strcmp(required, "on") == 0 || strcmp(required, "true") == 0;
  fprintf(stderr,
          "scape: SCAPE_REQUIRED=\"%.64s\"%s, but libscape_nccl.so is not in the process: start "
          "the program with LD_PRELOAD=/path/to/libscape_nccl.so\n",
          required,
          valid ? "" : " is not valid (it takes 0, 1, on, off, true or false) and counts as 1");
  exit(1);
}
#define SCAPE_FUNCTION(type, name, absent, params, args)            \
  static inline type name params {                                  \
    static void* slot_;                                             \
    union {                                                         \
      void* object;                                                 \
      type(*function) params;                                       \
    } found_;                                                       \
    found_.object = scape_lookup_(&slot_, #name);                   \
    return found_.object != NULL ? found_.function args : (absent); \
  }
#endif

/* ---- About the library ---- */

/* 1 when the library is in the process and enabled (SCAPE_ENABLE), else 0. */
SCAPE_FUNCTION(int, scape_is_active, 0, (void), ())

/* SCAPE_VERSION_CODE of the library in the process; 0 when there is none. */
SCAPE_FUNCTION(int, scape_version, 0, (void), ())

/* A static string for a status; never NULL. */
SCAPE_FUNCTION(const char*, scape_status_string, "scape is not in the process",
               (scape_status status), (status))

/* Why the last scape_* or hooked nccl* call of this thread failed: what was wrong, the value met
 * and the next step. Owned by the library, valid until the thread's next call; never NULL. */
SCAPE_FUNCTION(const char*, scape_last_error,
               "libscape_nccl.so is not in the process: start the program with "
               "LD_PRELOAD=/path/to/libscape_nccl.so (training goes on dense)",
               (void), ())

/* ---- Registration ---- */

/* Fills *config with the defaults, which SCAPE_* variables may move. `size` is sizeof(*config). */
SCAPE_FUNCTION(scape_status, scape_config_init, SCAPE_ERR_INACTIVE,
               (scape_config * config, size_t size), (config, size))

/* Names the range buffer .. buffer + count elements. Collectives whose buffer lies inside it become
 * masked; each distinct (address, count) met is a buffer of its own, with its own step count, mask
 * and residual. This state (residual, moment, ages, masks) is kept for each communicator, address
 * and count, and ends with the communicator (ncclCommDestroy, ncclCommAbort): save it before, or
 * flush before where the residual matters. `config` may be NULL (defaults). The memory stays the
 * caller's and must stay valid until scape_unregister(). Errors: ARGUMENT names the field, the
 * value and its range; a range that overlaps another registration is refused. count up to 2^33.
 * With SCAPE_REQUIRED=1 in the environment a refusal, or the library's absence, ends the program.
 */
SCAPE_FUNCTION(scape_status, scape_register, scape_absent_(),
               (void* buffer, size_t count, scape_dtype dtype, const scape_config* config,
                scape_registration* registration),
               (buffer, count, dtype, config, registration))

/* Drops a registration and the state of its buffers; a line tells how much residual was dropped
 * with them. Waits for calls of its buffers in other threads, and in device mode for what the
 * streams of its last calls hold; else for no other rank: a refresh in flight goes on without
 * them. */
SCAPE_FUNCTION(scape_status, scape_unregister, SCAPE_ERR_INACTIVE,
               (scape_registration registration), (registration))

/* Names the buffer of this thread's next hooked call, for callers that reuse one address for
 * different parameters: state is kept by this name instead of by address. Copied; up to 63 bytes.
 */
SCAPE_FUNCTION(scape_status, scape_next, SCAPE_ERR_INACTIVE, (const char* name), (name))

/* SCAPE_OK when the registration has met calls and they travel sparse (or are in their dense
 * warm-up); else USAGE, NOT_FOUND, or what its calls failed with, and the reason is in
 * scape_last_error(). */
SCAPE_FUNCTION(scape_status, scape_self_check, SCAPE_ERR_INACTIVE,
               (scape_registration registration), (registration))

/* ---- Steps ---- */

/* Fused role: steps 3-6 of docs/algorithm.md after the all-reduce of (buffer, count). param: count
 * fp32 elements, the same on all ranks, updated on the mask. lr and weight_decay are this step's.
 * After a skipped step it changes nothing but t. USAGE, or NOT_FOUND where it would be the buffer's
 * first, when no masked all-reduce preceded it: one that went dense is none, and left its sum in
 * the buffer; the reason is in scape_last_error(). */
SCAPE_FUNCTION(scape_status, scape_adams_step, SCAPE_ERR_INACTIVE,
               (void* buffer, size_t count, float* param, double lr, double weight_decay,
                void* stream),
               (buffer, count, param, lr, weight_decay, stream))

/* Hooked gradient role, after the optimizer's step: multiplies the change of each masked parameter,
 * weight decay apart, by min(age, age_cap), and sets the others to before * (1 - lr *
 * weight_decay): rounding leaves traces of m in the optimizer, which its division by sqrt(v) would
 * make steps of. `before` and `param` hold the parameters of elements offset .. offset + length of
 * the buffer, before and after the optimizer's step; lr and weight_decay are that step's
 * (decoupled, as AdamW's). After a dense or a skipped call it changes nothing. */
SCAPE_FUNCTION(scape_status, scape_post_step, SCAPE_ERR_INACTIVE,
               (void* buffer, size_t count, size_t offset, size_t length, const float* before,
                float* param, double lr, double weight_decay, void* stream),
               (buffer, count, offset, length, before, param, lr, weight_decay, stream))

/* Clears the masked elements of an in-place gradient buffer: what zero_grad must do there, since
 * the other elements are the residual. Where the buffer does not hold the residual, all of it is
 * gradient, and all is cleared. */
SCAPE_FUNCTION(scape_status, scape_clear_masked, SCAPE_ERR_INACTIVE,
               (void* buffer, size_t count, void* stream), (buffer, count, stream))

/* Collective over the buffer's communicator: one dense step that sends every residual and, in the
 * fused role, applies it and the pending weight decay to param. In the other roles param is NULL
 * and the result is written to the buffer. Before the first call of the buffer, and where it is
 * always dense (sparsity 0, one rank), nothing waits: buffer and param stay as they are, and no
 * rank is waited for. Where state was loaded for the buffer, that is what is sent; USAGE where no
 * call has met the buffer yet, since only a call says in which communicator it lives. */
SCAPE_FUNCTION(scape_status, scape_flush, SCAPE_ERR_INACTIVE,
               (void* buffer, size_t count, float* param, double lr, double weight_decay,
                void* stream),
               (buffer, count, param, lr, weight_decay, stream))

/* ---- Reading ---- */

/* The mask of the last call: bit j % 64 of words[j / 64] is element j; padding bits are 0.
 * `capacity` is in words, at least ceil(count / 64). */
SCAPE_FUNCTION(scape_status, scape_read_mask, SCAPE_ERR_INACTIVE,
               (const void* buffer, size_t count, uint64_t* words, size_t capacity),
               (buffer, count, words, capacity))

/* The ages that the last call's masked elements had, and that the others have now, in steps;
 * capacity in elements, at least count. */
SCAPE_FUNCTION(scape_status, scape_read_ages, SCAPE_ERR_INACTIVE,
               (const void* buffer, size_t count, uint16_t* ages, size_t capacity),
               (buffer, count, ages, capacity))

/* This rank's residual as fp32, and the replicated first moment; capacity in elements. */
SCAPE_FUNCTION(scape_status, scape_read_residual, SCAPE_ERR_INACTIVE,
               (const void* buffer, size_t count, float* out, size_t capacity),
               (buffer, count, out, capacity))
SCAPE_FUNCTION(scape_status, scape_read_moment, SCAPE_ERR_INACTIVE,
               (const void* buffer, size_t count, float* out, size_t capacity),
               (buffer, count, out, capacity))

/* Counters of the buffer (buffer, count); of a whole registration when count is 0; of the process
 * when buffer is NULL. */
SCAPE_FUNCTION(scape_status, scape_get_stats, SCAPE_ERR_INACTIVE,
               (const void* buffer, size_t count, scape_stats* stats), (buffer, count, stats))

/* ---- Saving and loading ---- */

/* The state of all buffers of this rank: residual, first moment, ages, masks, step; with rank,
 * world size, names, sizes and a checksum. *needed is always set; data may be NULL to ask for it.
 * Waits for refreshes in flight. Each rank saves its own. */
SCAPE_FUNCTION(scape_status, scape_save_state, SCAPE_ERR_INACTIVE,
               (void* data, size_t capacity, size_t* needed), (data, capacity, needed))
SCAPE_FUNCTION(scape_status, scape_save_state_file, SCAPE_ERR_INACTIVE, (const char* path), (path))

/* Takes saved state; each buffer finds its part by name, offset and count at its next call. DATA
 * when the bytes are damaged or cut, of another version, or of another rank or world than the
 * buffer's communicator has; nothing is changed then. */
SCAPE_FUNCTION(scape_status, scape_load_state, SCAPE_ERR_INACTIVE, (const void* data, size_t size),
               (data, size))
SCAPE_FUNCTION(scape_status, scape_load_state_file, SCAPE_ERR_INACTIVE, (const char* path), (path))

#undef SCAPE_FUNCTION
#undef SCAPE_ENUM

#ifdef __cplusplus
}
#endif

#endif /* SCAPE_SCAPE_H_ */
