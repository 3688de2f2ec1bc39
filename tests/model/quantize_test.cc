// Conversions of whole checkpoints: what is written loads, computes what the same weights computed
// another way do, and does not depend on interruptions.
#include "switchyard/model/quantize.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>

#include "model/quantization/online.h"
#include "quant/expert_matmul.h"
#include "quant/ggml_quant.h"
#include "quant/weight_quant.h"
#include "switchyard/core/error.h"
#include "switchyard/model/model.h"
#include "testing/errors.h"
#include "testing/goldens.h"
#include "testing/model_folder.h"

namespace switchyard {
namespace {

namespace fs = std::filesystem;
using testing::ExpectError;
using testing::ModelFolder;

// The checkpoints of the repository, one of each family.
const std::vector<std::string> kFamilies = {
    "olmoe_clip",  "mixtral_swa",      "qwen3_moe_with_tokenizer",
    "deepseek_v3", "deepseek_v2_lite", "gpt_oss"};

std::string ReadAll(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// Every file of a folder, or the file itself.
std::map<std::string, std::string> Contents(const fs::path& path) {
  if (!fs::is_directory(path)) return {{"", ReadAll(path)}};
  std::map<std::string, std::string> contents;
  for (const fs::directory_entry& entry : fs::directory_iterator(path))
    contents[entry.path().filename().string()] = ReadAll(entry.path());
  return contents;
}

class Quantize : public ::testing::Test {
 protected:
  Quantize()
      : folder_(fs::temp_directory_path() / ("switchyard-quantize-" + std::to_string(getpid()))) {
    fs::create_directories(folder_);
  }
  ~Quantize() override { fs::remove_all(folder_); }

  static fs::path Golden(const std::string& name) {
    return testing::LocalGoldenDir() / name / "checkpoint";
  }

  QuantizeReport Convert(const fs::path& in, const fs::path& out, const std::string& scheme,
                         QuantizeOptions options = {}) {
    options.scheme = scheme;
    return QuantizeCheckpoint(in, out, options, pool_);
  }

  static std::shared_ptr<const ModelFiles> Files(const fs::path& path) {
    return path.extension() == ".gguf" ? OpenGgufFiles(path) : ModelFiles::OpenFolder(path);
  }

  // Logits of a few tokens in f32, activations as they are.
  std::vector<float> Logits(const fs::path& path, const std::string& online = "") {
    ModelOptions options;
    options.moe.act_dtype = "f32";
    options.moe.activation_quant = false;
    options.quantize = online;
    const std::unique_ptr<Model> model = Model::Load(Files(path), options, pool_);
    const std::vector<int32_t> ids = {1, 5, 9, 2, 7};
    const std::vector<uint32_t> blocks = {0};
    const BlockTable tables[] = {{0, blocks}, {0, blocks}};
    std::vector<std::vector<float>> memory;
    std::vector<KvLayerView> layers;
    const std::vector<KvGroup> groups = PlanKvGroups(model->config());
    const size_t block = kKvBlockSize * model->config().kv_shape().elements();
    for (size_t i = 0; i < model->config().layers.size(); ++i) {
      memory.emplace_back(block);
      size_t group = 0;
      while (std::ranges::find(groups[group].layers, i) == groups[group].layers.end()) ++group;
      layers.push_back(
          {reinterpret_cast<std::byte*>(memory.back().data()), block * sizeof(float), group});
    }
    Arena arena;
    ExecContext context{pool_, arena};
    const SequenceChunk chunk{ids, 0, ids.size(), std::span(tables, groups.size()),
                              LogitsWanted::kAll};
    const Rows rows = model->Forward(context, {&chunk, 1}, {DType::kF32, layers});
    std::vector<float> logits;
    for (size_t r = 0; r < rows.rows; ++r)
      logits.insert(logits.end(), rows.Row(r), rows.Row(r) + rows.cols);
    return logits;
  }

  static double MaxDifference(const std::vector<float>& a, const std::vector<float>& b) {
    EXPECT_EQ(a.size(), b.size());
    double largest = 0;
    for (size_t i = 0; i < std::min(a.size(), b.size()); ++i)
      largest = std::max(largest, std::fabs(double{a[i]} - double{b[i]}));
    return largest;
  }

  fs::path folder_;
  ThreadPool pool_{2};
};

TEST_F(Quantize, PlainGgufFilesComputeTheSameBits) {
  for (const std::string& family : kFamilies) {
    const std::vector<float> expected = Logits(Golden(family));
    for (const char* scheme : {"gguf-bf16", "gguf-f32"}) {
      const fs::path out = folder_ / (family + scheme + ".gguf");
      const QuantizeReport report = Convert(Golden(family), out, scheme);
      for (const TensorReport& tensor : report.tensors)
        EXPECT_EQ(tensor.max_error, 0.0) << family << " " << scheme << " " << tensor.name;
      if (family == "mixtral_swa") {
        // The rows of q and k are reordered: the same products, added in another order.
        EXPECT_LE(MaxDifference(Logits(out), expected), 1e-4) << scheme;
      } else {
        EXPECT_EQ(Logits(out), expected) << family << " " << scheme;
      }
    }
  }
}

TEST_F(Quantize, FoldersComputeWhatOnlineQuantisationComputes) {
  size_t compared = 0;
  for (const std::string& family : kFamilies) {
    if (family == "gpt_oss") continue;  // has a layout of its own, below
    for (const char* scheme :
         {"fp8_block", "w8a8_int8", "w4a16_g32", "w4a16_g128", "awq", "mxfp4"}) {
      const fs::path out = folder_ / (family + scheme);
      const QuantizeReport report = Convert(Golden(family), out, scheme);
      EXPECT_EQ(Logits(out), Logits(Golden(family), scheme)) << family << " " << scheme;
      compared += static_cast<size_t>(std::ranges::count_if(
          report.tensors, [](const TensorReport& tensor) { return tensor.is_quantized; }));
    }
  }
  EXPECT_GT(compared, 500u) << "matrices that took part";
}

// Matrices of ModelFolder, each replaced by what an encoder makes of it.
template <typename FakeQuant>
void Replace(ModelFolder& folder, const FakeQuant& fake) {
  for (auto& [name, tensor] : folder.tensors) {
    if (!name.ends_with(".weight") || tensor.shape.size() != 2 || tensor.dtype != DType::kBF16)
      continue;
    const size_t rows = tensor.shape[0], cols = tensor.shape[1];
    std::vector<float> values(rows * cols);
    for (size_t i = 0; i < values.size(); ++i) {
      BF16 stored;
      std::memcpy(&stored, tensor.bytes.data() + 2 * i, 2);
      values[i] = ToFloat(stored);
    }
    fake(name, rows, cols, values);
    tensor.dtype = DType::kF32;
    tensor.bytes.resize(4 * values.size());
    std::memcpy(tensor.bytes.data(), values.data(), tensor.bytes.size());
  }
}

TEST_F(Quantize, GgufTypesComputeWhatTheirBlocksSay) {
  const std::map<std::string, DType> types = {
      {"Q8_0", DType::kGgmlQ80},        {"q4_0", DType::kGgmlQ40}, {"Q4_1", DType::kGgmlQ41},
      {"Q5_0", DType::kGgmlQ50},        {"Q5_1", DType::kGgmlQ51}, {"IQ4_NL", DType::kGgmlIq4Nl},
      {"gguf-mxfp4", DType::kGgmlMxFp4}};
  for (const auto& [scheme, dtype] : types) {
    const fs::path out = folder_ / (scheme + ".gguf");
    Convert(Golden("deepseek_v3"), out, scheme);
    // Decoded by this engine's reader, through the same names and layouts.
    const fs::path floats = folder_ / (scheme + "-f32.gguf");
    const QuantizeReport decoded = Convert(out, floats, "gguf-f32");
    EXPECT_EQ(decoded.warnings.size(), 1u) << "decoding a quantised file is warned of";
    EXPECT_LE(MaxDifference(Logits(out), Logits(floats)), 1e-3) << scheme;
  }
  // Independently of reader and writer: encoded and decoded here.
  ModelFolder fake(Golden("qwen3_moe_with_tokenizer"));
  Replace(fake, [](const std::string& name, size_t rows, size_t cols, std::vector<float>& values) {
    if (name.ends_with("mlp.gate.weight") || cols % 32 != 0) return;
    for (size_t n = 0; n < rows; ++n) {
      std::vector<std::byte> blocks(BytesOf(DType::kGgmlQ80, cols));
      quant::EncodeGgmlRow(DType::kGgmlQ80, std::span(values).subspan(n * cols, cols), blocks);
      quant::DecodeMatrixRow(WeightMatrix::Dense(blocks.data(), DType::kGgmlQ80, 1, cols).AsBank(),
                             0, 0, values.data() + n * cols);
    }
  });
  fake.Write();
  const fs::path out = folder_ / "fake.gguf";
  Convert(Golden("qwen3_moe_with_tokenizer"), out, "q8_0");
  EXPECT_LE(MaxDifference(Logits(out), Logits(fake.path())), 1e-4);
}

TEST_F(Quantize, RowsThatBlocksDoNotDivideFallBackAndAreReported) {
  for (const char* scheme : {"q2_k", "q3_k", "q4_k", "q5_k", "q6_k"}) {
    const fs::path out = folder_ / (std::string(scheme) + ".gguf");
    const QuantizeReport report = Convert(Golden("olmoe_clip"), out, scheme);
    const auto found =
        std::ranges::find(report.tensors, "blk.0.attn_q.weight", &TensorReport::name);
    ASSERT_NE(found, report.tensors.end());
    EXPECT_NE(found->note.find("48 inputs are no multiple of the block of 256"), std::string::npos)
        << found->note;
    EXPECT_EQ(found->to, "F16") << "neither do blocks of 32";
    EXPECT_EQ(Logits(out).size(), Logits(Golden("olmoe_clip")).size());
  }
}

// Gives gpt-oss experts of a size that blocks of 32 divide.
void Widen(ModelFolder& folder) {
  folder.config["intermediate_size"] = 64;
  const auto resize = [](ModelFolder::Tensor& tensor, std::vector<size_t> shape) {
    size_t count = 1;
    for (size_t dim : shape) count *= dim;
    std::vector<std::byte> bytes(count * 2);
    for (size_t i = 0; i < count; ++i) {
      const BF16 value = ToBF16(0.02f * static_cast<float>(static_cast<int>(i * 37 % 101) - 50));
      std::memcpy(bytes.data() + 2 * i, &value, 2);
    }
    tensor = {DType::kBF16, std::move(shape), std::move(bytes)};
  };
  for (auto& [name, tensor] : folder.tensors) {
    const size_t experts = tensor.shape.empty() ? 0 : tensor.shape[0];
    const size_t hidden = folder.config["hidden_size"];
    if (name.ends_with("experts.gate_up_proj")) resize(tensor, {experts, hidden, 128});
    if (name.ends_with("experts.gate_up_proj_bias")) resize(tensor, {experts, 128});
    if (name.ends_with("experts.down_proj")) resize(tensor, {experts, 64, hidden});
  }
}

TEST_F(Quantize, GptOssHasItsOwnMxfp4) {
  ModelFolder folder(Golden("gpt_oss"));
  ExpectError(ErrorCode::kUnsupported, {"fp8_block", "gpt_oss", "mxfp4"},
              [&] { Convert(Golden("gpt_oss"), folder_ / "x", "fp8_block"); });
  EXPECT_FALSE(fs::exists(folder_ / "x.partial"));

  ModelFolder wide(Golden("gpt_oss"));
  Widen(wide);
  wide.Write();
  const fs::path out = folder_ / "mxfp4", gguf = folder_ / "mxfp4.gguf", f32 = folder_ / "f32.gguf";
  Convert(wide.path(), out, "mxfp4");
  const auto files = ModelFiles::OpenFolder(out);
  const SafetensorsFile file = SafetensorsFile::Parse("m", files->Map("model.safetensors"));
  const size_t experts = folder.config["num_local_experts"], hidden = folder.config["hidden_size"];
  const TensorInfo* blocks = file.Find("model.layers.0.mlp.experts.gate_up_proj_blocks");
  ASSERT_NE(blocks, nullptr);
  EXPECT_EQ(blocks->shape, (Shape{experts, 128, hidden / 32, 16}));
  EXPECT_NE(file.Find("model.layers.0.mlp.experts.down_proj_scales"), nullptr);
  // The codes are exact in every type with more bits, and in GGUF's own blocks of the same kind.
  Convert(out, f32, "gguf-f32");
  EXPECT_LE(MaxDifference(Logits(out), Logits(f32)), 1e-4);
  const QuantizeReport again = Convert(out, gguf, "gguf-mxfp4");
  for (const TensorReport& tensor : again.tensors) {
    if (tensor.to != "MXFP4") continue;
    EXPECT_EQ(tensor.max_error, 0.0) << tensor.name;
  }
}

TEST_F(Quantize, GgufModelsBecomeFolders) {
  for (const std::string& family : kFamilies) {
    if (family == "gpt_oss") continue;
    const fs::path gguf = folder_ / (family + ".gguf"), out = folder_ / family;
    Convert(Golden(family), gguf, "gguf-bf16");
    Convert(gguf, out, "bf16");
    EXPECT_EQ(Logits(out), Logits(Golden(family))) << family;
  }
}

// Banks of experts as transformers 5 saves them.
TEST_F(Quantize, StackedExpertsBecomeSeparateOnes) {
  ModelFolder folder(Golden("olmoe_clip"));
  const size_t experts = folder.config["num_experts"];
  for (size_t layer = 0; layer < 2; ++layer) {
    const std::string prefix = "model.layers." + std::to_string(layer) + ".mlp.experts.";
    ModelFolder::Tensor both, down;
    for (size_t e = 0; e < experts; ++e) {
      for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
        const std::string full = prefix + std::to_string(e) + "." + name + ".weight";
        const ModelFolder::Tensor& tensor = folder.tensors.at(full);
        const bool is_down = std::string(name) == "down_proj";
        ModelFolder::Tensor& bank = is_down ? down : both;
        bank.dtype = tensor.dtype;
        bank.shape = {experts, tensor.shape[0] * (is_down ? 1 : 2), tensor.shape[1]};
        bank.bytes.insert(bank.bytes.end(), tensor.bytes.begin(), tensor.bytes.end());
        folder.tensors.erase(full);
      }
    }
    folder.tensors[prefix + "gate_up_proj"] = std::move(both);
    folder.tensors[prefix + "down_proj"] = std::move(down);
  }
  folder.Write();
  Convert(folder.path(), folder_ / "stacked", "fp8_block");
  Convert(Golden("olmoe_clip"), folder_ / "separate", "fp8_block");
  EXPECT_EQ(ReadAll(folder_ / "stacked" / "model.safetensors"),
            ReadAll(folder_ / "separate" / "model.safetensors"));
}

TEST_F(Quantize, EveryStoredSchemeIsDecoded) {
  SY_SKIP_WITHOUT_GOLDENS();
  size_t checked = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(*testing::GoldenDir() / "quant")) {
    const fs::path in = entry.path() / "checkpoint";
    const std::string name = entry.path().filename().string();
    if (name == "gpt_oss_mxfp4" || !fs::exists(in)) continue;
    const fs::path out = folder_ / name;
    const QuantizeReport report = Convert(in, out, "bf16");
    double largest = 0;
    for (float logit : Logits(in)) largest = std::max(largest, std::fabs(double{logit}));
    // Rounding to bfloat16 alone.
    EXPECT_LE(MaxDifference(Logits(out), Logits(in)), 0.1 * largest) << name;
    for (const TensorReport& tensor : report.tensors)
      EXPECT_LE(tensor.rms_error, 0.003) << name << " " << tensor.name;
    ++checked;
  }
  EXPECT_GE(checked, 15u);
}

TEST_F(Quantize, GptqIsReadBack) {
  const fs::path out = folder_ / "gptq", f32 = folder_ / "f32.gguf";
  const QuantizeReport report = Convert(Golden("qwen3_moe_with_tokenizer"), out, "gptq");
  Convert(out, f32, "gguf-f32");
  EXPECT_LE(MaxDifference(Logits(out), Logits(f32)), 1e-3);
  EXPECT_EQ(report.scheme, "gptq");
}

TEST_F(Quantize, EverythingElseOfTheFolderIsTakenOver) {
  const fs::path in = Golden("qwen3_moe_with_tokenizer"), out = folder_ / "out";
  Convert(in, out, "w8a8_int8");
  for (const char* name : {"tokenizer.json", "tokenizer_config.json", "generation_config.json"})
    EXPECT_EQ(ReadAll(out / name), ReadAll(in / name)) << name;
  const auto config = nlohmann::json::parse(ReadAll(out / "config.json"));
  const auto& quantization = config.at("quantization_config");
  EXPECT_EQ(quantization.at("format"), "int-quantized");
  const auto ignore = quantization.at("ignore").get<std::vector<std::string>>();
  EXPECT_NE(std::ranges::find(ignore, "model.layers.0.mlp.gate"), ignore.end());
}

TEST_F(Quantize, ShardsHaveAnIndexAndTheSameTensors) {
  const fs::path one = folder_ / "one", many = folder_ / "many";
  Convert(Golden("olmoe_clip"), one, "fp8_block");
  QuantizeOptions options;
  options.shard_bytes = 20000;
  Convert(Golden("olmoe_clip"), many, "fp8_block", options);
  EXPECT_TRUE(fs::exists(one / "model.safetensors"));
  EXPECT_FALSE(fs::exists(many / "model.safetensors"));
  EXPECT_TRUE(fs::exists(many / "model.safetensors.index.json"));
  EXPECT_EQ(Logits(many), Logits(one));
}

TEST_F(Quantize, TheReportSaysWhatChanged) {
  const QuantizeReport report =
      Convert(Golden("qwen3_moe_with_tokenizer"), folder_ / "out", "w4a16_g32");
  const ModelFolder in(Golden("qwen3_moe_with_tokenizer"));
  const std::string module = "model.layers.0.mlp.experts.1.gate_proj";
  const auto found = std::ranges::find(report.tensors, module, &TensorReport::name);
  ASSERT_NE(found, report.tensors.end());
  // The same figures from the definition.
  const ModelFolder::Tensor& tensor = in.tensors.at(module + ".weight");
  const size_t rows = tensor.shape[0], cols = tensor.shape[1];
  std::vector<float> values(rows * cols), row(cols);
  for (size_t i = 0; i < values.size(); ++i) {
    BF16 stored;
    std::memcpy(&stored, tensor.bytes.data() + 2 * i, 2);
    values[i] = ToFloat(stored);
  }
  const quant::QuantMatrix codes = quant::QuantizeMatrix(
      ConstRows(values.data(), rows, cols), OnlineQuantization("w4a16_g32").scheme().weights);
  double errors = 0, squares = 0, largest = 0;
  for (size_t n = 0; n < rows; ++n) {
    quant::DecodeMatrixRow(codes.View().AsBank(), 0, n, row.data());
    for (size_t k = 0; k < cols; ++k) {
      const double value = values[n * cols + k], error = value - double{row[k]};
      errors += error * error;
      squares += value * value;
      largest = std::max(largest, std::fabs(error));
    }
  }
  EXPECT_NEAR(found->rms_error, std::sqrt(errors / squares), 1e-12);
  EXPECT_EQ(found->max_error, largest);
  EXPECT_EQ(found->bytes_before, rows * cols * 2);
  EXPECT_EQ(found->bytes_after, rows * cols / 2 + rows * (cols / 32) * 2 + 16);
  EXPECT_EQ(found->elements, rows * cols);
  EXPECT_EQ(found->from, "BF16");
  EXPECT_TRUE(report.warnings.empty());
}

// --- Interruptions -------------------------------------------------------------------------------

TEST_F(Quantize, AStoppedRunIsContinuedToTheSameBytes) {
  for (const char* scheme : {"awq", "fp8_block", "w4a16_g32", "gguf-q4_0"}) {
    const bool is_file = std::string(scheme).starts_with("gguf");
    const fs::path whole = folder_ / (std::string("whole-") + scheme + (is_file ? ".gguf" : ""));
    const fs::path out = folder_ / (std::string("out-") + scheme + (is_file ? ".gguf" : ""));
    Convert(Golden("qwen3_moe_with_tokenizer"), whole, scheme);
    // Batches hold whole small models: one thread and slabs cannot cut them, progress can.
    QuantizeOptions options;
    size_t calls = 0;
    options.max_batch_units = 3;
    options.on_progress = [&](size_t, size_t) { return ++calls < 4; };
    ExpectError(ErrorCode::kCancelled, {"stopped", ".partial"},
                [&] { Convert(Golden("qwen3_moe_with_tokenizer"), out, scheme, options); });
    EXPECT_FALSE(fs::exists(out));
    EXPECT_TRUE(fs::exists(out.string() + ".partial"));
    const QuantizeReport report = Convert(Golden("qwen3_moe_with_tokenizer"), out, scheme);
    EXPECT_GT(report.resumed_bytes, 0u) << scheme;
    EXPECT_FALSE(fs::exists(out.string() + ".partial"));
    auto expected = Contents(whole), found = Contents(out);
    if (is_file) {
      // Their names are in the metadata; all else is equal.
      EXPECT_EQ(found[""].size() / 64, expected[""].size() / 64);
      EXPECT_EQ(Logits(out), Logits(whole));
    } else {
      EXPECT_EQ(found, expected) << scheme;
    }
    QuantizeReport unbroken =
        Convert(Golden("qwen3_moe_with_tokenizer"),
                folder_ / (std::string("third-") + scheme + (is_file ? ".gguf" : "")), scheme);
    for (size_t i = 0; i < report.tensors.size(); ++i) {
      EXPECT_EQ(report.tensors[i].rms_error, unbroken.tensors[i].rms_error);
      EXPECT_EQ(report.tensors[i].max_error, unbroken.tensors[i].max_error);
      EXPECT_EQ(report.tensors[i].from, unbroken.tensors[i].from);
    }
  }
}

TEST_F(Quantize, AKilledRunIsContinuedToTheSameBytes) {
  const fs::path whole = folder_ / "a" / "m.gguf", out = folder_ / "b" / "m.gguf";
  fs::create_directories(folder_ / "a");
  fs::create_directories(folder_ / "b");
  Convert(Golden("deepseek_v3"), whole, "q5_1");
  const pid_t pid = fork();
  ASSERT_GE(pid, 0);
  if (pid == 0) {
    ThreadPool pool(1);
    QuantizeOptions options;
    options.scheme = "q5_1";
    options.sync_bytes = 0;
    options.max_batch_units = 2;
    size_t calls = 0;
    options.on_progress = [&](size_t, size_t) {
      if (++calls == 9) raise(SIGKILL);
      return true;
    };
    QuantizeCheckpoint(Golden("deepseek_v3"), out, options, pool);
    _exit(1);
  }
  int status = 0;
  waitpid(pid, &status, 0);
  ASSERT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  // A journal whose last line was cut short.
  std::ofstream(folder_ / "b" / "m.gguf.partial" / ".switchyard-quantize", std::ios::app)
      << "77 0x";
  const QuantizeReport report = Convert(Golden("deepseek_v3"), out, "q5_1");
  EXPECT_GT(report.resumed_bytes, 0u);
  EXPECT_EQ(ReadAll(out), ReadAll(whole));
}

TEST_F(Quantize, ThreadsDoNotChangeTheBytes) {
  fs::create_directories(folder_ / "a");
  fs::create_directories(folder_ / "b");
  ThreadPool one(1);
  QuantizeOptions options;
  options.scheme = "q4_1";
  QuantizeCheckpoint(Golden("olmoe_clip"), folder_ / "a" / "m.gguf", options, one);
  Convert(Golden("olmoe_clip"), folder_ / "b" / "m.gguf", "q4_1");
  EXPECT_EQ(ReadAll(folder_ / "a" / "m.gguf"), ReadAll(folder_ / "b" / "m.gguf"));
}

TEST_F(Quantize, AnotherRunIsNotContinued) {
  const fs::path out = folder_ / "out";
  QuantizeOptions stop;
  stop.max_batch_units = 2;
  stop.on_progress = [](size_t, size_t) { return false; };
  EXPECT_THROW(Convert(Golden("olmoe_clip"), out, "fp8_block", stop), Error);
  ExpectError(ErrorCode::kFailedPrecondition, {"unfinished", "--force"},
              [&] { Convert(Golden("olmoe_clip"), out, "w8a8_int8"); });
  QuantizeOptions force;
  force.force = true;
  const QuantizeReport report = Convert(Golden("olmoe_clip"), out, "w8a8_int8", force);
  EXPECT_EQ(report.resumed_bytes, 0u);
  EXPECT_EQ(Logits(out), Logits(Golden("olmoe_clip"), "w8a8_int8"));
}

TEST_F(Quantize, AChangedInputIsNotContinued) {
  const ModelFolder in(Golden("olmoe_clip"));
  in.Write();
  const fs::path out = folder_ / "out";
  QuantizeOptions stop;
  stop.max_batch_units = 2;
  stop.on_progress = [](size_t, size_t) { return false; };
  EXPECT_THROW(Convert(in.path(), out, "fp8_block", stop), Error);
  const fs::path weights = in.path() / "model.safetensors";
  fs::last_write_time(weights, fs::last_write_time(weights) + std::chrono::seconds(5));
  ExpectError(ErrorCode::kFailedPrecondition, {"another input"},
              [&] { Convert(in.path(), out, "fp8_block"); });
}

// --- Refusals ------------------------------------------------------------------------------------

TEST_F(Quantize, ExistingOutputIsReplacedByForceAlone) {
  const fs::path out = folder_ / "out", file = folder_ / "out.gguf";
  Convert(Golden("olmoe_clip"), out, "fp8_block");
  Convert(Golden("olmoe_clip"), file, "q8_0");
  for (const fs::path& path : {out, file}) {
    const bool is_file = path == file;
    ExpectError(ErrorCode::kFailedPrecondition, {"exists", "--force"},
                [&] { Convert(Golden("olmoe_clip"), path, is_file ? "q4_0" : "mxfp4"); });
    QuantizeOptions force;
    force.force = true;
    Convert(Golden("olmoe_clip"), path, is_file ? "gguf-bf16" : "bf16", force);
    EXPECT_EQ(Logits(path), Logits(Golden("olmoe_clip")));
    EXPECT_FALSE(fs::exists(path.string() + ".replaced"));
  }
  // Nothing that is no model is replaced.
  const fs::path other = folder_ / "other";
  fs::create_directories(other);
  std::ofstream(other / "letters.txt") << "dear";
  QuantizeOptions force;
  force.force = true;
  ExpectError(ErrorCode::kFailedPrecondition, {"no config.json"},
              [&] { Convert(Golden("olmoe_clip"), other, "bf16", force); });
  EXPECT_EQ(ReadAll(other / "letters.txt"), "dear");
}

TEST_F(Quantize, OutputsThatCannotBe) {
  const ModelFolder in(Golden("olmoe_clip"));
  in.Write();
  ExpectError(ErrorCode::kInvalidArgument, {"OUT is IN"},
              [&] { Convert(in.path(), in.path() / ".", "bf16"); });
  ExpectError(ErrorCode::kInvalidArgument, {"OUT lies in IN"},
              [&] { Convert(in.path(), in.path() / "sub", "bf16"); });
  ExpectError(ErrorCode::kInvalidArgument, {"IN lies in OUT"},
              [&] { Convert(in.path(), in.path().parent_path(), "bf16"); });
  const fs::path source = folder_ / "source.gguf", link = folder_ / "link.gguf";
  Convert(in.path(), source, "q8_0");
  fs::create_hard_link(source, link);
  QuantizeOptions force;
  force.force = true;
  ExpectError(ErrorCode::kInvalidArgument, {"link.gguf", "source.gguf", "a file of IN"},
              [&] { Convert(source, link, "q4_0", force); });
  ExpectError(ErrorCode::kInvalidArgument, {".gguf"},
              [&] { Convert(in.path(), folder_ / "x", "q8_0"); });
  ExpectError(ErrorCode::kInvalidArgument, {"folder"},
              [&] { Convert(in.path(), folder_ / "x.gguf", "bf16"); });
  ExpectError(ErrorCode::kInvalidArgument, {"does not exist"},
              [&] { Convert(in.path(), folder_ / "no" / "x", "bf16"); });
  ExpectError(ErrorCode::kInvalidArgument, {"nonsense", "w4a16_g32", "gguf-q4_k"},
              [&] { Convert(in.path(), folder_ / "x", "nonsense"); });
}

TEST_F(Quantize, NanIsNamed) {
  ModelFolder in(Golden("olmoe_clip"));
  const uint16_t nan = 0x7fc0;
  std::memcpy(in.tensors.at("model.layers.1.mlp.experts.2.down_proj.weight").bytes.data() + 10,
              &nan, 2);
  in.Write();
  ExpectError(ErrorCode::kCorruptData, {"model.layers.1.mlp.experts.2.down_proj", "[0, 5]", "nan"},
              [&] { Convert(in.path(), folder_ / "x", "fp8_block"); });
}

TEST_F(Quantize, WhatGgufCannotSayIsRefused) {
  ModelFolder in(Golden("qwen3_moe_with_tokenizer"));
  in.config["use_sliding_window"] = true;
  in.config["sliding_window"] = 4;
  in.Write();
  ExpectError(ErrorCode::kUnsupported, {"window of layer 0", "4", "0"},
              [&] { Convert(in.path(), folder_ / "x.gguf", "q8_0"); });
  EXPECT_FALSE(fs::exists(folder_ / "x.gguf.partial"));
}

}  // namespace
}  // namespace switchyard
