// Buckets on a device: flat memory that all peers reach. A bucket's gradients are copied there when it has all of them,
// reduced, and copied back at the end of backward; all of it on the lane's own stream, without the host waiting.
//
// A stream runs its operations in order, so all ranks must start buckets in the same order. Only the lane's stream
// touches flat memory, so a bucket of the next step can't overwrite one that is still in use.
//
// Gradients that are not reduced here (sparse ones, and all if there is a communication hook) have no flat memory: the
// code that reduces them takes them over on the current stream.
//
// Ownership: holds the memory and the lane; the gradients' memory must live until finish() returns. Thread-safety:
// none. Failure: as BucketLane.
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "reducer/buckets/bucket.h"
#include "reducer/buckets/bucket_lane.h"
#include "reducer/gradients/gradient.h"
#include "steps/bucket_plan.h"

namespace syncengine {

class FlatBuckets {
 public:
  explicit FlatBuckets(std::unique_ptr<BucketLane> lane) : lane_(std::move(lane)) {}

  // Lays out new buckets, with elements of the gradients' dtype, or of `type` if given, which is no wider. Collective,
  // unless the existing memory is enough, as it is for any buckets of the same parameters.
  void lay_out(const BucketPlan& plan, const std::vector<Gradient>& gradients, std::optional<at::ScalarType> type);
  // Drops the flat memory, and makes buckets without any, which are not reduced here.
  void lay_out_nothing(size_t buckets) {
    flats_.assign(buckets, {});
    memory_.reset();
  }
  size_t buckets() const { return flats_.size(); }  // 0 if there was no memory for them

  c10::Stream stream() const { return lane_->own(); }

  // Whether the current stream has changed since the last call; true the first time.
  bool current_changed() {
    const c10::Stream now = lane_->current();
    return std::exchange(seen_, now) != now;
  }

  // Whether operations that are queued now are captured into a CUDA graph.
  bool is_captured() const { return lane_->is_captured(); }

  // Called when a backward begins. Lets the lane end a dropped backward's operations; a device's stream orders them.
  void begin() {
    if (dropped_) lane_->finish();
    for (Flat& flat : flats_) flat.streams.clear();
  }
  // Notes that the calling thread's current stream has made a gradient of this bucket.
  void note(size_t bucket);
  // Copies a bucket's gradients into its flat memory, after the streams that have made them.
  void fill(const Bucket& bucket, const std::vector<Gradient>& gradients);
  // The part of flat memory for each gradient of the bucket, to be touched on stream() alone.
  const std::vector<at::Tensor>& views(size_t bucket) const { return flats_[bucket].views; }
  // The memory of the whole bucket.
  SpanList span(size_t bucket) const {
    return {flats_[bucket].bytes.mutable_data_ptr(), flats_[bucket].bytes.nbytes()};
  }
  void all_reduce(Operation operation);

  // The words for Nonfinite in a backward that begins (see BucketLane): no earlier operation uses them any more. Blocks
  // the first time, and after a backward that was dropped.
  Nonfinite words_for_nonfinite() {
    if (std::exchange(dropped_, false)) lane_->wait();
    if (!words_.words) words_ = lane_->words_for_nonfinite();
    return words_;
  }
  void wait() { lane_->wait(); }

  // Copies all reduced buckets back to the gradients' memory, before what the current stream gets from now on.
  void finish(const std::vector<Bucket>& buckets, const Filling& filling, const std::vector<Gradient>& gradients);
  // Called instead of finish() if the backward is given up, before the gradients' memory is freed.
  void drop(const std::vector<Bucket>& buckets, const Filling& filling, const std::vector<Gradient>& gradients);
  // Lets the current stream read and write the gradients' memory from now on, after all streams that have touched it.
  void take_over(const Bucket& bucket, const std::vector<Gradient>& gradients);
  // Keeps memory that the current stream reads from being given to others before that, whichever stream has made it.
  void keep(const at::Tensor& tensor);
  // Makes the current stream wait for the one that was current when averages were last written.
  void join() {
    if (written_on_) lane_->order(*written_on_, lane_->current());
  }

 private:
  struct Flat {
    at::Tensor bytes;
    std::vector<at::Tensor> views;     // of each gradient, in its parameter's layout
    std::vector<c10::Stream> streams;  // that have made gradients in this backward, or have taken them over
  };

  std::unique_ptr<BucketLane> lane_;
  at::Tensor memory_;  // of all buckets
  Nonfinite words_;
  bool dropped_ = false;  // a backward was dropped since the last words_for_nonfinite()
  std::vector<Flat> flats_;
  std::optional<c10::Stream> written_on_;  // see join()
  std::optional<c10::Stream> seen_;        // see current_changed()
};

}  // namespace syncengine
