# Read after CMake's own rules for macOS. Zig's linker makes no bundles; Python loads a dylib as well.
set(CMAKE_SHARED_MODULE_CREATE_CXX_FLAGS -shared)
