// Stand-in: an opaque handle.
#pragma once

#if defined(__APPLE__) && __has_include_next(<IOSurface/IOSurfaceRef.h>)
#include_next <IOSurface/IOSurfaceRef.h>
#else

typedef struct __IOSurface* IOSurfaceRef;

#endif
