# What a test of a sanitizer build runs with. The suppressions, each with its reason, are in tests/sanitizers.
set(suppressions ${CMAKE_CURRENT_SOURCE_DIR}/sanitizers)
set(SCAPE_TEST_SLOWDOWN 1)  # factor on the time limits
set(SCAPE_TEST_LAUNCHER "")  # before each test's command
set(SCAPE_SANITIZER_RUNTIME "")  # has to come first in LD_PRELOAD
if(SCAPE_SANITIZE MATCHES "address")
  set(SCAPE_TEST_SLOWDOWN 5)
  set(runtime libasan.so)
elseif(SCAPE_SANITIZE MATCHES "thread")
  set(SCAPE_TEST_SLOWDOWN 10)
  set(runtime libtsan.so)
  # Kernels that place mappings with more than 28 random bits use addresses that this runtime keeps for itself
  # ("unexpected memory mapping"); without randomness it is well everywhere.
  execute_process(COMMAND setarch --addr-no-randomize true RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
  if(failed STREQUAL "0")
    set(SCAPE_TEST_LAUNCHER setarch --addr-no-randomize)
  endif()
endif()
if(runtime)
  execute_process(COMMAND ${CMAKE_CXX_COMPILER} -print-file-name=${runtime}
    OUTPUT_VARIABLE SCAPE_SANITIZER_RUNTIME OUTPUT_STRIP_TRAILING_WHITESPACE)
endif()

# scape_sanitizer_environment(OUT [option=value ...]): the sanitizers' options as NAME=value, as test property
# ENVIRONMENT wants them; the given ones come last and win. Each report ends the process that it is about: a test then
# cannot pass over it.
function(scape_sanitizer_environment out)
  # GCC 12's runtimes take the 16 bytes before a thread's copy of an opened library's thread-locals for their size and
  # start, where the copy lies 16 bytes behind a page's begin (that held for glibc 2.19): one thread in some hundreds
  # then ends the process with "failed to allocate" terabytes, or in the search for leaks with "Tracer caught signal
  # 11". The C library's malloc() tells of the same memory.
  list(JOIN ARGN ":" more)
  set(more "intercept_tls_get_addr=0:${more}")
  set(environment "")
  if(SCAPE_SANITIZE MATCHES "address")
    list(APPEND environment
      "ASAN_OPTIONS=detect_stack_use_after_return=1:strict_string_checks=1:check_initialization_order=1:${more}"
      "LSAN_OPTIONS=suppressions=${suppressions}/lsan.supp:print_suppressions=0")
  endif()
  if(SCAPE_SANITIZE MATCHES "undefined")
    list(APPEND environment "UBSAN_OPTIONS=print_stacktrace=1:halt_on_error=1")
  endif()
  if(SCAPE_SANITIZE MATCHES "thread")
    list(APPEND environment
      "TSAN_OPTIONS=suppressions=${suppressions}/tsan.supp:halt_on_error=1:print_suppressions=0:${more}"
      # UCX's memory hooks take a lock in the C library's last call of an ending thread, when the sanitizer has
      # dismantled that thread already.
      "UCX_MEM_EVENTS=no")
  endif()
  set(${out} "${environment}" PARENT_SCOPE)
endfunction()

# scape_left_out(NAME WHY): a test that a sanitizer build cannot run; ctest lists it as skipped.
function(scape_left_out name why)
  add_test(NAME ${name} COMMAND sh -c "echo \"left out of sanitizer builds: ${why}\"; exit 77")
  set_tests_properties(${name} PROPERTIES SKIP_RETURN_CODE 77 LABELS left_out)
endfunction()
