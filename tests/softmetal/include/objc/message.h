// Stand-in: the entry points of message sending. They are called through pointers of the method's
// own type; the declared one means nothing.
#pragma once

#if defined(__APPLE__) && __has_include_next(<objc/message.h>)
#include_next <objc/message.h>
#else

#include <objc/objc.h>

#ifdef __cplusplus
extern "C" {
#endif

void objc_msgSend(void);
void objc_msgSend_fpret(void);
void objc_msgSend_stret(void);

#ifdef __cplusplus
}
#endif

#endif
