// Buckets on a device: flat memory that all peers reach. A bucket's gradients are copied there when it has all of them, reduced,
// and copied back at backward's end; all of that on the lane's own stream, and the host waits for nothing.
//
// Streams can't overtake, so buckets are to be started in one order on all ranks. Flat memory is touched by the lane's stream
// alone, so one bucket of the next step can't run into this one's.
//
// Ownership: holds the memory and the lane; the gradients' memory must live until finish() returns. Thread-safety: none.
// Failure: as BucketLane; lay_out() throws Error(InvalidUsage) for gradients that can't lie there.
#pragma once

#include <memory>
#include <vector>

#include "reducer/bucket.h"
#include "reducer/bucket_lane.h"
#include "reducer/gradient.h"

namespace syncengine {

class FlatBuckets {
 public:
  explicit FlatBuckets(std::unique_ptr<BucketLane> lane) : lane_(std::move(lane)) {}

  // New buckets. Takes memory only if there is not enough of it yet. Collective.
  void lay_out(const std::vector<Bucket>& buckets, const std::vector<Gradient>& gradients);

  c10::Stream current() const { return lane_->current(); }
  c10::Stream stream() const { return lane_->own(); }

  // A backward begins.
  void begin();
  // The calling thread's current stream has made a gradient of this bucket.
  void note(size_t bucket);
  // Copies the gradients' memory in, behind the streams that have made them.
  void fill(const Bucket& bucket, const std::vector<Gradient>& gradients);
  // Where each gradient of the bucket lies now: to be touched on stream() alone.
  const std::vector<at::Tensor>& views(size_t bucket) const { return flats_[bucket].views; }
  // Of the bucket, as one piece.
  SpanList span(size_t bucket) const;
  void all_reduce(Operation operation);

  // All that were reduced are copied back to the gradients' memory, before what the current stream gets from now on.
  void finish(const std::vector<Bucket>& buckets, const std::vector<Gradient>& gradients);
  // The current stream waits for what finish() has queued on behalf of another one.
  void join() { lane_->order(lane_->own(), lane_->current()); }

 private:
  struct Flat {
    at::Tensor bytes;
    std::vector<at::Tensor> views;     // of each gradient, in its parameter's layout
    std::vector<c10::Stream> streams;  // that have made gradients in this backward
  };

  std::unique_ptr<BucketLane> lane_;
  at::Tensor memory_;  // of all buckets
  std::vector<Flat> flats_;
};

}  // namespace syncengine
