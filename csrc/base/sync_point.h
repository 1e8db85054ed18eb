// Named points of the protocol where a test build can kill, stop or delay this process. Other builds do nothing there.
//
// SYNCENGINE_TEST_FAULT="<point>:<n>:<action>" acts when the point is passed for the n-th time (counted from 1); action
// is kill, segv, stop, exit or sleep<milliseconds>.
#pragma once

namespace syncengine {

#ifdef SYNCENGINE_TEST_HOOKS
void sync_point(const char* name);
constexpr bool has_test_hooks() { return true; }
#else
inline void sync_point(const char*) {}
constexpr bool has_test_hooks() { return false; }
#endif

}  // namespace syncengine
