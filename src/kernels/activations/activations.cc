#include "kernels/activations/activations.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/activations/activations.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/activations/all-inl.h"
#include "kernels/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

template <class Op, class T>
HWY_INLINE void Activate(const float* HWY_RESTRICT gate, const float* HWY_RESTRICT up, size_t n,
                         T* HWY_RESTRICT out) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  const Op op;
  size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    StoreF32(op(df, hn::LoadU(df, gate + i), hn::LoadU(df, up + i)), df, out + i);
  if (i < n)
    StoreF32N(op(df, hn::LoadN(df, gate + i, n - i), hn::LoadN(df, up + i, n - i)), df, out + i,
              n - i);
}

#define SY_ACTIVATION(name)                                                   \
  void name##_f32(const float* gate, const float* up, size_t n, float* out) { \
    Activate<name>(gate, up, n, out);                                         \
  }                                                                           \
  void name##_bf16(const float* gate, const float* up, size_t n, BF16* out) { \
    Activate<name>(gate, up, n, reinterpret_cast<hwy::bfloat16_t*>(out));     \
  }
#include "kernels/activations/activations.def"
#undef SY_ACTIVATION

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace switchyard::kernels {
namespace {

#define SY_ACTIVATION(name)                                                                       \
  HWY_EXPORT(name##_f32);                                                                         \
  HWY_EXPORT(name##_bf16);                                                                        \
  void Dispatch_##name##_f32(const float* gate, const float* up, size_t n, float* out) noexcept { \
    HWY_DYNAMIC_DISPATCH(name##_f32)(gate, up, n, out);                                           \
  }                                                                                               \
  void Dispatch_##name##_bf16(const float* gate, const float* up, size_t n, BF16* out) noexcept { \
    HWY_DYNAMIC_DISPATCH(name##_bf16)(gate, up, n, out);                                          \
  }
#include "kernels/activations/activations.def"
#undef SY_ACTIVATION

constexpr Activation kActivations[] = {
#define SY_ACTIVATION(name) \
  {#name, &Dispatch_##name##_f32, &Dispatch_##name##_bf16, &name##_scalar},
#include "kernels/activations/activations.def"
#undef SY_ACTIVATION
};

}  // namespace

std::span<const Activation> AllActivations() { return kActivations; }

}  // namespace switchyard::kernels
#endif  // HWY_ONCE
