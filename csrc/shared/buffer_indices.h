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
  kBufferRounded = 13,  // o in q's type, where o itself is kept in float32
  kBufferBias = 14,
  kBufferMask = 15,
  kBufferSinks = 16,
  kBufferDbias = 17,
  kBufferDsinks = 18,
  kBufferRanges = 19,   // AttnRange, B of them, or B * Tq
  kBufferParams = 20,   // AttnParams
  kBufferSpan = 21,     // AttnSpan, of the materialized kernels
  kBufferPartial = 22,  // decode's unfinished rows, [B, H, Tq, splits, hd + 4]
  kBufferGrid = 23,     // AttnGrid, of the fused kernels
};

}  // namespace forge
