// Named points of the protocol where a test build can kill, stop or delay this process. They do nothing in a normal
// build.
//
// SYNCENGINE_TEST_FAULT="<point>:<n>:<action>" acts when the point is passed for the n-th time (counted from 1); action
// is kill, segv, stop, exit or sleep<milliseconds>.
#pragma once

namespace syncengine {

#ifdef SYNCENGINE_TEST_HOOKS
void sync_point(const char* name);
#else
inline void sync_point(const char*) {}
#endif

constexpr bool has_test_hooks() {
#ifdef SYNCENGINE_TEST_HOOKS
  return true;
#else
  return false;
#endif
}

}  // namespace syncengine
