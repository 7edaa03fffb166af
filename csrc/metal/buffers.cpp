#include "metal/buffers.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <numeric>
#include <tuple>

#include "core/errors.h"

namespace forge::metal {

AttnStrides compact_strides(Int64 T, Int64 heads, Int64 hd) {
  return {T * heads * hd, heads * hd, hd, 0};
}

// Calls visit(bytes from element [0, 0, 0, 0] to (b, t, h, 0), bytes to it in a compact copy).
template <typename Visit>
void Buffers::for_each_row(const Placed& placed, const AttnPairStrides& strides, Visit&& visit) {
  Int64 compact = 0;
  for (Int64 b = 0; b < placed.B; ++b) {
    for (Int64 t = 0; t < placed.T; ++t) {
      for (Int64 h = 0; h < placed.heads; ++h) {
        for (Int64 j = 0; j < placed.keys; ++j, compact += placed.hd) {
          const Int64 at = pair_offset(strides, b, h, t, j) - strides.first;
          visit(at * placed.element_bytes(), compact * placed.element_bytes());
        }
      }
    }
  }
}

// Strides of the copy that for_each_row makes, 0 along axes of 1.
AttnPairStrides Buffers::compact(const Placed& placed) {
  const bool has_keys = placed.array.pair_strides != nullptr;
  const Int64 run = placed.keys * placed.hd;
  AttnPairStrides strides = {};
  strides.key = has_keys && run > 1 ? 1 : 0;
  if (placed.heads > 1) strides.head = run;
  if (placed.T > 1) strides.row = placed.heads * run;
  if (placed.B > 1) strides.batch = placed.T * placed.heads * run;
  return strides;
}

AttnStrides Buffers::heads_strides(const AttnPairStrides& strides) {
  return {strides.batch, strides.row, strides.head, strides.first};
}

Buffers::Buffers(MTL::Device& device, const std::vector<MemoryBlock>& owned)
    : device_(device), owned_(owned), page_size_(static_cast<std::size_t>(sysconf(_SC_PAGESIZE))) {}

void Buffers::add(const DeviceArray& array) {
  Placed placed;
  placed.array = array;
  const std::array<Int64, 4>& shape = array.operand.shape;
  if (array.strides != nullptr) {
    const AttnStrides strides = array.operand.heads_strides();
    placed.given_strides = {strides.batch, strides.head, strides.row, 0, 0};
    std::tie(placed.B, placed.T, placed.heads, placed.hd) =
        std::tie(shape[0], shape[1], shape[2], shape[3]);
  } else if (array.pair_strides != nullptr) {
    placed.given_strides = array.operand.pair_strides();
    std::tie(placed.B, placed.heads, placed.T) = std::tie(shape[0], shape[1], shape[2]);
    const Int64 keys = array.operand.ndim > 3 ? shape[3] : 1;
    const bool is_row = placed.given_strides.key == 1;  // its keys are neighbours
    placed.keys = is_row ? 1 : keys;
    placed.hd = is_row ? keys : 1;
  } else {
    placed.hd = std::accumulate(shape.begin(), shape.begin() + array.operand.ndim, Int64{1},
                                std::multiplies<>());
  }
  place(placed);
  arrays_.push_back(placed);
}

void Buffers::add_private(BufferIndex slot, const char* name, const void* data, std::size_t bytes) {
  const BufferPtr buffer = new_buffer(name, std::max<std::size_t>(1, bytes));
  if (data != nullptr) std::memcpy(buffer->contents(), data, bytes);
  private_.push_back({slot, buffer});
}

// Finds the bytes and the pages that an array touches.
void Buffers::place(Placed& placed) const {
  if (placed.empty()) return;
  Int64 lowest = 0;
  Int64 end = placed.hd;
  const AttnPairStrides& strides = placed.given_strides;
  for (const auto& [extent, stride] : {std::pair{placed.B, strides.batch},
                                       {placed.T, strides.row},
                                       {placed.heads, strides.head},
                                       {placed.keys, strides.key}}) {
    const Int64 reach = (extent - 1) * stride;
    (reach < 0 ? lowest : end) += reach;
  }
  placed.span = {placed.data() + lowest * placed.element_bytes(),
                 placed.data() + end * placed.element_bytes()};
  const auto page_of = [&](const char* at) {
    return at - reinterpret_cast<std::uintptr_t>(at) % page_size_;
  };
  placed.pages = {page_of(placed.span.begin), page_of(placed.span.end + page_size_ - 1)};
}

// A device that writes whole pages back must not meet another owner's writes on them.
bool Buffers::may_write(const Placed& placed) const {
  return std::any_of(owned_.begin(), owned_.end(), [&](const MemoryBlock& block) {
    return block.begin <= placed.pages.begin && placed.pages.end <= block.end;
  });
}

void Buffers::make() {
  std::vector<Placed*> wrapped;
  for (Placed& placed : arrays_) {
    if (placed.empty()) continue;
    if (placed.array.access == Access::kRead || may_write(placed)) {
      wrapped.push_back(&placed);
    } else {
      stage(placed, "other memory lies on its pages");
    }
  }
  std::sort(wrapped.begin(), wrapped.end(),
            [](const Placed* a, const Placed* b) { return a->pages.begin < b->pages.begin; });
  for (auto first = wrapped.begin(); first != wrapped.end();) {
    const char* end = (*first)->pages.end;
    auto last = first + 1;
    for (; last != wrapped.end() && (*last)->pages.begin < end; ++last) {
      end = std::max(end, (*last)->pages.end);
    }
    wrap_together({first, last}, {(*first)->pages.begin, end});
    first = last;
  }
  for (Placed& placed : arrays_) {
    if (placed.empty()) continue;
    const DeviceArray& array = placed.array;
    if (array.strides != nullptr) *array.strides = heads_strides(placed.device_strides);
    if (array.pair_strides != nullptr) *array.pair_strides = placed.device_strides;
    if (placed.array.access != Access::kAddToZero) continue;
    for_each_row(placed, placed.device_strides, [&](Int64 at, Int64) {
      std::memset(placed.device_data + at, 0, placed.row_bytes());
    });
  }
}

// One buffer for arrays that share pages.
void Buffers::wrap_together(const std::vector<Placed*>& group, const MemoryBlock& pages) const {
  const auto bytes = static_cast<std::size_t>(pages.end - pages.begin);
  // A few rows far apart lie within more than a buffer takes, and yet their copy is small.
  const bool too_long = bytes > device_.maxBufferLength();
  const auto buffer = NS::TransferPtr(
      too_long ? nullptr
               : device_.newBuffer(pages.begin, bytes, MTL::ResourceStorageModeShared, nullptr));
  for (Placed* placed : group) {
    if (!buffer) {
      stage(*placed, too_long ? "it lies within more bytes than a Metal buffer takes"
                              : "the Metal device does not wrap its pages");
      continue;
    }
    placed->buffer = buffer;
    placed->offset = static_cast<std::size_t>(placed->span.begin - pages.begin);
    placed->device_data = placed->data();
    placed->device_strides = placed->given_strides;
    placed->device_strides.first = (placed->data() - placed->span.begin) / placed->element_bytes();
    mark(*placed);
  }
}

void Buffers::stage(Placed& placed, const std::string& reason) const {
  const DeviceArray& array = placed.array;
  const auto rows = static_cast<std::size_t>(placed.B * placed.T * placed.heads * placed.keys);
  placed.buffer = new_buffer(array.name, rows * placed.row_bytes());
  placed.copied = reason;
  placed.device_data = static_cast<char*>(placed.buffer->contents());
  placed.device_strides = compact(placed);
  mark(placed);
  if (array.access != Access::kRead && array.access != Access::kAddToContent) return;
  for_each_row(placed, placed.given_strides, [&](Int64 at, Int64 compact) {
    std::memcpy(placed.device_data + compact, placed.data() + at, placed.row_bytes());
  });
}

// Names the exact bytes of the array in its buffer, for Metal's debugging tools.
void Buffers::mark(const Placed& placed) const {
  const auto bytes = placed.copied.empty()
                         ? static_cast<std::size_t>(placed.span.end - placed.span.begin)
                         : placed.buffer->length();
  placed.buffer->addDebugMarker(NS::String::string(placed.array.name, NS::UTF8StringEncoding),
                                NS::Range::Make(placed.offset, bytes));
}

Buffers::BufferPtr Buffers::new_buffer(const char* name, std::size_t bytes) const {
  if (bytes > device_.maxBufferLength()) {
    throw TooLarge(std::string(name) + " takes a buffer of " + std::to_string(bytes) +
                   " bytes, the Metal device takes up to " +
                   std::to_string(device_.maxBufferLength()));
  }
  auto buffer = NS::TransferPtr(device_.newBuffer(bytes, MTL::ResourceStorageModeShared));
  if (!buffer) {
    throw TooLarge("the Metal device has no memory for a buffer of " + std::to_string(bytes) +
                   " bytes for " + name);
  }
  return buffer;
}

bool rows_are_aligned(Int64 hd, const AttnStrides& strides, std::size_t offset, DType dtype) {
  constexpr Int64 kFour = 4;
  constexpr Int64 kMostRowStride = Int64(1) << 24;
  const Int64 odd = hd | strides.batch | strides.row | strides.head | strides.first;
  const auto four = static_cast<std::size_t>(kFour * dtype_bytes(dtype));
  return odd % kFour == 0 && offset % four == 0 && std::abs(strides.row) < kMostRowStride;
}

bool Buffers::are_aligned() const {
  return std::all_of(arrays_.begin(), arrays_.end(), [](const Placed& placed) {
    if (placed.array.strides == nullptr || placed.empty()) return true;
    return rows_are_aligned(placed.hd, heads_strides(placed.device_strides), placed.offset,
                            placed.array.operand.dtype);
  });
}

void Buffers::bind(MTL::ComputeCommandEncoder& encoder) const {
  for (const Private& own : private_) encoder.setBuffer(own.buffer.get(), 0, own.slot);
  for (const Placed& placed : arrays_) {
    // Nobody reads an array without elements, but its slot must hold something.
    const MTL::Buffer* buffer =
        placed.empty() ? private_.front().buffer.get() : placed.buffer.get();
    encoder.setBuffer(buffer, placed.offset, placed.array.slot);
  }
}

void Buffers::copy_back() const {
  for (const Placed& placed : arrays_) {
    if (placed.copied.empty() || placed.array.access == Access::kRead) continue;
    for_each_row(placed, placed.given_strides, [&](Int64 at, Int64 compact) {
      std::memcpy(placed.data() + at, placed.device_data + compact, placed.row_bytes());
    });
  }
}

std::vector<std::pair<std::string, std::string>> Buffers::report() const {
  std::vector<std::pair<std::string, std::string>> arrays;
  for (const Placed& placed : arrays_) {
    arrays.emplace_back(placed.array.name,
                        placed.copied.empty() ? "wrapped" : "copied: " + placed.copied);
  }
  return arrays;
}

}  // namespace forge::metal
