# Debian's cross compiler; the root file system in INGOT_ARM64_ROOT has Python's headers.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L $ENV{INGOT_ARM64_ROOT})
set(CMAKE_FIND_ROOT_PATH $ENV{INGOT_ARM64_ROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE BOTH)
# Debian's pyconfig.h includes the one of the architecture from /usr/include.
set(CMAKE_CXX_FLAGS_INIT "-idirafter $ENV{INGOT_ARM64_ROOT}/usr/include")
