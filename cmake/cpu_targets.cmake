# Kernels are compiled once per instruction set, into a namespace of that name, and chosen at run time
# (csrc/core/cpu_target.h). Such a source must emit no symbol that another target emits as well: the
# linker would keep one, perhaps the one this machine cannot run.

if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(FORGE_X86 ON)
endif()

set(FORGE_CPU_FLAGS_baseline)
set(FORGE_CPU_FLAGS_neon)
set(FORGE_CPU_FLAGS_avx2 -mavx2 -mfma)
set(FORGE_CPU_FLAGS_avx512 -mavx512f -mavx512vl -mavx512bw -mavx512dq -mavx2 -mfma)

# Adds `sources`, compiled for the target `name`, to forge_core.
function(forge_add_cpu_target name)
  set(library forge_kernels_${name})
  add_library(${library} OBJECT ${ARGN})
  target_include_directories(${library} PRIVATE csrc)
  target_compile_definitions(${library} PRIVATE FORGE_TARGET=${name})
  target_compile_options(${library} PRIVATE ${FORGE_CPU_FLAGS_${name}})
  forge_strict_compile(${library})
  target_sources(forge_core PRIVATE $<TARGET_OBJECTS:${library}>)
endfunction()
