#include "kernels/ggml/ggml.h"

#include <cstdint>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/ggml/ggml.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/highway.h>

#include "kernels/ggml/blocks-inl.h"
#include "switchyard/core/macros.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

// A row by the function of its block, each `kElements` elements in `kBytes` bytes.
template <size_t kElements, size_t kBytes, class Block>
HWY_INLINE void EachBlock(Bytes b, size_t n, Floats y, const Block& block) {
  for (size_t i = 0; i < n; i += kElements, b += kBytes) block(b, y + i);
}

void GgmlRow(DType dtype, const uint8_t* HWY_RESTRICT b, size_t n, float* HWY_RESTRICT y) {
  switch (dtype) {
    case DType::kGgmlQ40: return EachBlock<32, 18>(b, n, y, BlockQ40);
    case DType::kGgmlQ41: return EachBlock<32, 20>(b, n, y, BlockQ41);
    case DType::kGgmlQ50: return EachBlock<32, 22>(b, n, y, BlockQ50);
    case DType::kGgmlQ51: return EachBlock<32, 24>(b, n, y, BlockQ51);
    case DType::kGgmlQ80: return EachBlock<32, 34>(b, n, y, BlockQ80);
    case DType::kGgmlQ2K: return EachBlock<256, 84>(b, n, y, BlockQ2K);
    case DType::kGgmlQ3K: return EachBlock<256, 110>(b, n, y, BlockQ3K);
    case DType::kGgmlQ4K: return EachBlock<256, 144>(b, n, y, BlockQ4K);
    case DType::kGgmlQ5K: return EachBlock<256, 176>(b, n, y, BlockQ5K);
    case DType::kGgmlQ6K: return EachBlock<256, 210>(b, n, y, BlockQ6K);
    case DType::kGgmlIq4Nl: return EachBlock<32, 18>(b, n, y, BlockIq4Nl);
    case DType::kGgmlIq4Xs: return EachBlock<256, 136>(b, n, y, BlockIq4Xs);
    case DType::kGgmlIq3S: return EachBlock<256, 110>(b, n, y, BlockIq3S);
    case DType::kGgmlIq3Xxs: return EachBlock<256, 98>(b, n, y, BlockIq3Xxs);
    case DType::kGgmlIq2S: return EachBlock<256, 82>(b, n, y, BlockIq2S);
    case DType::kGgmlIq2Xs: return EachBlock<256, 74>(b, n, y, BlockIq2Xs);
    case DType::kGgmlIq2Xxs: return EachBlock<256, 66>(b, n, y, BlockIq2Xxs);
    case DType::kGgmlIq1S: return EachBlock<256, 50>(b, n, y, BlockIq1S);
    case DType::kGgmlIq1M: return EachBlock<256, 56>(b, n, y, BlockIq1M);
    case DType::kGgmlTq10: return EachBlock<256, 54>(b, n, y, BlockTq10);
    case DType::kGgmlTq20: return EachBlock<256, 66>(b, n, y, BlockTq20);
    case DType::kGgmlMxFp4: return EachBlock<32, 17>(b, n, y, BlockMxFp4);
    default: SY_CHECK(false && "a block of ggml");
  }
}

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace switchyard::kernels {

HWY_EXPORT(GgmlRow);

void DecodeGgmlRow(DType dtype, const void* blocks, size_t n, float* out) noexcept {
  SY_DCHECK(n % DTypeBlock(dtype) == 0);
  HWY_DYNAMIC_DISPATCH(GgmlRow)(dtype, static_cast<const uint8_t*>(blocks), n, out);
}

void DecodeGgmlRowReference(DType dtype, const void* blocks, size_t n, float* out) {
  SY_CHECK_EQ(n % DTypeBlock(dtype), 0u);
  HWY_STATIC_DISPATCH(GgmlRow)(dtype, static_cast<const uint8_t*>(blocks), n, out);
}

}  // namespace switchyard::kernels
#endif  // HWY_ONCE
