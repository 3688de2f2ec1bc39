// Kind "activation": cases that contradict themselves or ask for what there is not, and bf16.
#include <gtest/gtest.h>
#include <unistd.h>

#include <cmath>
#include <filesystem>
#include <fstream>
#include <string>

#include "switchyard/moe/layer/register_builtins.h"
#include "switchyard/replay/replay.h"
#include "testing/errors.h"
#include "testing/goldens.h"

namespace switchyard::replay {
namespace {

using testing::ExpectError;

// A case of two rows of silu with I = 2, one field of the config replaced.
class ActivationCase : public ::testing::Test {
 protected:
  void SetUp() override {
    path_ = std::filesystem::temp_directory_path() /
            ("activation_case_" + std::to_string(::getpid()) + ".safetensors");
  }
  void TearDown() override { std::filesystem::remove(path_); }

  void Write(const std::string& key, const std::string& value, const std::string& shape = "[2,4]") {
    std::string config;
    const std::pair<std::string, std::string> fields[] = {
        {"activation", "\"silu\""}, {"is_gated", "true"},          {"gate_up_layout", "\"halves\""},
        {"gemm1_alpha", "null"},    {"gemm1_clamp_limit", "null"}, {"swiglu_limit", "null"},
        {"num_rows", "2"},          {"intermediate_size", "2"}};
    for (const auto& [name, standard] : fields)
      config +=
          (config.empty() ? "" : ",") + ("\"" + name + "\":") + (name == key ? value : standard);
    const std::string text =
        R"({"name":"x","kind":"activation","config":{)" + config +
        R"(},"checks":[{"tensor":"out.y","mode":"close","atol":1e-6,"rtol":1e-5}]})";
    std::string quoted;
    for (char c : text) quoted += c == '"' ? "\\\"" : std::string(1, c);
    const std::string header =
        R"({"__metadata__":{"format":"moe-golden-1","kind":"activation","case":")" + quoted +
        R"("},"in.gate_up":{"dtype":"F32","shape":)" + shape +
        R"(,"data_offsets":[0,32]},"out.y":{"dtype":"F32","shape":[2,2],"data_offsets":[32,48]}})";
    const uint64_t length = header.size();
    // A gate of 0 closes: the expected rows are 0.
    const float data[12] = {0, 0, 1, 2, 0, 0, 3, 4, 0, 0, 0, 0};
    std::ofstream file(path_, std::ios::binary);
    file.write(reinterpret_cast<const char*>(&length), sizeof(length));
    file.write(header.data(), static_cast<std::streamsize>(header.size()));
    file.write(reinterpret_cast<const char*>(data), sizeof(data));
  }

  ReplayResult Replay(const std::filesystem::path& path, const ReplayOptions& options = {}) {
    return ReplayCase(path, moe::BuiltinRegistry(), context_, options);
  }
  void Expect(ErrorCode code, std::initializer_list<std::string_view> words) {
    const std::string message = ExpectError(code, words, [&] { Replay(path_); });
    EXPECT_NE(message.find(path_.string()), std::string::npos) << message;
  }

  std::filesystem::path path_;
  ThreadPool pool_{1};
  Arena arena_;
  ExecContext context_{pool_, arena_};
};

TEST_F(ActivationCase, IsComparedWithTheExpectedRows) {
  Write("activation", "\"gelu\"");
  EXPECT_TRUE(Replay(path_).passed());
  // Pairs: the second row's gates are 0 and 3.
  Write("gate_up_layout", "\"interleaved\"");
  const ReplayResult result = Replay(path_);
  ASSERT_EQ(result.checks.size(), 1u);
  EXPECT_FALSE(result.passed());
  EXPECT_NEAR(result.checks[0].error, 3 / (1 + std::exp(-3.0)) * 4, 1e-5);
}

TEST_F(ActivationCase, RefusesWhatItCannotCompute) {
  Write("gate_up_layout", "\"rows\"");
  Expect(ErrorCode::kUnsupported, {"gate_up_layout", "rows", "halves or interleaved"});
  Write("activation", "\"silo\"");
  Expect(ErrorCode::kNotFound, {"silo", "did you mean \"silu\""});
  Write("gemm1_alpha", "1.5");
  Expect(ErrorCode::kUnsupported, {"gemm1_alpha", "gemm1_clamp_limit"});
  Write("is_gated", "1");
  Expect(ErrorCode::kCorruptData, {"is_gated"});
  Write("gemm1_clamp_limit", "1e300");
  Expect(ErrorCode::kCorruptData, {"gemm1_clamp_limit", "f32"});
}

TEST_F(ActivationCase, RefusesShapesThatContradictTheConfig) {
  for (const char* size : {"3", "4", "0", "4611686018427387904", "9223372036854775808"}) {
    Write("intermediate_size", size);
    Expect(ErrorCode::kCorruptData, {"in.gate_up", "[2, 4]"});
  }
  Write("num_rows", "1");
  Expect(ErrorCode::kCorruptData, {"in.gate_up"});
  Write("num_rows", "2", "[8]");
  Expect(ErrorCode::kCorruptData, {"in.gate_up"});
  Write("is_gated", "false");
  Expect(ErrorCode::kCorruptData, {"in.gate_up"});
}

TEST_F(ActivationCase, RecordedCasesPassInBF16) {
  SY_SKIP_WITHOUT_GOLDENS();
  const auto folder = *testing::GoldenDir() / "moe-layer" / "cases" / "activation";
  ReplayOptions options;
  options.act_dtype = "bf16";
  size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const ReplayResult result = Replay(entry.path(), options);
    EXPECT_TRUE(result.passed()) << entry.path();
    ++count;
  }
  EXPECT_GT(count, 0u);
}

}  // namespace
}  // namespace switchyard::replay
