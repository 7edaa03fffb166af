# Apple's metal-cpp headers: METAL_CPP_DIR if given, else those that the mlx-metal distribution ships,
# as it is installed for the Python that builds, else its wheel from the package index.
include(${CMAKE_CURRENT_LIST_DIR}/fetch.cmake)

function(forge_find_metal_cpp)
  set(METAL_CPP_DIR "" CACHE PATH "The folder of Apple's metal-cpp headers, with Metal/Metal.hpp")
  if(METAL_CPP_DIR)
    if(NOT EXISTS ${METAL_CPP_DIR}/Metal/Metal.hpp)
      message(FATAL_ERROR "METAL_CPP_DIR must be a folder with Metal/Metal.hpp in it, got "
        "${METAL_CPP_DIR}")
    endif()
    return()
  endif()
  set(headers mlx/include/metal_cpp)
  forge_installed_file(umbrella mlx-metal ${headers}/Metal/Metal.hpp)
  if(NOT umbrella)
    set(folder ${PROJECT_BINARY_DIR}/metal-cpp)
    set(umbrella ${folder}/${headers}/Metal/Metal.hpp)
    if(NOT EXISTS ${umbrella})
      forge_pip(failure download --no-deps --require-hashes --only-binary=:all:
        --platform macosx_15_0_arm64 --dest ${folder}
        -r ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/requirements-metal-cpp.txt)
      if(failure)
        message(FATAL_ERROR "FORGE_METAL=${FORGE_METAL} needs Apple's metal-cpp headers, and the "
          "mlx-metal wheel that ships them cannot be had. Give their folder as "
          "-DMETAL_CPP_DIR=..., or install mlx-metal, or build with -DFORGE_METAL=OFF.${failure}")
      endif()
      file(GLOB wheel ${folder}/mlx_metal-*.whl)
      file(ARCHIVE_EXTRACT INPUT ${wheel} DESTINATION ${folder} PATTERNS ${headers}/*)
      file(REMOVE ${wheel})
    endif()
  endif()
  cmake_path(GET umbrella PARENT_PATH folder)
  cmake_path(GET folder PARENT_PATH folder)
  set(METAL_CPP_DIR ${folder} PARENT_SCOPE)
endfunction()
