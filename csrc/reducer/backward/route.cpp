#include "reducer/backward/route.h"

#include <string>

#include "base/trace.h"

namespace syncengine {

void Route::trace_bucket(const Bucket& bucket, const Work::Place& place) const {
  if (bucket.since == 0 || !trace::is_on()) return;
  const BucketLayout& layout = *bucket.layout;
  size_t bytes = 0;
  std::string text = layout.names->model + "\n" + std::to_string(layout.index);
  for (size_t i : layout.parameters) {
    bytes += model_.gradients[i].parameter().nbytes();
    text += "\n" + layout.names->parameters[i];
  }
  trace::record({.kind = trace::Kind::Bucket,
                 .begin = bucket.since,
                 .end = trace::now(),
                 .group = model_.averaging.communicator->trace_id(),
                 .lane = static_cast<uint16_t>(place.lane),
                 .place = place.number,
                 .epoch = place.epoch,
                 .detail = bytes,
                 .text = trace::text(text)});
}

}  // namespace syncengine
