# find_package(scape): the target scape::scape carries scape.h, which finds the preloaded library at run time, and
# SCAPE_NCCL_LIBRARY is the library to preload. Nothing of Scape is linked.
get_filename_component(scape_prefix ${CMAKE_CURRENT_LIST_DIR}/../../.. ABSOLUTE)
if(NOT TARGET scape::scape)
  add_library(scape::scape INTERFACE IMPORTED)
  set_target_properties(scape::scape PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES ${scape_prefix}/include
    INTERFACE_LINK_LIBRARIES "${CMAKE_DL_LIBS}")
endif()
set(SCAPE_NCCL_LIBRARY ${scape_prefix}/lib/libscape_nccl.so)
