// Since torch 2.10 a tensor's Python wrapper counts as one of its holders, since 2.13 a node's as well, also when
// Python itself has let go of it.
#pragma once

namespace syncengine {

// Whether `object` has such a wrapper: one that nothing in Python holds.
template <class Object>
bool python_let_go(const Object& object) {
  if constexpr (requires { object.pyobj_slot()->has_unique_reference(); }) {
    return object.pyobj_slot()->has_unique_reference();
  }
  return false;
}

}  // namespace syncengine
