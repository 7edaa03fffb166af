# Chooses the compiler of FORGE_METAL=software, before project(). metal-cpp needs blocks, which GCC
# does not parse, and two C++ libraries in one module do not mix, so one clang builds everything: the
# one that CXX names, or the system's, 14 or later; else zig's. CMAKE_CXX_COMPILER overrides.
# CXX may name a GCC without anybody having asked for it: scikit-build-core sets it from Python's.
function(forge_choose_clang)
  foreach(name $ENV{CXX} clang++)
    unset(path)
    find_program(path ${name} NO_CACHE)
    if(path)
      execute_process(COMMAND ${path} --version OUTPUT_VARIABLE text ERROR_QUIET)
      if(text MATCHES "clang version ([0-9]+)" AND CMAKE_MATCH_1 GREATER_EQUAL 14)
        set(CMAKE_CXX_COMPILER ${path} PARENT_SCOPE)
        return()
      endif()
    endif()
  endforeach()
  include(${CMAKE_CURRENT_FUNCTION_LIST_DIR}/zig.cmake)
  # Zig compiles for the machine it runs on unless told otherwise.
  forge_zig_compiler(compiler ar ranlib -mcpu=baseline)
  set(CMAKE_CXX_COMPILER ${compiler} PARENT_SCOPE)
  set(CMAKE_AR ${ar} PARENT_SCOPE)
  set(CMAKE_RANLIB ${ranlib} PARENT_SCOPE)
endfunction()

if(NOT CMAKE_CXX_COMPILER)
  forge_choose_clang()
endif()
# For the sake of link-time optimization zig would build its C++ library once more.
set(CMAKE_INTERPROCEDURAL_OPTIMIZATION OFF)
