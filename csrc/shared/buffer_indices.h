// Which argument-table slot of a shader holds what: read by the host code that binds and by the
// shaders, for every kernel alike.
#pragma once

namespace forge {

enum BufferIndex {
  kBufferQ = 0,
  kBufferK = 1,
  kBufferV = 2,
  kBufferO = 3,
  kBufferP = 4,
  kBufferRowMax = 5,
  kBufferRowSum = 6,
  kBufferDout = 7,
  kBufferDlse = 8,
  kBufferDRow = 9,
  kBufferDq = 10,
  kBufferDk = 11,
  kBufferDv = 12,
  kBufferRanges = 13,   // AttnRange, B of them
  kBufferParams = 14,   // AttnParams
  kBufferSpan = 15,     // AttnSpan, of the materialized kernels
  kBufferPartial = 16,  // decode's unfinished rows, [B, H, Tq, splits, hd + 4]
  kBufferGrid = 17,     // AttnGrid, of the fused kernels
};

}  // namespace forge
