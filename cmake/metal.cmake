# The Metal backend: where it is built, with which headers, and what it is linked to. FORGE_METAL is
#   ON        the Apple GPU; the default on macOS for arm64
#   OFF       no Metal; the default elsewhere
#   software  the same host code and shaders on the software Metal device of tests/softmetal
include(cmake/metal_cpp.cmake)
include(cmake/shaders.cmake)

if(APPLE AND FORGE_CPU_ARCH STREQUAL "arm64")
  set(FORGE_METAL ON CACHE STRING "The Metal backend: ON, OFF or software")
else()
  set(FORGE_METAL OFF CACHE STRING "The Metal backend: ON, OFF or software")
endif()
set_property(CACHE FORGE_METAL PROPERTY STRINGS ON OFF software)

set(FORGE_METALLIB "")
if(FORGE_METAL STREQUAL "software")
  set(FORGE_METAL_MODE software)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "FORGE_METAL=software needs clang, got ${CMAKE_CXX_COMPILER_ID}. Set "
      "no CMAKE_CXX_COMPILER in a new build folder, and one is found or fetched")
  endif()
elseif(NOT FORGE_METAL)
  set(FORGE_METAL OFF)
  set(FORGE_METAL_MODE off)
elseif(APPLE AND FORGE_CPU_ARCH STREQUAL "arm64")
  set(FORGE_METAL_MODE metal)
else()
  message(FATAL_ERROR "FORGE_METAL must be OFF or software here, got ${FORGE_METAL}: ON is for macOS "
    "on arm64")
endif()

if(FORGE_METAL)
  set(components Interpreter)
  if(FORGE_PYTHON)
    list(APPEND components Development.Module)  # pybind11 does not look again
  endif()
  find_package(Python REQUIRED COMPONENTS ${components})
  forge_find_metal_cpp()
  message(STATUS "metal-cpp: ${METAL_CPP_DIR}")
  forge_flatten_shaders()
  if(FORGE_METAL_MODE STREQUAL "metal")
    forge_build_metallib()
  endif()
endif()

# Adds the sources of the Metal backend to forge_core, and what they are linked to.
function(forge_add_metal)
  # A library of its own: only these sources see metal-cpp, and only they need blocks.
  add_library(forge_metal OBJECT ${ARGN} ${FORGE_SHADER_SOURCE})
  target_include_directories(forge_metal PRIVATE csrc)
  target_include_directories(forge_metal SYSTEM PRIVATE ${METAL_CPP_DIR})
  # Another module in the process may bring its own metal-cpp.
  target_compile_definitions(forge_metal PRIVATE METALCPP_SYMBOL_VISIBILITY_HIDDEN)
  # metal-cpp calls members of nil, as at the end of an empty SharedPtr: without the second flag the
  # compiler concludes that the pointer was never nil, and drops the checks for it.
  target_compile_options(forge_metal PRIVATE -fblocks -fno-delete-null-pointer-checks)
  forge_strict_compile(forge_metal)
  target_sources(forge_core PRIVATE $<TARGET_OBJECTS:forge_metal>)
  if(FORGE_METAL_MODE STREQUAL "software")
    add_subdirectory(tests/softmetal)
    target_link_libraries(forge_metal PRIVATE forge_softmetal)
    target_link_libraries(forge_core PUBLIC forge_softmetal)
  else()
    target_link_libraries(forge_core PUBLIC "-framework Metal" "-framework Foundation" objc)
  endif()
endfunction()
