// Stand-in: the two kernel types that metal-cpp names.
#pragma once

#if defined(__APPLE__) && __has_include_next(<mach/mach.h>)
#include_next <mach/mach.h>
#else

typedef int kern_return_t;
typedef unsigned int mach_port_t;
typedef mach_port_t task_id_token_t;

#endif
