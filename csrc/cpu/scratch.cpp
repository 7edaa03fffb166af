#include "cpu/scratch.h"

#include <atomic>
#include <cstdlib>
#include <new>

namespace forge::cpu {
namespace {

constexpr std::size_t kLine = 64;
constexpr std::size_t kKeptBytes = std::size_t{64} << 20;  // larger blocks go back to the system

}  // namespace

// Lies at the start of its own allocation, a cache line long.
struct Scratch::Block {
  std::size_t bytes;

  // One block is kept; calls that run at the same time allocate their own.
  static std::atomic<Block*>& kept() {
    static std::atomic<Block*> block{nullptr};
    return block;
  }
};

Scratch::Scratch(std::size_t bytes) : block_(Block::kept().exchange(nullptr)) {
  if (block_ != nullptr && block_->bytes >= bytes) return;
  std::free(block_);
  if (bytes > SIZE_MAX - 2 * kLine) throw std::bad_alloc();
  const std::size_t rounded = (bytes + kLine - 1) / kLine * kLine;
  void* memory = std::aligned_alloc(kLine, rounded + kLine);
  if (memory == nullptr) throw std::bad_alloc();
  block_ = new (memory) Block{rounded};
}

Scratch::~Scratch() {
  if (block_->bytes <= kKeptBytes) block_ = Block::kept().exchange(block_);
  std::free(block_);
}

char* Scratch::data() const { return reinterpret_cast<char*>(block_) + kLine; }

}  // namespace forge::cpu
