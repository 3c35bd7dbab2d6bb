// The test program's operator new aborts while this is set: what must not allocate says so with it.
#pragma once

#include <atomic>

namespace millrace {

extern std::atomic<bool> allocation_forbidden;  // switch_pipeline_test.cc, with the operators

}  // namespace millrace
