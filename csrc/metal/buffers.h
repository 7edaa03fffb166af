// The arrays of one call as GPU buffers: wrapped where they lie, or staged in a copy where that
// cannot be.
#pragma once

#include <Metal/Metal.hpp>
#include <string>
#include <utility>
#include <vector>

#include "core/problem.h"
#include "shared/buffer_indices.h"

namespace forge::metal {

enum class Access {
  kRead,
  kWrite,         // every element is overwritten
  kAddToZero,     // zeroed first, then added to
  kAddToContent,  // added to
};

// One array of a call. `strides`, or `pair_strides` of an array over pairs or rows, are the
// kernel's own in AttnParams and are set to those of the buffer; both null for an array that is
// C-contiguous.
struct DeviceArray {
  BufferIndex slot;
  const char* name;
  Access access;
  Operand operand;
  AttnStrides* strides;
  AttnPairStrides* pair_strides;
};

// Whether four channels of a row can be read and written at once, `offset` being where the array is
// bound in its buffer, and the rows of a tile lie within 32 bits of each other.
bool rows_are_aligned(Int64 hd, const AttnStrides& strides, std::size_t offset, DType dtype);

// Of a [B, T, heads, hd] array without gaps.
AttnStrides compact_strides(Int64 T, Int64 heads, Int64 hd);

// Arrays on the same pages share a buffer, bound at different offsets.
class Buffers {
 public:
  // Arrays may be written in place only where a block of `owned` covers every page they touch.
  Buffers(MTL::Device& device, const std::vector<MemoryBlock>& owned);

  void add(const DeviceArray& array);
  // A buffer of its own for memory that lives as long as the call. Starts as a copy of `data`, or
  // undefined where that is null.
  void add_private(BufferIndex slot, const char* name, const void* data, std::size_t bytes);
  // When all arrays are added: wraps or stages them, sets their strides, and zeroes what is to be
  // zeroed. Throws forge::TooLarge above the device's buffer limit and where it has no memory left.
  void make();

  // After make(): of every array that has rows.
  bool are_aligned() const;

  void bind(MTL::ComputeCommandEncoder& encoder) const;
  // Staged outputs go back to their arrays, element by element: what lies between is not ours.
  void copy_back() const;
  // Name and "wrapped" or "copied: <reason>" of each array.
  std::vector<std::pair<std::string, std::string>> report() const;

 private:
  using BufferPtr = NS::SharedPtr<MTL::Buffer>;
  struct Placed {
    DeviceArray array;
    Int64 B = 1, T = 1, heads = 1, keys = 1, hd = 0;  // rows of hd elements
    AttnPairStrides given_strides{};
    MemoryBlock span{};   // the bytes from the lowest element to the end of the highest
    MemoryBlock pages{};  // the same, in whole pages
    BufferPtr buffer;
    std::size_t offset = 0;
    std::string copied;           // why; empty when wrapped
    char* device_data = nullptr;  // element [0, 0, 0, 0] in the buffer
    AttnPairStrides device_strides{};

    bool empty() const { return B == 0 || T == 0 || heads == 0 || keys == 0 || hd == 0; }
    char* data() const { return static_cast<char*>(array.operand.data); }
    Int64 element_bytes() const { return dtype_bytes(array.operand.dtype); }
    std::size_t row_bytes() const { return static_cast<std::size_t>(hd * element_bytes()); }
  };
  struct Private {
    BufferIndex slot;
    BufferPtr buffer;
  };

  template <typename Visit>
  static void for_each_row(const Placed& placed, const AttnPairStrides& strides, Visit&& visit);
  static AttnPairStrides compact(const Placed& placed);
  static AttnStrides heads_strides(const AttnPairStrides& strides);
  void place(Placed& placed) const;
  bool may_write(const Placed& placed) const;
  void wrap_together(const std::vector<Placed*>& group, const MemoryBlock& pages) const;
  void stage(Placed& placed, const std::string& reason) const;
  void mark(const Placed& placed) const;
  BufferPtr new_buffer(const char* name, std::size_t bytes) const;

  MTL::Device& device_;
  const std::vector<MemoryBlock>& owned_;
  std::size_t page_size_;
  std::vector<Placed> arrays_;
  std::vector<Private> private_;
};

}  // namespace forge::metal
