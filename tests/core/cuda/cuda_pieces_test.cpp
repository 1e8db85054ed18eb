// Every collective cut into pieces for many worlds and slots: each piece, done for itself, gives the whole one's bits.
#include "cuda/proxy.h"

#include "cuda_cases.h"
#include "test.h"

namespace syncengine {

namespace {

using testing::Case, testing::Tensors;

// A piece is a collective of its own on every rank's slot.
void run_piece(const Case& whole, std::vector<Tensors>& ranks, const std::vector<cuda::ProxyPiece>& pieces,
               size_t slot_bytes, std::mt19937& random) {
  const int world = static_cast<int>(ranks.size());
  Case part = whole;
  part.count = std::min(pieces[0].input_bytes, pieces[0].output_bytes) / element_size(whole.dtype);
  std::vector<std::vector<std::byte>> slots(world, std::vector<std::byte>(slot_bytes));
  std::vector<Tensors> before;
  for (int rank = 0; rank < world; ++rank) {
    for (auto& byte : slots[rank]) byte = static_cast<std::byte>(random());  // what an earlier piece has left
    const cuda::ProxyPiece& piece = pieces[rank];
    CHECK(piece.input + piece.input_bytes <= slot_bytes && piece.output + piece.output_bytes <= slot_bytes);
    for (const Copy& copy : piece.in) {
      CHECK(copy.slot >= piece.input && copy.slot + copy.bytes <= piece.input + piece.input_bytes);
      std::copy_n(ranks[rank].input.begin() + copy.user, copy.bytes, slots[rank].begin() + copy.slot);
    }
    Tensors& mine = before.emplace_back(part, rank, world);
    CHECK_EQ(mine.input.size(), piece.input_bytes);
    CHECK_EQ(mine.result().size(), piece.output_bytes);
    std::copy_n(slots[rank].begin() + piece.input, piece.input_bytes, mine.input.begin());
  }
  for (int rank = 0; rank < world; ++rank) {
    const cuda::ProxyPiece& piece = pieces[rank];
    const auto result = testing::expected(part, before, rank);
    std::copy(result.begin(), result.end(), slots[rank].begin() + piece.output);
    for (const Copy& copy : piece.out)
      std::copy_n(slots[rank].begin() + copy.slot, copy.bytes, ranks[rank].result().begin() + copy.user);
  }
}

void check(const Case& c, int world, size_t slot_bytes, int round) {
  std::vector<Tensors> ranks, before;
  std::vector<std::vector<cuda::ProxyPiece>> pieces;
  for (int rank = 0; rank < world; ++rank) {
    ranks.emplace_back(c, rank, world).fill(c.dtype, round);
    before.push_back(ranks.back());
  }
  for (int rank = 0; rank < world; ++rank)
    pieces.push_back(cuda::cut(testing::operation_of(c, ranks[rank]), rank, world, slot_bytes));
  std::mt19937 random(round);
  for (size_t i = 0; i < pieces[0].size(); ++i) {
    std::vector<cuda::ProxyPiece> piece;
    for (auto& mine : pieces) piece.push_back(mine.at(i));
    run_piece(c, ranks, piece, slot_bytes, random);
  }
  for (int rank = 0; rank < world; ++rank)
    if (ranks[rank].result() != testing::expected(c, before, rank))
      throw testing::Failure(std::string(name(c.collective)) + ", " + name(c.numerics) + ", " +
                             std::to_string(c.count) + " elements, slots of " + std::to_string(slot_bytes) + ", rank " +
                             std::to_string(rank) + " of " + std::to_string(world));
}

}  // namespace

TEST(pieces_have_the_bits_of_the_whole) {
  int round = 0;
  for (int world : {2, 3, 7})
    for (auto collective :
         {Collective::AllReduce, Collective::Broadcast, Collective::ReduceScatter, Collective::AllGather})
      for (Numerics numerics : {Numerics::RankOrder, Numerics::Ring})
        for (DType dtype : {DType::Float32, DType::BFloat16})
          for (size_t slot_bytes : {1024, 6000})
            for (size_t count : {0, 1, 37, 1000, 4099})
              check({collective, Path::Staged, numerics, dtype, count}, world, slot_bytes, ++round);
}

// Large slices: the ring's own cut changes with the size of the whole.
TEST(pieces_of_a_long_ring_are_rings) {
  constexpr size_t kSlot = 40 << 20;
  for (int world : {2, 5, 16})
    for (size_t bytes : {kSlot + 4, size_t{100'000'004}, size_t{1} << 30}) {
      Operation operation{.numerics = Numerics::Ring, .input = {nullptr, bytes}, .output = {nullptr, bytes}};
      size_t covered = 0;
      for (const cuda::ProxyPiece& piece : cuda::cut(operation, 0, world, kSlot)) {
        CHECK(piece.input_bytes <= kSlot);
        const RingCut whole = ring_cut(bytes, 4, world), part = ring_cut(piece.input_bytes, 4, world);
        for (const Copy& copy : piece.in) {
          CHECK_EQ(whole.chunk_of(copy.user), part.chunk_of(copy.slot));
          CHECK_EQ(whole.chunk_of(copy.user + copy.bytes - 4), part.chunk_of(copy.slot + copy.bytes - 4));
          covered += copy.bytes;
        }
      }
      CHECK_EQ(covered, bytes);
    }
}

TEST(a_barrier_is_one_empty_piece) {
  const auto pieces = cuda::cut({.collective = Collective::Barrier}, 0, 2, 1024);
  CHECK_EQ(pieces.size(), size_t{1});
  CHECK(pieces[0].input_bytes == 0 && pieces[0].output_bytes == 0);
}

}  // namespace syncengine
