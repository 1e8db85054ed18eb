#include <ATen/core/grad_mode.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "base/error.h"
#include "base/memory.h"
#include "collectives/order.h"
#include "reducer/backward/route.h"
#include "reducer/torch/python_error.h"
#include "reducer/torch/tensors.h"

namespace syncengine {

namespace {

constexpr size_t kPartAlignment = 16;

// The offsets of the parts of one gradient in the bytes that its rank sends.
struct SentPlace {
  size_t indices, values, end;

  SentPlace(size_t begin, const at::Tensor& like, int64_t nonzeros) {
    int64_t row = 1;  // elements of one value
    for (int64_t i = like.sparse_dim(); i < like.dim(); ++i) row *= like.size(i);
    indices = begin;
    values = indices + round_up(like.sparse_dim() * nonzeros * sizeof(int64_t), kPartAlignment);
    end = values + round_up(row * nonzeros * like.element_size(), kPartAlignment);
  }
};

at::Tensor gather(const at::Tensor& own, Communicator& communicator, const std::string& what) {
  at::Tensor everyone = at::empty({communicator.size(), own.numel()}, own.options());
  Operation operation;
  operation.collective = Collective::AllGather;
  operation.dtype = own.scalar_type() == at::kLong ? DType::Int64 : DType::UInt8;
  operation.numerics = communicator.numerics();
  operation.input.add(own.mutable_data_ptr(), own.nbytes());
  operation.output.add(everyone.mutable_data_ptr(), everyone.nbytes());
  operation.describe = [what] { return what; };
  operation.keepalive = std::make_shared<std::vector<c10::Storage>>(std::vector{own.storage(), everyone.storage()});
  communicator.run(std::move(operation), raise_pending_signal);
  return everyone;
}

at::Tensor part(const at::Tensor& bytes, size_t begin, at::IntArrayRef sizes, at::ScalarType type) {
  at::Tensor result = at::empty(sizes, at::TensorOptions().dtype(type));
  std::memcpy(result.mutable_data_ptr(), static_cast<const std::byte*>(bytes.const_data_ptr()) + begin,
              result.nbytes());
  return result;
}

[[noreturn]] void throw_garbled() {
  throw Error(ErrorKind::PeerLost, std::string("a rank sent a sparse gradient that can't be") + kDamaged);
}

// The gradient that one rank has sent, of the shape of `like`. Throws PeerLost if an index lies outside of it.
at::Tensor unpack(const at::Tensor& bytes, const SentPlace& place, const at::Tensor& like, int64_t nonzeros) {
  std::vector<int64_t> shape{nonzeros};
  shape.insert(shape.end(), like.sizes().begin() + like.sparse_dim(), like.sizes().end());
  const at::Tensor indices = part(bytes, place.indices, {like.sparse_dim(), nonzeros}, at::kLong);
  const auto* index = indices.const_data_ptr<int64_t>();
  for (int64_t i = 0; i < like.sparse_dim(); ++i)
    for (const int64_t* end = index + nonzeros; index != end; ++index)
      if (*index < 0 || *index >= like.size(i)) throw_garbled();
  return at::_sparse_coo_tensor_unsafe(indices, part(bytes, place.values, shape, like.scalar_type()), like.sizes(),
                                       like.options());
}

}  // namespace

void average_sparse(const RouteParts& model, const BackwardBuckets& backward) {
  const BucketPlan& plan = *backward.plan;
  std::vector<at::Tensor> gradients;
  for (size_t i : plan.sparse()) {
    if (model.flat) model.flat->take_over(backward.buckets[plan.bucket_of(i)], model.gradients);
    gradients.push_back(model.gradients[i].memory());
  }
  at::NoGradGuard no_grad;
  Communicator& communicator = *model.averaging.communicator;
  const auto size = communicator.size();
  const std::string& name = plan.buckets()[0]->names->model;
  const auto& tree = backward.tree;
  const auto merges = tree ? cut_tree(tree->total, size).merges : std::vector<uint8_t>();
  // DDP's way: gradients are divided first.
  const bool ring = !tree && communicator.numerics() == Numerics::Ring;
  std::vector<at::Tensor> own;
  at::Tensor counts = at::empty({static_cast<int64_t>(gradients.size())}, at::kLong);
  for (size_t i = 0; i < gradients.size(); ++i) {
    own.push_back((ring ? gradients[i].div(backward.divisor) : gradients[i]).coalesce().cpu());
    counts.mutable_data_ptr<int64_t>()[i] = own.back()._nnz();
  }
  at::Tensor all_counts = gather(counts, communicator, "sizes of the sparse gradients of " + name);
  const auto* count_of = all_counts.const_data_ptr<int64_t>();

  std::vector<std::vector<SentPlace>> places(size);  // by rank, by gradient
  size_t longest = 0;
  for (int rank = 0; rank < size; ++rank) {
    size_t end = 0;
    for (size_t i = 0; i < own.size(); ++i) {
      const int64_t count = count_of[rank * own.size() + i];
      if (count < 0 || count > c10::multiply_integers(own[i].sizes().slice(0, own[i].sparse_dim()))) throw_garbled();
      end = places[rank].emplace_back(end, own[i], count).end;
    }
    longest = std::max(longest, end);
  }
  at::Tensor packed = at::empty({static_cast<int64_t>(longest)}, at::kByte);
  auto* bytes = static_cast<std::byte*>(packed.mutable_data_ptr());
  for (size_t i = 0; i < own.size(); ++i) {
    const SentPlace& place = places[communicator.rank()][i];
    at::Tensor indices = own[i]._indices().contiguous(),
               values = own[i]._values().resolve_conj().resolve_neg().contiguous();
    std::memcpy(bytes + place.indices, indices.const_data_ptr(), indices.nbytes());
    std::memcpy(bytes + place.values, values.const_data_ptr(), values.nbytes());
  }
  at::Tensor everyone = gather(packed, communicator, "the sparse gradients of " + name);

  for (size_t i = 0; i < own.size(); ++i) {
    const bool widen = !tree && is_narrow(own[i]);  // torch can't add these dtypes sparsely
    at::Tensor sum;
    std::vector<at::Tensor> waiting;  // sums that wait for their other halves
    auto of_rank = [&](int rank) {
      return unpack(everyone[rank], places[rank][i], own[i], count_of[rank * own.size() + i]);
    };
    for (int rank = 0; rank < size; ++rank) {
      at::Tensor next = of_rank(rank);
      if (widen) next = next.to(at::kFloat);
      if (tree) {
        if (sum.defined()) waiting.push_back(sum);
        sum = next.coalesce();
        for (int merge = 0; merge < merges[rank]; ++merge) {
          sum = add_sparse(waiting.back(), sum);
          waiting.pop_back();
        }
      } else {
        sum = sum.defined() ? sum.add_(next) : next;
      }
    }
    sum = sum.coalesce();
    if (backward.watch && !all_finite(sum)) {
      bool brought = false;
      for (int rank = 0; rank < size; ++rank) brought |= !backward.watch->look(plan.sparse()[i], of_rank(rank), rank);
      if (!brought) backward.watch->look(plan.sparse()[i], sum, size);
    }
    if (!ring) scale(elements_of(sum), 1.0 / backward.divisor);
    gradients[i].copy_(sum);
  }
  model.record.statistics.reduced_bytes += places[communicator.rank()].back().end;
}

}  // namespace syncengine
