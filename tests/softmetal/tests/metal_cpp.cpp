// The one place where metal-cpp's own definitions are compiled for the tests.
#define NS_PRIVATE_IMPLEMENTATION
#define MTL_PRIVATE_IMPLEMENTATION
#include <fstream>
#include <sstream>

#include "gpu.h"

const std::string& checks_source() {
  static const std::string text = [] {
    std::ifstream file(CHECKS_METAL, std::ios::binary);
    std::stringstream all;
    all << file.rdbuf();
    return all.str();
  }();
  return text;
}
