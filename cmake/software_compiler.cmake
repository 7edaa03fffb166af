# Chooses the compiler of FORGE_METAL=software, before project(). metal-cpp needs blocks, which GCC
# does not parse, and two C++ libraries in one module do not mix, so one clang builds everything:
# the system's, 14 or later, else zig's. A compiler that was asked for stays.
if(NOT CMAKE_CXX_COMPILER AND NOT DEFINED ENV{CXX})
  find_program(FORGE_CLANG NAMES clang++ DOC "A clang++ for FORGE_METAL=software")
  if(FORGE_CLANG)
    execute_process(COMMAND ${FORGE_CLANG} -dumpversion OUTPUT_VARIABLE version ERROR_QUIET)
    string(STRIP "${version}" version)
  endif()
  if(FORGE_CLANG AND version VERSION_GREATER_EQUAL 14)
    set(CMAKE_CXX_COMPILER ${FORGE_CLANG})
  else()
    include(${CMAKE_CURRENT_LIST_DIR}/zig.cmake)
    # Zig compiles for the machine it runs on unless told otherwise.
    forge_zig_compiler(CMAKE_CXX_COMPILER CMAKE_AR CMAKE_RANLIB -mcpu=baseline)
  endif()
endif()
