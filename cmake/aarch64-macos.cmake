# Builds for macOS 14 on arm64 without a Mac: zig's clang and C++ library, stand-ins for the few
# Apple headers that metal-cpp includes, and stubs that name the few symbols we use of Apple's
# libraries. Apple's SDK is not used, so what this proves is that everything compiles, links and has
# the form that macOS loads; nothing is run.
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_VERSION 23)
set(CMAKE_SYSTEM_PROCESSOR arm64)

if(NOT FORGE_ZIG_TOOLS)
  include(${CMAKE_CURRENT_LIST_DIR}/zig.cmake)
  forge_zig_compiler(zig_compiler zig_ar zig_ranlib -target aarch64-macos.14.0)
  set(FORGE_ZIG_TOOLS ${zig_compiler} ${zig_ar} ${zig_ranlib})
endif()
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES FORGE_ZIG_TOOLS)
list(GET FORGE_ZIG_TOOLS 0 CMAKE_CXX_COMPILER)
list(GET FORGE_ZIG_TOOLS 1 CMAKE_AR)
list(GET FORGE_ZIG_TOOLS 2 CMAKE_RANLIB)
# What CMake and pybind11 would run on the result; neither is for files of another system.
set(CMAKE_INSTALL_NAME_TOOL true)
set(CMAKE_STRIP true)
set(PYTHON_MODULE_EXTENSION .so)
set(CMAKE_USER_MAKE_RULES_OVERRIDE_CXX ${CMAKE_CURRENT_LIST_DIR}/aarch64-macos-rules.cmake)

cmake_path(GET CMAKE_CURRENT_LIST_DIR PARENT_PATH forge_root)
include_directories(SYSTEM ${forge_root}/tests/softmetal/include)
set(forge_stubs ${forge_root}/tests/macos/stubs)
set(CMAKE_SHARED_LINKER_FLAGS_INIT "-F${forge_stubs} -L${forge_stubs}")
set(CMAKE_MODULE_LINKER_FLAGS_INIT "-F${forge_stubs} -L${forge_stubs}")
set(CMAKE_EXE_LINKER_FLAGS_INIT "-F${forge_stubs} -L${forge_stubs}")

set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
