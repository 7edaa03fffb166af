// Stand-in for the Objective-C runtime's basic types, as far as metal-cpp uses them.
#pragma once

#if defined(__APPLE__) && __has_include_next(<objc/objc.h>)
#include_next <objc/objc.h>
#else

#include <math.h>  // INFINITY, which Apple's headers bring along
#include <stddef.h>
#include <stdint.h>

// metal-cpp knows 64-bit ARM by Apple's name only.
#if defined(__aarch64__) && !defined(__arm64__)
#define __arm64__ 1
#endif

typedef struct objc_class* Class;
typedef struct objc_selector* SEL;

// Complete, since metal-cpp derives its classes from it.
struct objc_object {};

typedef struct objc_object* id;
typedef signed char BOOL;
typedef struct objc_object Protocol;

#endif
