// objc_msgSend: looks the method up and jumps to it with every argument register as it was. A
// message to nil answers 0.

#if defined(__x86_64__)

// rdi, rsi, rdx, rcx, r8, r9 and xmm0 to xmm7 may hold arguments, al the number of vector
// registers. With _stret, rdi is where the result goes, and self and the selector follow it.
#define SOFTMETAL_MESSAGE(name, self, selector) \
  asm(".text\n"                                 \
      ".globl " name                            \
      "\n"                                      \
      ".type " name ", @function\n" name        \
      ":\n"                                     \
      "  testq " self ", " self                 \
      "\n"                                      \
      "  jz 1f\n"                               \
      "  pushq %rbp\n"                          \
      "  movq %rsp, %rbp\n"                     \
      "  pushq %rdi\n"                          \
      "  pushq %rsi\n"                          \
      "  pushq %rdx\n"                          \
      "  pushq %rcx\n"                          \
      "  pushq %r8\n"                           \
      "  pushq %r9\n"                           \
      "  pushq %rax\n"                          \
      "  subq $136, %rsp\n"                     \
      "  movups %xmm0, (%rsp)\n"                \
      "  movups %xmm1, 16(%rsp)\n"              \
      "  movups %xmm2, 32(%rsp)\n"              \
      "  movups %xmm3, 48(%rsp)\n"              \
      "  movups %xmm4, 64(%rsp)\n"              \
      "  movups %xmm5, 80(%rsp)\n"              \
      "  movups %xmm6, 96(%rsp)\n"              \
      "  movups %xmm7, 112(%rsp)\n"             \
      "  movq " selector                        \
      ", %rax\n"                                \
      "  movq " self                            \
      ", %rdi\n"                                \
      "  movq %rax, %rsi\n"                     \
      "  call softmetal_find_method\n"          \
      "  movq %rax, %r11\n"                     \
      "  movups (%rsp), %xmm0\n"                \
      "  movups 16(%rsp), %xmm1\n"              \
      "  movups 32(%rsp), %xmm2\n"              \
      "  movups 48(%rsp), %xmm3\n"              \
      "  movups 64(%rsp), %xmm4\n"              \
      "  movups 80(%rsp), %xmm5\n"              \
      "  movups 96(%rsp), %xmm6\n"              \
      "  movups 112(%rsp), %xmm7\n"             \
      "  addq $136, %rsp\n"                     \
      "  popq %rax\n"                           \
      "  popq %r9\n"                            \
      "  popq %r8\n"                            \
      "  popq %rcx\n"                           \
      "  popq %rdx\n"                           \
      "  popq %rsi\n"                           \
      "  popq %rdi\n"                           \
      "  popq %rbp\n"                           \
      "  jmpq *%r11\n"                          \
      "1:\n"                                    \
      "  xorl %eax, %eax\n"                     \
      "  xorl %edx, %edx\n"                     \
      "  xorps %xmm0, %xmm0\n"                  \
      "  retq\n"                                \
      ".size " name ", .-" name "\n")

SOFTMETAL_MESSAGE("objc_msgSend", "%rdi", "%rsi");
SOFTMETAL_MESSAGE("objc_msgSend_fpret", "%rdi", "%rsi");
SOFTMETAL_MESSAGE("objc_msgSend_stret", "%rsi", "%rdx");

#elif defined(__aarch64__)

// x0 to x7 and q0 to q7 may hold arguments, x8 where a large result goes.
asm(R"(
.text
.globl objc_msgSend
.type objc_msgSend, %function
objc_msgSend:
  cbz x0, 1f
  stp x29, x30, [sp, #-224]!
  mov x29, sp
  stp x0, x1, [sp, #16]
  stp x2, x3, [sp, #32]
  stp x4, x5, [sp, #48]
  stp x6, x7, [sp, #64]
  str x8, [sp, #80]
  stp q0, q1, [sp, #96]
  stp q2, q3, [sp, #128]
  stp q4, q5, [sp, #160]
  stp q6, q7, [sp, #192]
  bl softmetal_find_method
  mov x16, x0
  ldp q0, q1, [sp, #96]
  ldp q2, q3, [sp, #128]
  ldp q4, q5, [sp, #160]
  ldp q6, q7, [sp, #192]
  ldr x8, [sp, #80]
  ldp x6, x7, [sp, #64]
  ldp x4, x5, [sp, #48]
  ldp x2, x3, [sp, #32]
  ldp x0, x1, [sp, #16]
  ldp x29, x30, [sp], #224
  br x16
1:
  mov x0, #0
  mov x1, #0
  fmov d0, xzr
  fmov d1, xzr
  ret
.size objc_msgSend, .-objc_msgSend
)");

#else
#error "the software Metal device runs on x86-64 and 64-bit ARM"
#endif
