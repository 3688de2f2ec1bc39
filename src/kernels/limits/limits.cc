#include "kernels/limits/limits.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <vector>

#include "switchyard/core/cpu.h"
#include "switchyard/core/memory.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/limits/limits.cc"
#include <hwy/foreach_target.h>  // IWYU pragma: keep
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "kernels/load-inl.h"
#include "switchyard/core/macros.h"

HWY_BEFORE_NAMESPACE();
namespace switchyard::kernels::HWY_NAMESPACE {

// Sums all 32-bit words of [data, data + bytes), bytes a multiple of 512, fetching `ahead` bytes in
// advance (0 = not).
uint32_t SumWords(const std::byte* data, size_t bytes, size_t ahead) {
  const hn::ScalableTag<uint32_t> d;
  const size_t lanes = hn::Lanes(d);
  auto sum0 = hn::Zero(d);
  auto sum1 = hn::Zero(d);
  const auto* words = reinterpret_cast<const uint32_t*>(data);
  const size_t count = bytes / sizeof(uint32_t);
  for (size_t i = 0; i + 128 <= count; i += 128) {
    if (ahead != 0) {
      for (size_t line = 0; line < 512; line += 64)
        hwy::Prefetch(data + i * sizeof(uint32_t) + ahead + line);
    }
    for (size_t j = 0; j < 128; j += 2 * lanes) {
      sum0 = hn::Add(sum0, hn::Load(d, words + i + j));
      sum1 = hn::Add(sum1, hn::Load(d, words + i + j + lanes));
    }
  }
  return hn::ReduceSum(d, hn::Add(sum0, sum1));
}

// Independent sums: more than latency times throughput of any multiply unit, and few enough for the
// registers.
constexpr size_t kSums = HWY_MAX_BYTES >= 64 ? 20 : 12;

// Each returns a number, so that nothing is optimised away, and does `rounds` * kSums instructions.
// The sums start apart: the compiler would make equal ones into one.
float MultiplyF32(const float* values, size_t rounds) {
  const DF d;
  const VF a = hn::LoadU(d, values);
  const VF b = hn::LoadU(d, values + 16);
  VF sums[kSums];
  SY_UNROLL
  for (size_t i = 0; i < kSums; ++i) sums[i] = hn::Set(d, static_cast<float>(i));
  for (size_t r = 0; r < rounds; ++r) {
    SY_UNROLL
    for (size_t i = 0; i < kSums; ++i) sums[i] = hn::MulAdd(a, b, sums[i]);
  }
  VF total = hn::Zero(d);
  for (size_t i = 0; i < kSums; ++i) total = hn::Add(total, sums[i]);
  return hn::ReduceSum(d, total);
}

float MultiplyBF16(const float* values, size_t rounds) {
  const DF d;
  const hn::Repartition<hwy::bfloat16_t, DF> db;
  const auto a = hn::BitCast(db, hn::LoadU(d, values));
  const auto b = hn::BitCast(db, hn::LoadU(d, values + 16));
  VF sums[kSums];
  SY_UNROLL
  for (size_t i = 0; i < kSums; ++i) sums[i] = hn::Set(d, static_cast<float>(i));
  for (size_t r = 0; r < rounds; ++r) {
    VF unused = hn::Zero(d);
    SY_UNROLL
    for (size_t i = 0; i < kSums; ++i)
      sums[i] = hn::ReorderWidenMulAccumulate(d, a, b, sums[i], unused);
  }
  VF total = hn::Zero(d);
  for (size_t i = 0; i < kSums; ++i) total = hn::Add(total, sums[i]);
  return hn::ReduceSum(d, total);
}

// Highway has the 4-way dot on every target, in one instruction where this holds: vpdpbusd, usdot.
#if (HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL) || \
    (HWY_ARCH_ARM && defined(__ARM_FEATURE_MATMUL_INT8))
constexpr bool kHasInt8Dot = true;
#else
constexpr bool kHasInt8Dot = false;
#endif

float MultiplyInt8(const float* values, size_t rounds) {
  const hn::ScalableTag<int32_t> d;
  const auto bits = hn::LoadU(hn::RebindToFloat<decltype(d)>(), values);
  const auto a = hn::BitCast(hn::Repartition<uint8_t, decltype(d)>(), bits);
  const auto b = hn::BitCast(hn::Repartition<int8_t, decltype(d)>(), bits);
  hn::VFromD<decltype(d)> sums[kSums];
  SY_UNROLL
  for (size_t i = 0; i < kSums; ++i) sums[i] = hn::Set(d, static_cast<int32_t>(i));
  for (size_t r = 0; r < rounds; ++r) {
    SY_UNROLL
    for (size_t i = 0; i < kSums; ++i) {
#if HWY_ARCH_X86 && HWY_TARGET <= HWY_AVX3_DL
      // GCC 12 moves each sum to another register and back around the intrinsic, which takes 40 %.
      asm("vpdpbusd %2, %1, %0" : "+v"(sums[i].raw) : "v"(a.raw), "v"(b.raw));
#else
      sums[i] = hn::SumOfMulQuadAccumulate(d, a, b, sums[i]);
#endif
    }
  }
  auto total = hn::Zero(d);
  SY_UNROLL  // else the sums live in memory
  for (size_t i = 0; i < kSums; ++i) total = hn::Add(total, sums[i]);
  return static_cast<float>(hn::ReduceSum(d, total));
}

size_t VectorBytes() { return hn::Lanes(hn::ScalableTag<uint8_t>()); }
size_t NumSums() { return kSums; }
bool HasBF16() { return HWY_NATIVE_DOT_BF16 != 0; }
bool HasInt8() { return kHasInt8Dot; }

}  // namespace switchyard::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace switchyard::kernels {
namespace {

HWY_EXPORT(SumWords);
HWY_EXPORT(MultiplyF32);
HWY_EXPORT(MultiplyBF16);
HWY_EXPORT(MultiplyInt8);
HWY_EXPORT(VectorBytes);
HWY_EXPORT(NumSums);
HWY_EXPORT(HasBF16);
HWY_EXPORT(HasInt8);

using Clock = std::chrono::steady_clock;

// Seconds from the first start to the last end of body(thread) on every thread at once, timed on
// the threads.
template <typename Body>
double TimeOnAllThreads(ThreadPool& pool, const Body& body) {
  const size_t threads = pool.num_threads();
  std::atomic<size_t> arrived{0};
  std::vector<Clock::time_point> starts(threads);
  std::vector<Clock::time_point> ends(threads);
  pool.Run(threads, [&](size_t task, size_t) {
    // Nobody starts before all are here, so no thread takes two tasks.
    arrived.fetch_add(1);
    while (arrived.load() < threads) hwy::Pause();
    starts[task] = Clock::now();
    body(task);
    ends[task] = Clock::now();
  });
  const auto first = *std::min_element(starts.begin(), starts.end());
  const auto last = *std::max_element(ends.begin(), ends.end());
  return std::chrono::duration<double>(last - first).count();
}

std::atomic<uint32_t> g_sink{0};

double MeasureRead(ThreadPool& pool) {
  const size_t available = AvailableBytes();
  const size_t wanted =
      available == 0 ? size_t{1} << 28 : std::min<size_t>(size_t{1} << 30, available / 4);
  const size_t part = wanted / pool.num_threads() / 4096 * 4096;
  const MappedMemory memory(part * pool.num_threads(), "the measurement of read bandwidth");
  // Written by the thread that reads it; pages of zeros would be shared.
  TimeOnAllThreads(pool, [&](size_t thread) {
    std::memset(memory.data() + thread * part, 1 + static_cast<int>(thread), part);
  });
  double best = 0;
  for (int repeat = 0; repeat < 4; ++repeat) {
    for (size_t ahead : {size_t{0}, size_t{1024}, size_t{4096}}) {
      const double seconds = TimeOnAllThreads(pool, [&](size_t thread) {
        g_sink += HWY_DYNAMIC_DISPATCH(SumWords)(memory.data() + thread * part, part, ahead);
      });
      best = std::max(best, static_cast<double>(part * pool.num_threads()) / seconds / 1e9);
    }
  }
  return best;
}

// `ops_per_byte`: operations of one instruction for each byte of a vector.
template <typename Kernel>
double MeasureOps(ThreadPool& pool, double ops_per_byte, const Kernel& kernel) {
  // Values that are small in f32, as pairs of bf16 and as bytes.
  std::vector<float> values(32, std::bit_cast<float>(0x3e803e80u));
  const size_t rounds = 600000;
  double best = 0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    const double seconds = TimeOnAllThreads(
        pool, [&](size_t) { g_sink += static_cast<uint32_t>(kernel(values.data(), rounds) > 0); });
    const double ops =
        static_cast<double>(rounds * HWY_DYNAMIC_DISPATCH(NumSums)() * pool.num_threads()) *
        ops_per_byte * static_cast<double>(HWY_DYNAMIC_DISPATCH(VectorBytes)());
    best = std::max(best, ops / seconds / 1e9);
  }
  return best;
}

}  // namespace

MachineLimits MeasureLimits(ThreadPool& pool) {
  MachineLimits limits;
  limits.read_gbps = MeasureRead(pool);
  limits.f32_gops = MeasureOps(
      pool, 0.5, [](const float* v, size_t n) { return HWY_DYNAMIC_DISPATCH(MultiplyF32)(v, n); });
  if (HWY_DYNAMIC_DISPATCH(HasBF16)()) {
    limits.bf16_gops = MeasureOps(pool, 1.0, [](const float* v, size_t n) {
      return HWY_DYNAMIC_DISPATCH(MultiplyBF16)(v, n);
    });
  }
  if (HWY_DYNAMIC_DISPATCH(HasInt8)()) {
    limits.int8_gops = MeasureOps(pool, 2.0, [](const float* v, size_t n) {
      return HWY_DYNAMIC_DISPATCH(MultiplyInt8)(v, n);
    });
  }
  return limits;
}

}  // namespace switchyard::kernels
#endif  // HWY_ONCE
