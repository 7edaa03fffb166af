# Kernels are compiled once per instruction set, into a namespace of that name, and chosen at run time
# (csrc/core/cpu_target.h). Such a source must emit no symbol that another target emits as well: the
# linker would keep one, perhaps the one this machine cannot run.

# On macOS the system's processor is not what is built for when CMAKE_OSX_ARCHITECTURES says otherwise.
set(FORGE_CPU_ARCH ${CMAKE_SYSTEM_PROCESSOR})
if(APPLE AND CMAKE_OSX_ARCHITECTURES)
  set(FORGE_CPU_ARCH ${CMAKE_OSX_ARCHITECTURES})
endif()
if(FORGE_CPU_ARCH MATCHES ";")
  message(FATAL_ERROR "forge is built for one architecture at a time, got ${FORGE_CPU_ARCH}")
endif()
if(FORGE_CPU_ARCH MATCHES "^(x86_64|AMD64|amd64)$")
  set(FORGE_CPU_ARCH x86-64)
elseif(FORGE_CPU_ARCH MATCHES "^(aarch64|arm64|ARM64)$")
  set(FORGE_CPU_ARCH arm64)
endif()

set(FORGE_CPU_FLAGS_baseline)
set(FORGE_CPU_FLAGS_neon)
set(FORGE_CPU_FLAGS_avx2 -mavx2 -mfma -mf16c)
set(FORGE_CPU_FLAGS_avx512 -mavx512f -mavx512vl -mavx512bw -mavx512dq -mavx2 -mfma -mf16c)

# An object library `library` of the sources, compiled for the target `name`.
function(forge_compile_for_target library name)
  add_library(${library} OBJECT ${ARGN})
  target_include_directories(${library} PRIVATE ${PROJECT_SOURCE_DIR}/csrc)
  target_compile_definitions(${library} PRIVATE FORGE_TARGET=${name})
  target_compile_options(${library} PRIVATE ${FORGE_CPU_FLAGS_${name}})
  forge_strict_compile(${library})
endfunction()

# Adds the sources, compiled for the target `name`, to forge_core.
function(forge_add_cpu_target name)
  forge_compile_for_target(forge_kernels_${name} ${name} ${ARGN})
  target_sources(forge_core PRIVATE $<TARGET_OBJECTS:forge_kernels_${name}>)
endfunction()
