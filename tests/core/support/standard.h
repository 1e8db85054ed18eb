// The headers of the standard library that most files of the core and its tests include. They are compiled once a
// flavor, since they took a fifth of the compiler's time. The files of csrc include what they need by themselves,
// too, because the extension is built without this header.
#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>
