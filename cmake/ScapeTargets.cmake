# How every target of the project is compiled, in one place.

add_library(scape_options INTERFACE)
target_include_directories(scape_options INTERFACE ${CMAKE_SOURCE_DIR} ${CMAKE_SOURCE_DIR}/include)
# No contraction to fused multiply-add: replicated state must be bit-identical over CPUs
# (docs/algorithm.md, "Bit identity").
target_compile_options(scape_options INTERFACE
  -ffp-contract=off -Wall -Wextra -Wshadow -Wvla -Wimplicit-fallthrough
  $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor -Woverloaded-virtual>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND CMAKE_CXX_COMPILER_VERSION VERSION_LESS 13)
  # GCC bug 105651: a false -Wrestrict inside std::string, which comes and goes with inlining.
  target_compile_options(scape_options INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-Wno-restrict>)
endif()
target_compile_definitions(scape_options INTERFACE SCAPE_VERSION_STRING="${PROJECT_VERSION}")
if(SCAPE_WERROR)
  target_compile_options(scape_options INTERFACE -Werror)
endif()
if(SCAPE_SANITIZE)
  target_compile_options(scape_options INTERFACE
    -fsanitize=${SCAPE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer -g1)
  target_link_options(scape_options INTERFACE -fsanitize=${SCAPE_SANITIZE})
endif()
if(SCAPE_FUZZ)
  # libFuzzer sees which way an input takes.
  target_compile_options(scape_options INTERFACE -fsanitize=fuzzer-no-link)
endif()

# scape_library(NAME sources... LINK libs...): a static, position-independent part of the product.
function(scape_library name)
  cmake_parse_arguments(ARG "" "" "LINK" ${ARGN})
  add_library(${name} STATIC ${ARG_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PUBLIC scape_options Threads::Threads ${CMAKE_DL_LIBS} ${ARG_LINK})
endfunction()

# scape_shared(NAME sources... LINK libs... VERSION_SCRIPT file): a shared library that needs
# nothing beyond libc's family and, for a module, the one library it adapts.
function(scape_shared name)
  cmake_parse_arguments(ARG "" "VERSION_SCRIPT" "LINK" ${ARGN})
  add_library(${name} SHARED ${ARG_UNPARSED_ARGUMENTS})
  target_link_libraries(${name} PRIVATE scape_options Threads::Threads ${CMAKE_DL_LIBS} ${ARG_LINK})
  if(NOT SCAPE_SANITIZE)
    target_link_options(${name} PRIVATE -static-libstdc++ -static-libgcc -Wl,-z,defs)
  endif()
  target_link_options(${name} PRIVATE -Wl,--as-needed -Wl,-Bsymbolic-functions -Wl,-O1 -Wl,--gc-sections
    -Wl,--exclude-libs,ALL)
  if(ARG_VERSION_SCRIPT)
    target_link_options(${name} PRIVATE -Wl,--version-script=${ARG_VERSION_SCRIPT})
    set_target_properties(${name} PROPERTIES LINK_DEPENDS ${ARG_VERSION_SCRIPT})
  endif()
endfunction()
