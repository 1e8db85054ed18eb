#include "base/say.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>

#include "test.h"

namespace syncengine {
namespace {

// While it lives, stderr is a pipe, of which neither end blocks.
class NonblockingStderr {
 public:
  NonblockingStderr() {
    CHECK_EQ(pipe2(pipe_, O_NONBLOCK | O_CLOEXEC), 0);
    await_said();  // else lines of an earlier test may still take places
    dup2(pipe_[1], STDERR_FILENO);
  }
  ~NonblockingStderr() {
    dup2(saved_, STDERR_FILENO);
    for (int fd : {saved_, pipe_[0], pipe_[1]}) close(fd);
  }
  void fill() {
    char bytes[4096] = {};
    while (write(STDERR_FILENO, bytes, sizeof(bytes)) > 0) continue;
  }
  // Returns what was written, up to `last`, or less if nothing comes for ten seconds.
  std::string read_until(const std::string& last) {
    std::string text;
    char bytes[4096];
    pollfd readable{.fd = pipe_[0], .events = POLLIN, .revents = 0};
    while (!text.ends_with(last) && poll(&readable, 1, 10000) > 0)
      text.append(bytes, static_cast<size_t>(std::max<ssize_t>(read(pipe_[0], bytes, sizeof(bytes)), 0)));
    return text;
  }

 private:
  int saved_ = dup(STDERR_FILENO);
  int pipe_[2];
};

TEST(a_line_is_written_whole_though_stderr_takes_only_parts_of_it) {
  NonblockingStderr output;
  const std::string line = std::string(1 << 20, 'x') + "\n";  // sixteen times as long as a pipe
  say(line);
  CHECK(output.read_until("\n") == line);
}

TEST(lines_that_find_no_place_are_counted_in_a_last_line) {
  NonblockingStderr output;
  output.fill();
  for (int i = 0; i < 69; ++i) say("line " + std::to_string(i) + "\n");
  const std::string last = "line 63\nsyncengine: lines dropped here, since too many waited for stderr: 5\n";
  CHECK(output.read_until(last).ends_with(last));
}

}  // namespace
}  // namespace syncengine
