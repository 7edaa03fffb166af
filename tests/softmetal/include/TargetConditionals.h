// Stand-in: we are compiled for, or play, macOS.
#pragma once

#if defined(__APPLE__) && __has_include_next(<TargetConditionals.h>)
#include_next <TargetConditionals.h>
#else

#ifndef TARGET_OS_MAC
#define TARGET_OS_MAC 1
#endif
#ifndef TARGET_OS_OSX
#define TARGET_OS_OSX 1
#endif
// From Availability.h: the oldest macOS that forge runs on.
#ifndef __MAC_OS_X_VERSION_MIN_REQUIRED
#define __MAC_OS_X_VERSION_MIN_REQUIRED 140000
#endif
#ifndef TARGET_OS_IPHONE
#define TARGET_OS_IPHONE 0
#endif
#ifndef TARGET_OS_IOS
#define TARGET_OS_IOS 0
#endif
#ifndef TARGET_OS_SIMULATOR
#define TARGET_OS_SIMULATOR 0
#endif

#endif
