// What the generated table says of each kernel and switch.
#pragma once

struct GpuArgument {
  int slot;       // of BufferIndex
  bool by_value;  // a struct, else a pointer to device memory
};

struct GpuKernel {
  const char* name;
  const void* function;
  unsigned threads;  // of a threadgroup; 0: the caller says
  int argument_count;
  GpuArgument arguments[16];
};

struct GpuConstant {
  const char* name;
  const void* symbol;
};
