// A CUDA device in software: those functions of CUDA's runtime that csrc/cuda/device and its tests call, for tests on
// machines without a GPU. It is linked in the place of libcudart. Streams are threads, device memory is shared memory,
// kernels are compiled for the host (kernel_language.h). It shows that calls, arguments, orders and lifetimes are
// right. It is no model of a device's memory ordering, nor of a driver's limits.
//
// What a driver refuses is refused with the driver's error; what is undefined on a device ends the process, with a line
// that says what it was.
//
// Environment, read when asked:
//   CUDA_VISIBLE_DEVICES     as on devices: numbers of the machine's eight, "0" if not set; "" means none
//   SOFTWARE_CUDA_PEERS      between devices: allowed (default), refused; or granted, and between processes not true:
//   lying (reads
//                            find something else), read_only (writes do not arrive). Or unshared: no memory is exported
//   SOFTWARE_CUDA_DRIVER     the driver's version, 0 for none (default: that of the headers)
//   SOFTWARE_CUDA_JITTER_US  each step of a stream, and each block after a barrier, may be late by up to that
//
// Ownership: everything lives until the process ends. Thread-safety: any thread, as in CUDA.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace software {

// ---- errors.cpp ----

// Remembers what cudaGetLastError() gives back, once.
cudaError_t fail(cudaError_t status);
// For what is undefined on a device.
[[noreturn]] void undefined(const std::string& what);

// ---- devices.cpp ----

enum class Peers { Allowed, Refused, Lying, ReadOnly, Unshared };
Peers peers();
void dawdle();                       // for up to that
std::vector<int> visible_devices();  // by CUDA's number: the machine's number
int current_device();
// Whether kernels on `device` may use memory of `other`, in this process.
bool reaches(int device, int other);

// ---- memory.cpp ----

enum class Kind { Device, Imported, PinnedHost, PinnedDevice, Gone };
struct Range {
  std::byte* begin;
  size_t bytes;
  Kind kind;
  int device;
  bool portable = true;  // PinnedDevice: other devices reach it too
};
void add_range(const Range& range);
void forget(std::byte* begin);
// Makes it inaccessible, for good.
void retire(std::byte* begin);
// Where `address` lies; null if nobody knows it.
std::unique_ptr<Range> find(const void* address);
// Ends the process if `word`, of a kernel's arguments, is an address that `device` can't use.
void check_argument(uint64_t word, int device);

// One allocation of device memory: a header, guards and the memory, in an anonymous file that other processes can open.
struct Header {
  uint64_t nonce;
  uint64_t bytes;
  int device;  // the machine's number
  int opened;  // by other processes
};
struct Memory {
  int fd;
  int device;
  Header* header;
  std::byte* data;
  size_t mapped;
};
// Null if `address` is not the first byte of memory that cudaMalloc gave.
std::unique_ptr<Memory> memory_at(const void* address);
size_t mapped_bytes(size_t bytes);
std::byte* data_of(Header* header);

// ---- streams.cpp ----

using Step = std::function<void()>;
struct Stream;
// Null: no such stream. A null handle is the current device's default stream.
std::shared_ptr<Stream> stream_of(cudaStream_t handle);
int device_of(const Stream& stream);
// Queues, or records while the stream is captured. Gives back the number of steps that the stream has had then.
uint64_t enqueue(const std::shared_ptr<Stream>& stream, Step step);
void run_and_wait(const std::shared_ptr<Stream>& stream, Step step);
// All streams of the device, in this process.
void synchronize(int device);
// True where many calls are illegal: a stream is captured, and not in a mode that allows them to this thread. The
// capture is lost then.
bool spoils_capture();
// What a captured stream has by now; no capture if it is none.
struct Capture;
struct Captured {
  std::shared_ptr<Capture> capture;
  std::shared_ptr<Stream> stream;
  uint64_t steps = 0;
};
Captured captured(const std::shared_ptr<Stream>& stream);
// `stream` waits for that: it is captured too then. Or the error: of a wait across a capture's edge, above all.
cudaError_t join(const std::shared_ptr<Stream>& stream, const Captured& leader);

// ---- grid.cpp ----

// Calls `thread` for each thread of the grid; blocks run side by side, threads of a block take turns at barriers.
void run_grid(dim3 grid, dim3 block, const std::function<void()>& thread);

}  // namespace software
