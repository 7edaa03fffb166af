# The shaders as one text, forge.metal. It is embedded in the module, to be compiled when the module
# runs, and compiled here to forge.metallib where Apple's compiler is to be had. All of it happens while
# configuring, so that the build knows whether there is a metallib; a changed shader configures again.
#
# Sets FORGE_FLAT_SHADERS, FORGE_SHADER_SOURCE (C++), and FORGE_METALLIB: the file, or empty.

set(FORGE_METAL_STD 3.1)
set(FORGE_MACOS_VERSION 14.0)
# Safe math: the materialized kernels promise the bits of the CPU's. The text says so too, and that
# nothing is contracted (attn_params.h): a flag that a compiler refuses would cost the metallib.
set(FORGE_METAL_FLAGS -std=metal${FORGE_METAL_STD} -mmacosx-version-min=${FORGE_MACOS_VERSION}
  -fno-fast-math -Wall -Wextra)

set(FORGE_FLAT_SHADERS ${PROJECT_BINARY_DIR}/shaders/forge.metal)
set(FORGE_SHADER_SOURCE ${PROJECT_BINARY_DIR}/shaders/shader_source.cpp)

function(forge_flatten_shaders)
  cmake_path(GET CMAKE_CURRENT_FUNCTION_LIST_DIR PARENT_PATH root)
  file(GLOB sources CONFIGURE_DEPENDS ${root}/shaders/* ${root}/csrc/shared/*)
  set(script ${root}/cmake/flatten_shaders.py)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${sources} ${script})
  execute_process(
    COMMAND ${Python_EXECUTABLE} ${script} --root ${root} --std ${FORGE_METAL_STD}
      --metal ${FORGE_FLAT_SHADERS} --cpp ${FORGE_SHADER_SOURCE}
    COMMAND_ERROR_IS_FATAL ANY)
endfunction()

# One step of Apple's compiler; `failure` says what went wrong, or is empty.
function(forge_run_metal failure)
  execute_process(COMMAND ${FORGE_XCRUN} -sdk macosx metal ${ARGN}
    RESULT_VARIABLE result OUTPUT_VARIABLE text ERROR_VARIABLE text)
  if(result EQUAL 0)
    set(${failure} "" PARENT_SCOPE)
  else()
    set(${failure} "${result}: ${text}" PARENT_SCOPE)
  endif()
endfunction()

# No Apple compiler, or one that refuses, is no error: the module brings the text.
function(forge_build_metallib)
  set(FORGE_METALLIB "" PARENT_SCOPE)
  find_program(FORGE_XCRUN xcrun DOC "Apple's xcrun, which runs the Metal compiler")
  set(air ${PROJECT_BINARY_DIR}/shaders/forge.air)
  set(metallib ${PROJECT_BINARY_DIR}/shaders/forge.metallib)
  file(REMOVE ${air} ${metallib})
  if(FORGE_XCRUN)
    forge_run_metal(failure ${FORGE_METAL_FLAGS} -c ${FORGE_FLAT_SHADERS} -o ${air})
    if(NOT failure)
      forge_run_metal(failure ${air} -o ${metallib})
    endif()
    if(NOT failure AND NOT EXISTS ${metallib})
      set(failure "it left no ${metallib}")
    endif()
  else()
    set(failure "there is no xcrun")
  endif()
  if(failure)
    string(STRIP "${failure}" failure)
    message(WARNING "The shaders are not compiled to a metallib; they will be compiled when forge "
      "first runs on the GPU. xcrun -sdk macosx metal: ${failure}")
    return()
  endif()
  message(STATUS "The shaders are compiled to ${metallib}")
  set(FORGE_METALLIB ${metallib} PARENT_SCOPE)
  install(FILES ${metallib} DESTINATION forge)
endfunction()
