// Errors, dtypes, shapes, arenas, memory, settings and CPU levels.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <set>

#include "switchyard/core/arena.h"
#include "switchyard/core/cpu.h"
#include "switchyard/core/dtype.h"
#include "switchyard/core/error.h"
#include "switchyard/core/log.h"
#include "switchyard/core/macros.h"
#include "switchyard/core/memory.h"
#include "switchyard/core/settings.h"
#include "switchyard/core/shape.h"

namespace switchyard {
namespace {

// The message of the Error that `body` throws; fails the test if it throws none or another code.
template <typename Body>
std::string ErrorOf(ErrorCode code, const Body& body) {
  try {
    body();
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code) << e.message();
    return e.message();
  }
  ADD_FAILURE() << "no error";
  return "";
}

TEST(Error, CodesHaveNamesAndStatuses) {
  EXPECT_EQ(ErrorCodeName(ErrorCode::kInvalidArgument), "invalid argument");
  EXPECT_EQ(ErrorCodeName(ErrorCode::kInternal), "internal error");
  EXPECT_EQ(ErrorHttpStatus(ErrorCode::kInvalidArgument), 400);
  EXPECT_EQ(ErrorHttpStatus(ErrorCode::kResourceExhausted), 503);
  EXPECT_EQ(ErrorExitStatus(ErrorCode::kCorruptData), 1);
}

TEST(Check, SaysWhereAndBothValues) {
  const std::string message = ErrorOf(ErrorCode::kInternal, [] { SY_CHECK_EQ(2 + 2, 5); });
  EXPECT_NE(message.find("core_test.cc"), std::string::npos);
  EXPECT_NE(message.find("4 against 5"), std::string::npos) << message;
}

TEST(DType, NamesAndSizesRoundTrip) {
  for (DType dtype :
       {DType::kF64, DType::kF32, DType::kF16, DType::kBF16, DType::kI64, DType::kI32, DType::kI16,
        DType::kI8, DType::kU8, DType::kBool, DType::kF8E4M3, DType::kF8E5M2, DType::kF8E8M0}) {
    DType parsed = DType::kF64;
    EXPECT_TRUE(ParseDType(DTypeName(dtype), parsed));
    EXPECT_EQ(parsed, dtype);
    EXPECT_GE(DTypeBytes(dtype), 1u);
  }
  DType unchanged = DType::kI8;
  EXPECT_FALSE(ParseDType("F3", unchanged));
  EXPECT_EQ(unchanged, DType::kI8);
}

TEST(DType, SixteenBitFloatsConvertBack) {
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const F16 half{static_cast<uint16_t>(bits)};
    const BF16 brain{static_cast<uint16_t>(bits)};
    if (!std::isnan(ToFloat(half))) {
      ASSERT_EQ(ToF16(ToFloat(half)).bits, half.bits);
    } else {
      ASSERT_TRUE(std::isnan(ToFloat(ToF16(ToFloat(half)))));
    }
    if (!std::isnan(ToFloat(brain))) {
      ASSERT_EQ(ToBF16(ToFloat(brain)).bits, brain.bits);
    } else {
      ASSERT_TRUE(std::isnan(ToFloat(ToBF16(ToFloat(brain)))));
    }
  }
}

TEST(DType, NarrowingRoundsTiesToEven) {
  EXPECT_EQ(ToFloat(ToF16(2049.0f)), 2048.0f);
  EXPECT_EQ(ToFloat(ToF16(2051.0f)), 2052.0f);
  EXPECT_EQ(ToFloat(ToF16(65519.0f)), 65504.0f);
  EXPECT_TRUE(std::isinf(ToFloat(ToF16(65520.0f))));
  EXPECT_EQ(ToFloat(ToF16(0x1p-25f)), 0.0f);
  EXPECT_EQ(ToFloat(ToF16(0x1.8p-25f)), 0x1p-24f);
  EXPECT_EQ(ToFloat(ToBF16(257.0f)), 256.0f);
  EXPECT_EQ(ToFloat(ToBF16(259.0f)), 260.0f);
  EXPECT_TRUE(std::isinf(ToFloat(ToBF16(std::numeric_limits<float>::max()))));
}

TEST(Shape, CountsAndOverflows) {
  size_t count = 0;
  EXPECT_TRUE((Shape{3, 4, 5}.NumElements(count)));
  EXPECT_EQ(count, 60u);
  EXPECT_TRUE(Shape{}.NumElements(count));
  EXPECT_EQ(count, 1u);
  EXPECT_FALSE((Shape{size_t{1} << 63, 2}.NumElements(count)));
  EXPECT_FALSE((Shape{SIZE_MAX, 2}.NumElements(count)));
  EXPECT_EQ((Shape{8, 256}.ToString()), "[8, 256]");
  EXPECT_EQ((Shape{2, 3}), (Shape{2, 3}));
  EXPECT_NE((Shape{2, 3}), (Shape{2, 3, 1}));
  ErrorOf(ErrorCode::kInvalidArgument, [] { Shape{1, 1, 1, 1, 1, 1, 1}; });
}

TEST(Arena, AWarmPassAllocatesNothing) {
  Arena arena;
  const auto pass = [&arena] {
    arena.Reset();
    for (size_t bytes : {size_t{1}, size_t{63}, size_t{3} << 20, size_t{0}, size_t{5} << 20}) {
      auto* data = static_cast<std::byte*>(arena.Allocate(bytes));
      EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % Arena::kAlignment, 0u);
      std::memset(data, 1, bytes + Arena::kAlignment);
    }
  };
  pass();
  pass();
  const size_t before = arena.num_system_allocations();
  for (int i = 0; i < 10; ++i) pass();
  EXPECT_EQ(arena.num_system_allocations(), before);
}

TEST(Arena, AScopeGivesItsMemoryBack) {
  Arena arena;
  const std::span<float> kept = arena.AllocateSpan<float>(10);
  void* inside = nullptr;
  {
    const ArenaScope scope(arena);
    inside = arena.Allocate(1000);
  }
  EXPECT_EQ(arena.Allocate(1000), inside);
  EXPECT_NE(static_cast<void*>(kept.data()), inside);
}

TEST(Arena, NamesTheSizeThatDoesNotFit) {
  Arena arena;
  const std::string message =
      ErrorOf(ErrorCode::kResourceExhausted, [&] { arena.Allocate(size_t{1} << 62); });
  EXPECT_NE(message.find("4611686018427387"), std::string::npos) << message;
}

TEST(MappedMemory, IsZeroAndCanBeReleased) {
  MappedMemory memory(3 << 20, "a test");
  EXPECT_EQ(memory.data()[12345], std::byte{0});
  std::memset(memory.data(), 7, memory.size());
  memory.Release(0, memory.size());
  EXPECT_EQ(memory.data()[12345], std::byte{0});
  const std::string message = ErrorOf(ErrorCode::kResourceExhausted,
                                      [] { MappedMemory(size_t{1} << 60, "a test of limits"); });
  EXPECT_NE(message.find("1152921504606846976 bytes for a test of limits"), std::string::npos)
      << message;
  EXPECT_GT(ResidentBytes(), 0u);
  EXPECT_GE(PeakResidentBytes(), ResidentBytes() / 2);
  EXPECT_GT(AvailableBytes(), 0u);
}

TEST(Settings, DefaultsEnvironmentAndCommandLine) {
  EXPECT_EQ(SettingEnvName("moe-runner"), "SWITCHYARD_MOE_RUNNER");
  setenv("SWITCHYARD_THREADS", "3", 1);
  setenv("SGLANG_CI_DISABLE_MOE_FUSED_FUNC", "1", 1);
  Settings settings = Settings::FromEnvironment();
  unsetenv("SWITCHYARD_THREADS");
  unsetenv("SGLANG_CI_DISABLE_MOE_FUSED_FUNC");
  EXPECT_EQ(settings.GetCount("threads"), 3u);
  EXPECT_EQ(settings.Source("threads"), "SWITCHYARD_THREADS");
  EXPECT_TRUE(settings.GetFlag("disable-fused-moe"));
  EXPECT_EQ(settings.GetCount("ctx", 77), 77u) << "auto";
  EXPECT_EQ(settings.Source("disable-fused-moe"), "SGLANG_CI_DISABLE_MOE_FUSED_FUNC");
  EXPECT_EQ(settings.Get("moe-runner"), "auto");
  EXPECT_TRUE(settings.IsDefault("moe-runner"));
  settings.Set("threads", "5", "--threads");
  EXPECT_EQ(settings.GetCount("threads"), 5u);
  EXPECT_EQ(settings.Source("threads"), "--threads");
}

TEST(Settings, BadValuesNameTheSourceAndWhatIsAllowed) {
  Settings settings;
  std::string message =
      ErrorOf(ErrorCode::kInvalidArgument, [&] { settings.Set("isa", "sse", "--isa"); });
  EXPECT_EQ(message, "--isa: expected one of auto|scalar|avx2|avx512, found \"sse\"");
  message = ErrorOf(ErrorCode::kInvalidArgument,
                    [&] { settings.Set("threads", "-1", "SWITCHYARD_THREADS"); });
  EXPECT_EQ(message,
            "SWITCHYARD_THREADS: expected auto or a whole number of at least 1, found \"-1\"");
  message = ErrorOf(ErrorCode::kInvalidArgument, [&] { settings.Set("chunk", "0", "--chunk"); });
  EXPECT_NE(message.find("at least 1"), std::string::npos);
  message = ErrorOf(ErrorCode::kNotFound, [&] { settings.Get("moe-runer"); });
  EXPECT_NE(message.find("did you mean \"moe-runner\""), std::string::npos) << message;
}

TEST(Settings, EveryDefaultIsAllowedAndNoNameComesTwice) {
  std::set<std::string_view> names;
  for (const SettingSpec& spec : AllSettings()) {
    Settings settings;
    EXPECT_TRUE(names.insert(spec.name).second) << spec.name;
    EXPECT_NO_THROW(settings.Set(spec.name, spec.default_value, "default")) << spec.name;
    EXPECT_FALSE(spec.help.empty()) << spec.name;
  }
}

TEST(Cpu, CapsAreObeyedAndImpossibleOnesRefused) {
  const std::vector<Isa> supported = SupportedIsas();
  ASSERT_FALSE(supported.empty());
  EXPECT_EQ(supported.front(), Isa::kScalar);
  for (Isa isa : supported) {
    CapIsa(isa);
    EXPECT_EQ(CurrentIsa(), isa);
    if (isa != Isa::kAvx512) {
      EXPECT_FALSE(HasNativeBF16());
    }
  }
  UncapIsa();
  EXPECT_EQ(CurrentIsa(), supported.back());
  for (Isa isa : {Isa::kScalar, Isa::kAvx2, Isa::kAvx512}) {
    if (std::find(supported.begin(), supported.end(), isa) != supported.end()) continue;
    const std::string message = ErrorOf(ErrorCode::kUnsupported, [&] { CapIsa(isa); });
    EXPECT_NE(message.find(IsaName(isa)), std::string::npos);
  }
  EXPECT_GE(AvailableCpus(), 1u);
  const CpuInfo info = GetCpuInfo();
  EXPECT_FALSE(info.target_chosen.empty());
  EXPECT_FALSE(info.targets_compiled.empty());
}

TEST(Log, ReachesTheSinkFromTheLowestLevel) {
  std::vector<std::string> lines;
  SetLogSink(
      [&](LogLevel, std::string_view message, std::initializer_list<LogField> fields) {
        std::string line(message);
        for (const LogField& field : fields)
          line.append(" ").append(field.key).append("=").append(field.value);
        lines.push_back(line);
      },
      LogLevel::kWarning);
  Log(LogLevel::kInfo, "quiet");
  Log(LogLevel::kWarning, "loud", {{"rank", "3"}});
  SetLogSink({}, LogLevel::kInfo);
  Log(LogLevel::kError, "nobody hears");
  EXPECT_EQ(lines, std::vector<std::string>{"loud rank=3"});
}

}  // namespace
}  // namespace switchyard
