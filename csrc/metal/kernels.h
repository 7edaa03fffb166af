// The kernels that a problem needs on the GPU: names, function constants, grids and costs.
#pragma once

#include <string>
#include <vector>

#include "metal/pipelines.h"
#include "shared/attn_params.h"

namespace forge::metal {

// A grid of `count` rows with a thread each, or of count * heads * batch threadgroups.
struct Kernel {
  std::string name;
  Switches switches;
  Int64 count;
  double fmas_each;               // at most
  Int32 threadgroup_threads = 0;  // 0: a thread each
  Int64 heads = 1;
  Int64 batch = 1;
};

namespace materialized {
Kernel fwd(const AttnParams& params);
Kernel bwd_d(const AttnParams& params, bool has_dlse);
Kernel bwd_dq(const AttnParams& params);
Kernel bwd_dkv(const AttnParams& params);
Kernel bwd_dbias(const AttnParams& params);
Kernel bwd_dsinks(const AttnParams& params, bool has_dlse);
}  // namespace materialized

// Of each head dim the instantiation that fits; grids of tiles of 32 rows.
namespace fused {
// Few queries against many keys: the keys are split, and attention_decode_combine follows.
bool is_decode(const AttnParams& params);
Int64 decode_partial_size(const AttnParams& params);  // floats
Kernel fwd(const AttnParams& params);
Kernel decode(const AttnParams& params);
Kernel decode_combine(const AttnParams& params);
Kernel bwd_d(const AttnParams& params, bool has_dlse);
Kernel bwd_dq(const AttnParams& params, bool accumulate);
Kernel bwd_dkv(const AttnParams& params, bool accumulate);
Kernel bwd_dbias(const AttnParams& params, bool accumulate);
Kernel bwd_dsinks(const AttnParams& params, bool accumulate);
}  // namespace fused

}  // namespace forge::metal
