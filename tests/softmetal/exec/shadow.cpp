#include "exec/shadow.h"

#include <algorithm>
#include <cstdlib>
#include <new>

namespace softmetal {

namespace {

struct Use {
  Binding* binding;
  bool stores;
};

std::vector<Use> uses_of_device_memory(const Kernel& kernel, Launch* table) {
  std::vector<Use> uses;
  for (int i = 0; i < kernel.argument_count; ++i) {
    const Argument& argument = kernel.arguments[i];
    if (argument.kind != ArgumentKind::kBuffer) continue;
    Binding* binding = &table->buffers[argument.index];
    if (binding->begin != binding->end) uses.push_back({binding, argument.stores});
  }
  std::sort(uses.begin(), uses.end(),
            [](const Use& a, const Use& b) { return a.binding->begin < b.binding->begin; });
  return uses;
}

}  // namespace

// Arguments that overlap, one through the other, share marks.
Shadows::Shadows(const Kernel& kernel, Launch* table) {
  const std::vector<Use> uses = uses_of_device_memory(kernel, table);
  for (auto first = uses.begin(); first != uses.end();) {
    const char *begin = first->binding->begin, *end = first->binding->end;
    bool stores = first->stores;
    auto last = first + 1;
    for (; last != uses.end() && last->binding->begin < end; ++last) {
      end = std::max(end, last->binding->end);
      stores = stores || last->stores;
    }
    if (stores) {
      // An address is even where its mark begins; zero pages that nobody touches cost nothing.
      begin -= reinterpret_cast<std::uintptr_t>(begin) % kBytesAMark;
      const std::size_t count = std::size_t(end - begin) / kBytesAMark + 1;
      auto* marks = static_cast<DeviceMarks*>(std::calloc(count, sizeof(DeviceMarks)));
      if (marks == nullptr) throw std::bad_alloc();
      shadows_.push_back(std::make_unique<DeviceShadow>(DeviceShadow{begin, marks}));
      for (auto each = first; each != last; ++each) each->binding->shadow = shadows_.back().get();
    }
    first = last;
  }
}

Shadows::~Shadows() {
  for (const auto& shadow : shadows_) std::free(shadow->marks);
}

}  // namespace softmetal
