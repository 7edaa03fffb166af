# Flags that every source of ours is compiled with. No fast-math, no -march=native: results must not
# depend on where forge was built. Contraction is off, so that fma stands where the source says fma.

function(forge_strict_compile target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wshadow -ffp-contract=off)
  if(FORGE_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
  if(FORGE_SANITIZE)
    target_compile_options(${target} PRIVATE -fsanitize=${FORGE_SANITIZE} -fno-omit-frame-pointer
      -fno-sanitize-recover=all)
    target_link_options(${target} PUBLIC -fsanitize=${FORGE_SANITIZE})
  endif()
endfunction()
