// The few macros of the project: checks of our own promises, and a forced unroll for kernels.
#pragma once

namespace switchyard::internal {

// Throws Error(kInternal) with the source position, the condition and both values.
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition);
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition, long long left,
                              long long right);

}  // namespace switchyard::internal

// A promise of our own; always on. Broken by a bug, never by bad input (that throws Error with its
// own message).
#define SY_CHECK(condition)                                                                \
  do {                                                                                     \
    if (!(condition)) ::switchyard::internal::CheckFailed(__FILE__, __LINE__, #condition); \
  } while (false)

// SY_CHECK of two integers; the message has both values.
#define SY_CHECK_EQ(a, b)                                                   \
  do {                                                                      \
    const auto sy_a_ = (a);                                                 \
    const auto sy_b_ = (b);                                                 \
    if (!(sy_a_ == sy_b_))                                                  \
      ::switchyard::internal::CheckFailed(__FILE__, __LINE__, #a " == " #b, \
                                          static_cast<long long>(sy_a_),    \
                                          static_cast<long long>(sy_b_));   \
  } while (false)

// Guards inner loops; compiled in debug and sanitizer builds only.
#ifdef SY_ENABLE_DCHECK
#define SY_DCHECK(condition) SY_CHECK(condition)
#else
#define SY_DCHECK(condition)   \
  do {                         \
    (void)sizeof((condition)); \
  } while (false)
#endif

#define SY_PRAGMA_(text) _Pragma(#text)
// Unrolls the next loop completely (its count must be a constant): GCC 12 otherwise spills a
// register tile.
#if defined(__clang__)
#define SY_UNROLL SY_PRAGMA_(clang loop unroll(full))
#else
#define SY_UNROLL SY_PRAGMA_(GCC unroll 32)
#endif
