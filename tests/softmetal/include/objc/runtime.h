// Stand-in: the functions of the Objective-C runtime that metal-cpp calls.
#pragma once

#if defined(__APPLE__) && __has_include_next(<objc/runtime.h>)
#include_next <objc/runtime.h>
#else

#include <objc/objc.h>

#ifdef __cplusplus
extern "C" {
#endif

// metal-cpp keeps classes and protocols in void*.
void* objc_lookUpClass(const char* name);
void* objc_getClass(const char* name);
void* objc_getProtocol(const char* name);
SEL sel_registerName(const char* name);

#ifdef __cplusplus
}
#endif

#endif
