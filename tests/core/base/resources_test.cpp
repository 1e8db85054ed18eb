// Cores and memory as cgroups limit them, in trees of files as the kernel shows them.
#include "base/resources.h"

#include <filesystem>
#include <fstream>
#include <map>

#include "test.h"

namespace syncengine {

namespace {

constexpr size_t kMiB = 1 << 20;

// A root folder with the given files, which goes with it.
class Machine {
 public:
  explicit Machine(const std::map<std::string, std::string>& files) {
    char folder[] = "/tmp/syncengine-machine-XXXXXX";
    CHECK(mkdtemp(folder) != nullptr);
    root_ = folder;
    write("/proc/meminfo", "MemTotal: 9999999 kB\nMemAvailable:    1048576 kB\nBuffers: 1 kB\n");
    for (const auto& [path, text] : files) write(path, text);
  }
  ~Machine() { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(root_ + path).parent_path());
    std::ofstream(root_ + path) << text;
  }
  const std::string& root() const { return root_; }
  size_t memory() const { return available_memory(root_) / kMiB; }

 private:
  std::string root_;
};

std::string mib(size_t count) { return std::to_string(count * kMiB) + "\n"; }

const std::string kV2Mount = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n";
const std::string kV1Mounts =
    "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "36 31 0:33 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

}  // namespace

TEST(without_cgroups_memory_is_the_machines) { CHECK_EQ(Machine({}).memory(), 1024U); }

TEST(file_pages_of_a_cgroup_are_available_and_shared_memory_is_not) {
  Machine machine(
      {{"/proc/self/mountinfo", kV2Mount},
       {"/proc/self/cgroup", "0::/job\n"},
       {"/sys/fs/cgroup/job/memory.max", mib(800)},
       {"/sys/fs/cgroup/job/memory.current", mib(700)},
       {"/sys/fs/cgroup/job/memory.stat", "anon 1\nfile " + mib(600) + "shmem " + mib(350) + "inactive_file " +
                                              mib(100) + "active_file " + mib(150) + "slab 7\n"}});
  CHECK_EQ(machine.memory(), 350U);
  machine.write("/sys/fs/cgroup/job/memory.max", "max\n");
  CHECK_EQ(machine.memory(), 1024U);
  machine.write("/sys/fs/cgroup/job/memory.max", mib(300));  // lowered: more is used than may be
  CHECK_EQ(machine.memory(), 0U);
}

TEST(every_cgroup_above_may_have_the_narrowest_limit) {
  const std::string top = "/sys/fs/cgroup";
  Machine machine({{"/proc/self/mountinfo", kV2Mount}, {"/proc/self/cgroup", "0::/slurm/job 7/step\n"}});
  size_t left = 500;
  for (const std::string folder : {"/slurm/job 7/step", "/slurm/job 7", "/slurm", ""}) {
    left -= 100;
    machine.write(top + folder + "/memory.max", mib(600));
    machine.write(top + folder + "/memory.current", mib(600 - left));
    CHECK_EQ(machine.memory(), left);
  }
  machine.write(top + "/slurm/other/memory.max", mib(1));
  machine.write(top + "/slurm/other/memory.current", mib(1));
  CHECK_EQ(machine.memory(), left);
}

TEST(a_container_that_sees_its_cgroup_as_the_top_finds_its_limit) {
  const std::string limit = "/sys/fs/cgroup/memory.max", used = "/sys/fs/cgroup/memory.current";
  // By a namespace, from outside of one, and by a mount of a part alone.
  for (const std::string path : {"/", "/../../elsewhere", "/docker/abc"}) {
    Machine machine({{"/proc/self/mountinfo", kV2Mount}, {"/proc/self/cgroup", "0::" + path + "\n"}});
    machine.write(limit, mib(64));
    machine.write(used, mib(14));
    CHECK_EQ(machine.memory(), 50U);
  }
  Machine machine({{"/proc/self/mountinfo", "31 23 0:28 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"},
                   {"/proc/self/cgroup", "0::/docker/abc/inner\n"},
                   {"/sys/fs/cgroup/inner/memory.max", mib(64)},
                   {"/sys/fs/cgroup/inner/memory.current", mib(14)}});
  CHECK_EQ(machine.memory(), 50U);
}

TEST(version_one_is_understood) {
  const std::string memory = "/sys/fs/cgroup/memory";
  Machine machine({{"/proc/self/mountinfo", kV1Mounts},
                   {"/proc/self/cgroup", "4:memory:/a/b\n3:cpu,cpuacct:/a\n0::/\n"},
                   {memory + "/a/b/memory.limit_in_bytes", "9223372036854771712\n"},
                   {memory + "/a/b/memory.usage_in_bytes", mib(90)},
                   {memory + "/a/memory.limit_in_bytes", mib(100)},
                   {memory + "/a/memory.usage_in_bytes", mib(95)},
                   {memory + "/a/memory.stat", "active_file 3\ntotal_inactive_file " + mib(20) + "total_active_file " +
                                                   mib(10) + "total_shmem " + mib(40)}});
  CHECK_EQ(machine.memory(), 35U);
}

TEST(cores_are_those_of_the_narrowest_quota) {
  Machine v2({{"/proc/self/mountinfo", kV2Mount},
              {"/proc/self/cgroup", "0::/pod/container\n"},
              {"/sys/fs/cgroup/pod/container/cpu.max", "max 100000\n"},
              {"/sys/fs/cgroup/pod/cpu.max", "150000 100000\n"}});
  CHECK_EQ(available_cores(v2.root()), 1);
  Machine v1({{"/proc/self/mountinfo", kV1Mounts},
              {"/proc/self/cgroup", "3:cpu,cpuacct:/a/b\n"},
              {"/sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_quota_us", "-1\n"},
              {"/sys/fs/cgroup/cpu,cpuacct/a/b/cpu.cfs_period_us", "100000\n"},
              {"/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us", "90000\n"},
              {"/sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us", "50000\n"}});
  CHECK_EQ(available_cores(v1.root()), 1);
  CHECK_EQ(available_cores(Machine({}).root()), available_cores("/nowhere"));
}

TEST(what_this_machine_says_is_sane) {
  CHECK(available_memory() > 0 && available_memory() <= total_memory());
  CHECK(available_cores() >= 1);
}

}  // namespace syncengine
