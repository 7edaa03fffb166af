// The fused family: the kernels of the headers below, one instantiation a head dim (a problem takes
// the next that fits, see fused_tiling). A dispatch is a box of tiles, heads and sequences, see
// shared/attn_grid.h.
#include <metal_stdlib>

#include "decode.h"
#include "fused_backward.h"
#include "fused_dkv.h"
#include "fused_dq.h"
#include "fused_forward.h"
#include "fused_scores.h"

// clang-format off
template [[host_name("attention_fused_fwd_hd32")]] [[kernel]] decltype(attention_fused_fwd<32>) attention_fused_fwd<32>;
template [[host_name("attention_fused_fwd_hd64")]] [[kernel]] decltype(attention_fused_fwd<64>) attention_fused_fwd<64>;
template [[host_name("attention_fused_fwd_hd80")]] [[kernel]] decltype(attention_fused_fwd<80>) attention_fused_fwd<80>;
template [[host_name("attention_fused_fwd_hd96")]] [[kernel]] decltype(attention_fused_fwd<96>) attention_fused_fwd<96>;
template [[host_name("attention_fused_fwd_hd128")]] [[kernel]] decltype(attention_fused_fwd<128>) attention_fused_fwd<128>;
template [[host_name("attention_fused_fwd_hd192")]] [[kernel]] decltype(attention_fused_fwd<192>) attention_fused_fwd<192>;
template [[host_name("attention_fused_fwd_hd256")]] [[kernel]] decltype(attention_fused_fwd<256>) attention_fused_fwd<256>;

template [[host_name("attention_fused_bwd_dq_hd32")]] [[kernel]] decltype(attention_fused_bwd_dq<32>) attention_fused_bwd_dq<32>;
template [[host_name("attention_fused_bwd_dq_hd64")]] [[kernel]] decltype(attention_fused_bwd_dq<64>) attention_fused_bwd_dq<64>;
template [[host_name("attention_fused_bwd_dq_hd80")]] [[kernel]] decltype(attention_fused_bwd_dq<80>) attention_fused_bwd_dq<80>;
template [[host_name("attention_fused_bwd_dq_hd96")]] [[kernel]] decltype(attention_fused_bwd_dq<96>) attention_fused_bwd_dq<96>;
template [[host_name("attention_fused_bwd_dq_hd128")]] [[kernel]] decltype(attention_fused_bwd_dq<128>) attention_fused_bwd_dq<128>;
template [[host_name("attention_fused_bwd_dq_hd192")]] [[kernel]] decltype(attention_fused_bwd_dq<192>) attention_fused_bwd_dq<192>;
template [[host_name("attention_fused_bwd_dq_hd256")]] [[kernel]] decltype(attention_fused_bwd_dq<256>) attention_fused_bwd_dq<256>;

template [[host_name("attention_fused_bwd_dkv_hd32")]] [[kernel]] decltype(attention_fused_bwd_dkv<32>) attention_fused_bwd_dkv<32>;
template [[host_name("attention_fused_bwd_dkv_hd64")]] [[kernel]] decltype(attention_fused_bwd_dkv<64>) attention_fused_bwd_dkv<64>;
template [[host_name("attention_fused_bwd_dkv_hd80")]] [[kernel]] decltype(attention_fused_bwd_dkv<80>) attention_fused_bwd_dkv<80>;
template [[host_name("attention_fused_bwd_dkv_hd96")]] [[kernel]] decltype(attention_fused_bwd_dkv<96>) attention_fused_bwd_dkv<96>;
template [[host_name("attention_fused_bwd_dkv_hd128")]] [[kernel]] decltype(attention_fused_bwd_dkv<128>) attention_fused_bwd_dkv<128>;
template [[host_name("attention_fused_bwd_dkv_hd192")]] [[kernel]] decltype(attention_fused_bwd_dkv<192>) attention_fused_bwd_dkv<192>;
template [[host_name("attention_fused_bwd_dkv_hd256")]] [[kernel]] decltype(attention_fused_bwd_dkv<256>) attention_fused_bwd_dkv<256>;

template [[host_name("attention_decode_hd32")]] [[kernel]] decltype(attention_decode<32>) attention_decode<32>;
template [[host_name("attention_decode_hd64")]] [[kernel]] decltype(attention_decode<64>) attention_decode<64>;
template [[host_name("attention_decode_hd80")]] [[kernel]] decltype(attention_decode<80>) attention_decode<80>;
template [[host_name("attention_decode_hd96")]] [[kernel]] decltype(attention_decode<96>) attention_decode<96>;
template [[host_name("attention_decode_hd128")]] [[kernel]] decltype(attention_decode<128>) attention_decode<128>;
template [[host_name("attention_decode_hd192")]] [[kernel]] decltype(attention_decode<192>) attention_decode<192>;
template [[host_name("attention_decode_hd256")]] [[kernel]] decltype(attention_decode<256>) attention_decode<256>;

template [[host_name("attention_fused_bwd_dbias_hd32")]] [[kernel]] decltype(attention_fused_bwd_dbias<32>) attention_fused_bwd_dbias<32>;
template [[host_name("attention_fused_bwd_dbias_hd64")]] [[kernel]] decltype(attention_fused_bwd_dbias<64>) attention_fused_bwd_dbias<64>;
template [[host_name("attention_fused_bwd_dbias_hd80")]] [[kernel]] decltype(attention_fused_bwd_dbias<80>) attention_fused_bwd_dbias<80>;
template [[host_name("attention_fused_bwd_dbias_hd96")]] [[kernel]] decltype(attention_fused_bwd_dbias<96>) attention_fused_bwd_dbias<96>;
template [[host_name("attention_fused_bwd_dbias_hd128")]] [[kernel]] decltype(attention_fused_bwd_dbias<128>) attention_fused_bwd_dbias<128>;
template [[host_name("attention_fused_bwd_dbias_hd192")]] [[kernel]] decltype(attention_fused_bwd_dbias<192>) attention_fused_bwd_dbias<192>;
template [[host_name("attention_fused_bwd_dbias_hd256")]] [[kernel]] decltype(attention_fused_bwd_dbias<256>) attention_fused_bwd_dbias<256>;
// clang-format on
