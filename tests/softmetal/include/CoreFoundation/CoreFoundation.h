// Stand-in: what metal-cpp uses of CoreFoundation.
#pragma once

#if defined(__APPLE__) && __has_include_next(<CoreFoundation/CoreFoundation.h>)
#include_next <CoreFoundation/CoreFoundation.h>
#else

#include <stddef.h>
#include <stdint.h>

typedef double CFTimeInterval;
typedef const struct __CFString* CFStringRef;

#ifdef __cplusplus
extern "C"
#endif
    CFStringRef __CFStringMakeConstantString(const char* text);

#endif
