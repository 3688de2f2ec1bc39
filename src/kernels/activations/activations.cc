#include "kernels/activations/activations.h"

#include <string_view>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/activations/activations.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/activations/all-inl.h"
#include "kernels/load-inl.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

// The kinds of the table: what the operator is called with.
struct gated {
  template <class Op>
  static HWY_INLINE VF Whole(Op op, DF df, const float* gate, const float* up,
                             const ActivationParams& params) {
    return op(df, hn::LoadU(df, gate), hn::LoadU(df, up), params);
  }
  template <class Op>
  static HWY_INLINE VF Part(Op op, DF df, const float* gate, const float* up, size_t n,
                            const ActivationParams& params) {
    return op(df, hn::LoadN(df, gate, n), hn::LoadN(df, up, n), params);
  }
  static const float* At(const float* up, size_t i) { return up + i; }
};
struct plain {
  template <class Op>
  static HWY_INLINE VF Whole(Op op, DF df, const float* gate, const float*,
                             const ActivationParams& params) {
    return op(df, hn::LoadU(df, gate), params);
  }
  template <class Op>
  static HWY_INLINE VF Part(Op op, DF df, const float* gate, const float*, size_t n,
                            const ActivationParams& params) {
    return op(df, hn::LoadN(df, gate, n), params);
  }
  static const float* At(const float*, size_t) { return nullptr; }
};

// `params` is a copy, so that no store to `out` can change it: constants leave the loop. The tail
// takes the same operations as the body. Each vector is loaded before it is stored, so `out` may be
// `gate` or `up`.
template <class Op, class Kind>
HWY_INLINE void Activate(const float* gate, const float* up, size_t n,
                         const ActivationParams params, float* out) {
  const DF df;
  const size_t lanes = hn::Lanes(df);
  const Op op;
  size_t i = 0;
  for (; i + lanes <= n; i += lanes)
    hn::StoreU(Kind::Whole(op, df, gate + i, Kind::At(up, i), params), df, out + i);
  if (i < n)
    hn::StoreN(Kind::Part(op, df, gate + i, Kind::At(up, i), n - i, params), df, out + i, n - i);
}

#define SY_ACTIVATION(name, kind, summary)                                                      \
  void Row_##name(const float* gate, const float* up, size_t n, const ActivationParams& params, \
                  float* out) {                                                                 \
    Activate<name, kind>(gate, up, n, params, out);                                             \
  }
#include "kernels/activations/activations.def"
#undef SY_ACTIVATION

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace switchyard::kernels {
namespace {

#define SY_ACTIVATION(name, kind, summary)                                    \
  HWY_EXPORT(Row_##name);                                                     \
  void Dispatch_##name(const float* gate, const float* up, size_t n,          \
                       const ActivationParams& params, float* out) noexcept { \
    HWY_DYNAMIC_DISPATCH(Row_##name)(gate, up, n, params, out);               \
  }
#include "kernels/activations/activations.def"
#undef SY_ACTIVATION

// The table says "gated" or "plain".
constexpr bool IsGated(std::string_view kind) { return kind == "gated"; }

constexpr ActivationEntry kActivations[] = {
#define SY_ACTIVATION(name, kind, summary) \
  {#name, summary, IsGated(#kind), &Dispatch_##name, &name##_scalar},
#include "kernels/activations/activations.def"
#undef SY_ACTIVATION
};

}  // namespace

std::span<const ActivationEntry> AllActivations() { return kActivations; }

}  // namespace switchyard::kernels
#endif  // HWY_ONCE
