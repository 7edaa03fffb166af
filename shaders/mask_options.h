// The options that shape the mask, for attn_band.
#pragma once

#include "shared/attn_mask.h"

namespace forge {

// What attn_band reads of the parameters, which are too large to be copied.
struct MaskOptions {
  Int64 Tk;
  Int64 window_left;
  Int64 window_right;
  Int32 causal;
};

METAL_FUNC MaskOptions mask_options(constant AttnParams& params) {
  MaskOptions options;
  options.Tk = params.Tk;
  options.window_left = params.window_left;
  options.window_right = params.window_right;
  options.causal = params.causal;
  return options;
}

}  // namespace forge
