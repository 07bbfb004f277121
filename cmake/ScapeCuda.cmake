# CUDA sources, compiled by nvcc. It is called directly instead of through CMake's CUDA language, whose check of the
# compiler fails for toolkits that are newer than CMake, and where only the PyPI wheels of the toolkit are there.
set(SCAPE_CUDA AUTO CACHE STRING "Compile the CUDA kernels: AUTO (where an nvcc is found), ON or OFF")
set_property(CACHE SCAPE_CUDA PROPERTY STRINGS AUTO ON OFF)
set(SCAPE_CUDA_ARCHITECTURES "" CACHE STRING
  "Compute capabilities, e.g. 80;90; the newest also as PTX. Empty: 80, 90, 100 and 120 as far as nvcc has them; with tests 90 alone")

if(SCAPE_CUDA)
  file(GLOB wheels ${CMAKE_SOURCE_DIR}/build/venv/lib/python3*/site-packages/nvidia/cu*/bin)
  find_program(SCAPE_NVCC nvcc PATHS /usr/local/cuda/bin ${wheels}
    DOC "nvcc of a CUDA 12.8 or later toolkit")
  if(DEFINED ENV{CUDACXX} AND EXISTS "$ENV{CUDACXX}" AND NOT IS_DIRECTORY "$ENV{CUDACXX}")
    set(SCAPE_NVCC $ENV{CUDACXX})
  endif()
  if(NOT SCAPE_NVCC AND SCAPE_CUDA STREQUAL "ON")
    message(FATAL_ERROR "SCAPE_CUDA=ON: no nvcc in CUDACXX, PATH, /usr/local/cuda/bin or build/venv; install a CUDA toolkit, "
      "run tools/setup.sh test, or set SCAPE_CUDA=OFF")
  endif()
endif()
if(SCAPE_CUDA AND SCAPE_NVCC)
  set(SCAPE_HAVE_CUDA TRUE)
  execute_process(COMMAND ${SCAPE_NVCC} --list-gpu-code OUTPUT_VARIABLE known OUTPUT_STRIP_TRAILING_WHITESPACE
    RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${SCAPE_NVCC} does not run (${failed}); set CUDACXX to another nvcc, or SCAPE_CUDA=OFF")
  endif()
  # Where its toolkit is: nvcc may be a script.
  execute_process(COMMAND ${SCAPE_NVCC} --dryrun -x cu /dev/null ERROR_VARIABLE told OUTPUT_QUIET)
  string(REGEX MATCH "TOP=([^\n]*)" found "${told}")
  set(toolkit "${CMAKE_MATCH_1}")
  find_path(SCAPE_CUDA_INCLUDE cuda_runtime_api.h NO_DEFAULT_PATH
    PATHS ${toolkit}/include ${toolkit}/targets/${CMAKE_SYSTEM_PROCESSOR}-linux/include REQUIRED)
  find_library(SCAPE_CUDART_STATIC cudart_static NO_DEFAULT_PATH
    PATHS ${toolkit}/lib64 ${toolkit}/lib ${toolkit}/targets/${CMAKE_SYSTEM_PROCESSOR}-linux/lib REQUIRED)
  set(architectures ${SCAPE_CUDA_ARCHITECTURES})
  if(NOT architectures)
    set(wanted 80 90 100 120)
    if(SCAPE_BUILD_TESTS)
      set(wanted 90)
    endif()
    foreach(architecture ${wanted})
      if(known MATCHES "sm_${architecture}(\n|$)")
        list(APPEND architectures ${architecture})
      endif()
    endforeach()
  endif()
  set(SCAPE_NVCC_CODE "")
  foreach(architecture ${architectures})
    list(APPEND SCAPE_NVCC_CODE -gencode=arch=compute_${architecture},code=sm_${architecture})
    set(newest ${architecture})
  endforeach()
  list(APPEND SCAPE_NVCC_CODE -gencode=arch=compute_${newest},code=compute_${newest})
  message(STATUS "CUDA kernels: ${SCAPE_NVCC}, sm_${architectures}, PTX of ${newest}")
else()
  set(SCAPE_HAVE_CUDA FALSE)
  message(STATUS "CUDA kernels: not compiled, no nvcc was found or SCAPE_CUDA=OFF")
endif()

# Bit identity with the CPU's kernels: no contraction, IEEE division and square root, denormals kept.
set(SCAPE_NVCC_FLAGS -std=c++20 -O3 -lineinfo --expt-relaxed-constexpr
  --fmad=false -prec-div=true -prec-sqrt=true -ftz=false
  -Xcompiler=-fPIC,-fvisibility=hidden,-ffp-contract=off,-Wall,-Wextra
  -I${CMAKE_SOURCE_DIR} -I${CMAKE_SOURCE_DIR}/include)
if(SCAPE_WERROR)
  list(APPEND SCAPE_NVCC_FLAGS -Werror=all-warnings -Xcompiler=-Werror)
endif()

# The toolkit's own folder, which nvcc may be a script away from.
if(SCAPE_HAVE_CUDA)
  execute_process(COMMAND ${SCAPE_NVCC} --dryrun -x cu -c ${CMAKE_CURRENT_LIST_FILE} ERROR_VARIABLE steps OUTPUT_QUIET)
  if(steps MATCHES "TOP=([^\n]+)")
    set(SCAPE_CUDA_TOP ${CMAKE_MATCH_1})
  endif()
  find_library(SCAPE_CUDART cudart_static HINTS ${SCAPE_CUDA_TOP} PATH_SUFFIXES lib lib64 targets/x86_64-linux/lib)
  find_path(SCAPE_CUB cub/device/device_select.cuh HINTS ${SCAPE_CUDA_TOP} PATH_SUFFIXES include/cccl include)
endif()

# scape_cuda_objects(OUT sources.cu...): their objects.
function(scape_cuda_objects out)
  set(objects "")
  foreach(source ${ARGN})
    set(from ${CMAKE_CURRENT_SOURCE_DIR}/${source})
    set(to ${CMAKE_CURRENT_BINARY_DIR}/${source}.o)
    add_custom_command(OUTPUT ${to}
      COMMAND ${CMAKE_CXX_COMPILER_LAUNCHER} ${SCAPE_NVCC} ${SCAPE_NVCC_FLAGS} ${SCAPE_NVCC_CODE} -MD -MF ${to}.d -c ${from} -o ${to}
      DEPENDS ${from} ${SCAPE_NVCC} DEPFILE ${to}.d VERBATIM COMMENT "Building CUDA object ${source}.o")
    list(APPEND objects ${to})
  endforeach()
  set(${out} ${objects} PARENT_SCOPE)
endfunction()

# scape_cuda_library(NAME sources.cu... LINK libs...): a static, position-independent part of the product. What links it
# links cudart_static, too.
function(scape_cuda_library name)
  cmake_parse_arguments(ARG "" "" "LINK" ${ARGN})
  scape_cuda_objects(objects ${ARG_UNPARSED_ARGUMENTS})
  add_library(${name} STATIC ${objects})
  set_target_properties(${name} PROPERTIES LINKER_LANGUAGE CXX)
  target_link_libraries(${name} PUBLIC ${ARG_LINK})
endfunction()
