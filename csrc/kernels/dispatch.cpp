// Chooses the instruction set at run time and fixes the floating-point state around each call.
#include <sys/auxv.h>

#include <algorithm>
#include <cassert>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/processor.h"
#include "kernels/fp_state.h"
#include "kernels/isa.h"
#include "kernels/reduce.h"

namespace syncengine::kernels {
namespace {

constexpr Isa kBestFirst[] = {Isa::Avx512, Isa::Avx2, Isa::NeonBf16, Isa::Neon, Isa::Scalar};

// The kernels of an instruction set, which must be available.
ReduceFunction reduce_function(Isa isa) {
  switch (isa) {
#if SYNCENGINE_X86_64
    case Isa::Avx2: return kReduceAvx2;
    case Isa::Avx512: return kReduceAvx512;
#elif SYNCENGINE_AARCH64
    case Isa::Neon: return kReduceNeon;
    case Isa::NeonBf16: return kReduceNeonBf16;
#endif
    default: return kReduceScalar;
  }
}

}  // namespace

const char* name(Isa isa) {
  switch (isa) {
    case Isa::Scalar: return "scalar";
    case Isa::Avx2: return "avx2";
    case Isa::Avx512: return "avx512";
    case Isa::Neon: return "neon";
    case Isa::NeonBf16: return "neon-bf16";
  }
  return "unknown";
}

bool is_available(Isa isa) {
  switch (isa) {
    case Isa::Scalar: return true;
#if SYNCENGINE_X86_64
    case Isa::Avx2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
    case Isa::Avx512:
      return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#elif SYNCENGINE_AARCH64
    case Isa::Neon: return true;
    case Isa::NeonBf16: return (getauxval(AT_HWCAP2) & (1 << 14)) != 0;  // HWCAP2_BF16
#endif
    default: return false;
  }
}

Isa best_isa() { return *std::ranges::find_if(kBestFirst, is_available); }

Isa choose_isa(const char* wanted) {
  if (wanted == nullptr || *wanted == '\0') return best_isa();
  std::string available;
  for (Isa isa : kBestFirst) {
    if (!is_available(isa)) continue;
    if (std::strcmp(wanted, name(isa)) == 0) return isa;
    available += std::string(available.empty() ? "" : ", ") + name(isa);
  }
  throw Error(ErrorKind::InvalidUsage, "SYNCENGINE_ISA=" + std::string(wanted) +
                                           ": this build on this processor has only " + available +
                                           "; unset it to take the best of them");
}

Isa active_isa() {
  static const Isa isa = choose_isa(std::getenv("SYNCENGINE_ISA"));
  return isa;
}

size_t reduce(const Reduction& reduction, const void* const* sources, int source_count, void* const* destinations,
              int destination_count, size_t count, Isa isa) {
  assert(is_available(isa) && is_supported(reduction.dtype, reduction.op) && source_count >= 1);
  assert(reduction.scale == 1.0 || is_floating(reduction.dtype));
  assert(!reduction.stops_at_nonfinite ||
         (is_floating(reduction.dtype) && (reduction.op == ReduceOp::Sum || reduction.op == ReduceOp::Avg)));
  const DefaultFpState state;
  return reduce_function(isa)(reduction, {sources, source_count, destinations, destination_count, count,
                                          reduction.scale, reduction.stops_at_nonfinite, reduction.merges});
}

void copy_scaled(DType dtype, void* destination, const void* source, size_t count, double scale, Isa isa) {
  if (scale != 1.0) {
    const Reduction reduction{.dtype = dtype, .op = ReduceOp::Sum, .scale = scale};
    reduce(reduction, &source, 1, &destination, 1, count, isa);
  } else if (destination != source && count > 0) {
    std::memcpy(destination, source, count * element_size(dtype));
  }
}

}  // namespace syncengine::kernels
