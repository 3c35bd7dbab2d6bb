// Whether frame pools make every frame its own allocation: where a sanitizer watches, so that it sees each
// use after release. Elsewhere frames are reused, which is much faster.
#pragma once

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define MILLRACE_SIM_STRICT_POOLS 1
#endif
#endif
#if defined(__SANITIZE_ADDRESS__)
#define MILLRACE_SIM_STRICT_POOLS 1
#endif

namespace millrace::sim {
#ifdef MILLRACE_SIM_STRICT_POOLS
inline constexpr bool kStrictPools = true;
#else
inline constexpr bool kStrictPools = false;
#endif
}  // namespace millrace::sim
