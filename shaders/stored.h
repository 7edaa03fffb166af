// The elements of arrays in device memory on their way into registers and back: float, half or
// bfloat16, as function constants say. All that is computed is float. A bfloat16 is read and
// written as its bits: exactly, on every GPU, and without a type that older compilers lack.
#pragma once

#include <metal_stdlib>

#include "constants.h"
#include "shared/attn_params.h"

using namespace metal;  // uchar, ushort, float4 and so on may be found there only

namespace forge {

// Elements from one of them on. Which type they have is known when a pipeline is made.
struct Source {
  device const uchar* at;
  bool is_half;  // half or bfloat16: 16 bits, of which kind is_bfloat says
};

struct Target {
  device uchar* at;
  bool is_half;
};

METAL_FUNC Source source(device const uchar* at, bool is_half) {
  Source from = {at, is_half};
  return from;
}

METAL_FUNC Source source(device const float* at) {
  return source(reinterpret_cast<device const uchar*>(at), false);
}

// What has been written is read again.
METAL_FUNC Source source(Target written) { return source(written.at, written.is_half); }

METAL_FUNC Target target(device uchar* at, bool is_half) {
  Target to = {at, is_half};
  return to;
}

METAL_FUNC Target target(device float* at) {
  return target(reinterpret_cast<device uchar*>(at), false);
}

template <typename Index>
METAL_FUNC Source after(Source from, Index elements) {
  if (from.is_half) {
    from.at = reinterpret_cast<device const uchar*>(
        reinterpret_cast<device const ushort*>(from.at) + elements);
  } else {
    from.at = reinterpret_cast<device const uchar*>(reinterpret_cast<device const float*>(from.at) +
                                                    elements);
  }
  return from;
}

template <typename Index>
METAL_FUNC Target after(Target to, Index elements) {
  if (to.is_half) {
    to.at = reinterpret_cast<device uchar*>(reinterpret_cast<device ushort*>(to.at) + elements);
  } else {
    to.at = reinterpret_cast<device uchar*>(reinterpret_cast<device float*>(to.at) + elements);
  }
  return to;
}

// Exact.
METAL_FUNC float widened(ushort bits) {
  return is_bfloat ? as_type<float>(uint(bits) << 16) : float(as_type<half>(bits));
}

// To nearest, ties to even.
METAL_FUNC ushort rounded(float x) {
  if (!is_bfloat) return as_type<ushort>(half(x));
  uint bits = as_type<uint>(x);
  uint nearest = bits + 0x7fffu + ((bits >> 16) & 1u);
  bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  return ushort((is_nan ? bits | 0x400000u : nearest) >> 16);
}

METAL_FUNC float read_one(Source from) {
  if (from.is_half) return widened(*reinterpret_cast<device const ushort*>(from.at));
  return *reinterpret_cast<device const float*>(from.at);
}

METAL_FUNC void write_one(Target to, float x) {
  if (to.is_half) {
    *reinterpret_cast<device ushort*>(to.at) = rounded(x);
  } else {
    *reinterpret_cast<device float*>(to.at) = x;
  }
}

// Four neighbours at once, which are aligned to their size.
METAL_FUNC float4 read_four(Source from) {
  if (from.is_half) {
    ushort4 bits = *reinterpret_cast<device const ushort4*>(from.at);
    return float4(widened(bits.x), widened(bits.y), widened(bits.z), widened(bits.w));
  }
  return *reinterpret_cast<device const float4*>(from.at);
}

METAL_FUNC void write_four(Target to, float4 x) {
  if (to.is_half) {
    *reinterpret_cast<device ushort4*>(to.at) =
        ushort4(rounded(x.x), rounded(x.y), rounded(x.z), rounded(x.w));
  } else {
    *reinterpret_cast<device float4*>(to.at) = x;
  }
}

METAL_FUNC bool is_channel(Int32 c, Int32 hd) { return is_whole || c < hd; }

METAL_FUNC float load_one(Source row, Int32 c, Int32 hd) {
  bool inside = is_channel(c, hd);
  float x = read_one(after(row, inside ? c : 0));
  return inside ? x : 0.0f;
}

// Four channels of a row from c on, zeros from hd on. Not aligned: rows start at any element, and
// each of the four is read at a place inside the row.
METAL_FUNC float4 load_four(Source row, Int32 c, Int32 hd) {
  if (is_aligned) {
    bool inside = is_channel(c, hd);
    float4 x = read_four(after(row, inside ? c : 0));
    return float4(inside ? x.x : 0.0f, inside ? x.y : 0.0f, inside ? x.z : 0.0f,
                  inside ? x.w : 0.0f);
  }
  return float4(load_one(row, c, hd), load_one(row, c + 1, hd), load_one(row, c + 2, hd),
                load_one(row, c + 3, hd));
}

METAL_FUNC void store_one(Target row, Int32 c, Int32 hd, float x) {
  if (is_channel(c, hd)) write_one(after(row, c), x);
}

METAL_FUNC void store_four(Target row, Int32 c, Int32 hd, float4 x) {
  if (is_aligned) {
    if (is_channel(c, hd)) write_four(after(row, c), x);
    return;
  }
  store_one(row, c, hd, x.x);
  store_one(row, c + 1, hd, x.y);
  store_one(row, c + 2, hd, x.z);
  store_one(row, c + 3, hd, x.w);
}

// `count` channels, 4 or fewer; four of them are aligned as above.
METAL_FUNC float4 load_some(Source row, Int32 c, Int32 hd, Int32 count) {
  if (count == 4) return load_four(row, c, hd);
  return float4(load_one(row, c, hd), count == 2 ? load_one(row, c + 1, hd) : 0.0f, 0.0f, 0.0f);
}

METAL_FUNC void store_some(Target row, Int32 c, Int32 hd, Int32 count, float4 x) {
  if (count == 4) {
    store_four(row, c, hd, x);
    return;
  }
  store_one(row, c, hd, x.x);
  if (count == 2) store_one(row, c + 1, hd, x.y);
}

}  // namespace forge
