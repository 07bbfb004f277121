# A toolchain for 64-bit Arm on Debian: -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-linux-gnu.cmake, as `make test-arm` has it. Programs run in an
# emulator.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(triplet aarch64-linux-gnu)
set(CMAKE_C_COMPILER ${triplet}-gcc)
set(CMAKE_CXX_COMPILER ${triplet}-g++)
set(CMAKE_LIBRARY_ARCHITECTURE ${triplet})
set(CMAKE_FIND_ROOT_PATH /usr/${triplet})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/${triplet} -E LD_LIBRARY_PATH=/usr/lib/${triplet}:/usr/${triplet}/lib)
