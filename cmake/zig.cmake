# Zig's clang, with its own C++ library, linked statically. It comes from the ziglang distribution:
# installed for the Python that builds, or fetched into the build folder.
include(${CMAKE_CURRENT_LIST_DIR}/fetch.cmake)

# Writes the wrappers that CMake can call, and sets `compiler`, `ar` and `ranlib` to their paths.
# Further arguments are put before the compiler's.
function(forge_zig_compiler compiler ar ranlib)
  set(folder ${CMAKE_BINARY_DIR}/zig)
  forge_installed_file(zig ziglang ziglang/zig)
  if(NOT zig)
    set(zig ${folder}/package/ziglang/zig)
    if(NOT EXISTS ${zig})
      message(STATUS "Fetching a clang: the ziglang wheel, 100 MB")
      forge_pip(failure install --no-deps --require-hashes --only-binary=:all:
        --target ${folder}/package -r ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/requirements-zig.txt)
      if(failure)
        message(FATAL_ERROR "This build needs clang, and the ziglang wheel that brings one cannot be "
          "had. Install clang++ 14 or later, or give one as -DCMAKE_CXX_COMPILER=...${failure}")
      endif()
    endif()
  endif()
  list(JOIN ARGN " " arguments)
  # Where no -O follows, zig would build its C++ library once more, for debugging.
  forge_zig_wrapper(${folder}/zig-c++ ${zig} "c++ -O2 ${arguments}")
  forge_zig_wrapper(${folder}/zig-ar ${zig} ar)
  forge_zig_wrapper(${folder}/zig-ranlib ${zig} ranlib)
  set(${compiler} ${folder}/zig-c++ PARENT_SCOPE)
  set(${ar} ${folder}/zig-ar PARENT_SCOPE)
  set(${ranlib} ${folder}/zig-ranlib PARENT_SCOPE)
endfunction()

# Without a folder of its own zig fills one in the user's home with what it builds.
function(forge_zig_wrapper path zig command)
  file(CONFIGURE OUTPUT ${path} @ONLY CONTENT [[#!/bin/sh
: "${ZIG_GLOBAL_CACHE_DIR:=@CMAKE_BINARY_DIR@/zig/cache}"
: "${ZIG_LOCAL_CACHE_DIR:=$ZIG_GLOBAL_CACHE_DIR}"
export ZIG_GLOBAL_CACHE_DIR ZIG_LOCAL_CACHE_DIR
exec "@zig@" @command@ "$@"
]])
  file(CHMOD ${path} PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE
    WORLD_READ WORLD_EXECUTE)
endfunction()
