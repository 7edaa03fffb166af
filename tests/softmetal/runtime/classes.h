// Every class that can be looked up or counted by name.
#pragma once

#include <vector>

namespace softmetal {

class ClassObject;

std::vector<ClassObject*> foundation_classes();
std::vector<ClassObject*> metal_classes();

}  // namespace softmetal
