# The C++ tests, and what they are made of beside their own file.
forge_add_test(test_attn_grid)
forge_add_test(test_attn_math ${FORGE_FLOAT_STRIDE})
forge_add_test(test_backward)
forge_add_test(test_backward_options)
forge_add_test(test_bias)
forge_add_test(test_company)
forge_add_test(test_cpu_count)
forge_add_test(test_forward)
forge_add_test(test_half)
forge_add_test(test_mask)
forge_add_test(test_options)
forge_add_test(test_params_layout)
forge_add_test(test_materialized)
forge_add_test(test_ranges)
forge_add_test(test_registry)
forge_add_test(test_simd_math ${FORGE_FLOAT_STRIDE})
forge_add_test(test_thread_pool ${fork})
forge_add_test(test_validate)
set_property(TEST test_backward test_backward_options test_company test_forward test_options
  PROPERTY ENVIRONMENT FORGE_TEST_CASE_STRIDE=${FORGE_CASE_STRIDE})

# Vector functions and packing are tested on every target, so their wrappers are compiled for every
# target.
foreach(target IN LISTS FORGE_FUSED_TARGETS)
  forge_compile_for_target(simd_kernels_${target} ${target} cpp/simd_kernels.cpp)
  foreach(test test_bias test_simd_math)
    target_sources(${test} PRIVATE $<TARGET_OBJECTS:simd_kernels_${target}>)
  endforeach()
endforeach()

# Answers of other projects, replayed in C++. Python only writes them to one flat file.
if(Python_EXECUTABLE)
  set(cases ${CMAKE_CURRENT_BINARY_DIR}/cases.bin)
  file(GLOB case_files CONFIGURE_DEPENDS python/cases/*)
  add_custom_command(OUTPUT ${cases}
    COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_SOURCE_DIR}/export_cases.py ${cases}
    DEPENDS export_cases.py ${case_files}
    COMMENT "Writing the cases of tests/python/cases to one file")
  add_custom_target(export_cases ALL DEPENDS ${cases})
  forge_add_test(test_cases ${cases})
endif()
