// Stand-in: opaque handles of libdispatch.
#pragma once

#if defined(__APPLE__) && __has_include_next(<dispatch/dispatch.h>)
#include_next <dispatch/dispatch.h>
#else

typedef struct dispatch_queue_s* dispatch_queue_t;
typedef struct dispatch_data_s* dispatch_data_t;

#endif
