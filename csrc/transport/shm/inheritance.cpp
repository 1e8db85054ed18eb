// What a forked child gets of an arena, made before the fork: what is written afterwards, by whomever, it does not see.
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>

#include "transport/shm/arena.h"

namespace syncengine::shm {

namespace {

Range common(Range a, Range b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

// The ranges' parts within `bounds`; those that overlap as one.
std::vector<Range> united_within(std::vector<Range> ranges, Range bounds) {
  std::sort(ranges.begin(), ranges.end(), [](Range a, Range b) { return a.begin < b.begin; });
  std::vector<Range> united;
  for (Range range : ranges) {
    range = common(range, bounds);
    if (range.begin >= range.end) continue;
    if (!united.empty() && range.begin <= united.back().end)
      united.back().end = std::max(united.back().end, range.end);
    else
      united.push_back(range);
  }
  return united;
}

}  // namespace

bool Arena::is_own_file() const {
  struct stat status{};
  return fstat(fd_.get(), &status) == 0 && status.st_ino == file_ && static_cast<size_t>(status.st_size) == bytes();
}

std::vector<Range> Arena::pages_in(Range range) const {
  return is_own_file() ? shm::pages_in(fd_.get(), range) : std::vector<Range>{range};
}

void Arena::copy_pages(PrivateCopy& copy, Range range, const std::vector<Range>& all) const {
  const bool own = is_own_file();
  for (Range pages : all) {
    const size_t offset = pages.begin - range.begin;
    if (!own || !copy.read(offset, fd_.get(), pages.begin, pages.bytes()))
      copy.fill(offset, at(pages.begin), pages.bytes());
  }
}

std::vector<Range> Arena::alive(size_t offset, const TensorMemory& memory) const {
  if (!memory.pool) return {{offset, offset + memory.bytes}};
  const Pool* pool = Pool::find(at(offset));
  if (!pool) return {};
  std::vector<Range> blocks = pool->alive();
  for (Range& block : blocks) block = {offset + block.begin, offset + block.end};
  return blocks;
}

size_t Arena::prepare_inheritance() {
  inheritance_.clear();
  if (forked_) return 0;  // a child's child inherits as usual
  size_t bytes = 0;
  for (const auto& [offset, memory] : tensors_) {
    const std::vector<Range> blocks = alive(offset, memory);
    size_t position = offset;
    // A pool becomes one piece, of which only blocks have memory: thousands of mappings would be too many.
    auto share = [&](size_t end) {
      const std::vector<Range> parts = united_within(blocks, {position, end});
      if (parts.empty()) return;
      inheritance_.push_back({.range = {parts.front().begin, parts.back().end}, .severed = false});
      for (Range part : parts) {
        for (Range pages : pages_in(part)) {
          inheritance_.back().pages.push_back(pages);
          bytes += pages.bytes();
        }
      }
    };
    for (Range severed : united_within(severed_, {offset, offset + memory.bytes})) {
      share(severed.begin);
      inheritance_.push_back({.range = severed, .severed = true});
      position = severed.end;
    }
    share(offset + memory.bytes);
  }
  return bytes;
}

void Arena::copy_inheritance() {
  for (auto& piece : inheritance_) {
    if (piece.severed) continue;
    piece.copy.emplace(piece.range.bytes());
    copy_pages(*piece.copy, piece.range, piece.pages);
  }
}

void Arena::become_forked() {
  if (forked_) return;
  forked_ = true;
  fd_.reset();  // or the child would keep the memory after its parent
  // Tensors stay readable and writable; control memory and staging become inaccessible.
  size_t position = 0;
  for (auto& piece : inheritance_) {
    make_inaccessible(at(position), piece.range.begin - position);
    if (!piece.severed && !(piece.copy && piece.copy->put(at(piece.range.begin))))
      make_inaccessible(at(piece.range.begin), piece.range.bytes());
    position = piece.range.end;
  }
  make_inaccessible(at(position), bytes() - position);
}

}  // namespace syncengine::shm
