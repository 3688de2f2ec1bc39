// Recorded quantised checkpoints and GGUF files, through loading, every runner and every
// instruction set: logits with plain activations, logits with quantised ones, and the codes that
// quantising on loading arrives at.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>

#include "model/gguf_config.h"
#include "switchyard/core/cpu.h"
#include "switchyard/engine/executor.h"
#include "switchyard/model/gguf.h"
#include "switchyard/model/model.h"
#include "switchyard/model/safetensors.h"
#include "switchyard/moe/layer/register_builtins.h"
#include "testing/goldens.h"

namespace switchyard {
namespace {

namespace fs = std::filesystem;

// What the set suggests for an f32 engine.
constexpr double kLogitsTolerance = 2e-4;
// Of quantised activations: positions that no rounding decision reached, and how far the others
// may be, relative to what quantising the activations changes at all.
constexpr double kPositionTolerance = 1e-3;
constexpr double kLeastNearPositions = 0.5;
constexpr double kMostRms = 1.0 / 3;
constexpr size_t kNumPrompts = 4;

// The scheme that a golden of plain floats is quantised with on loading.
std::string QuantizeOption(const std::string& golden) {
  return golden == "qwen3_moe_quark_int4fp8_online" ? "quark_int4fp8_moe" : "";
}

struct Golden {
  fs::path folder;

  std::string name() const { return folder.filename().string(); }
  std::shared_ptr<const ModelFiles> Open() const {
    if (fs::exists(folder / "checkpoint")) return ModelFiles::OpenFolder(folder / "checkpoint");
    return OpenGgufFiles(folder / ("model-" + name() + ".gguf"));
  }
};

// A recording: prompts, and logits of every position.
class Recording {
 public:
  explicit Recording(const fs::path& path)
      : files_(ModelFiles::OpenFolder(path.parent_path())),
        file_(SafetensorsFile::Parse(path.filename().string(),
                                     files_->Map(path.filename().string()))) {}

  TensorView Tensor(const std::string& name) const {
    const TensorInfo* info = file_.Find(name);
    if (info == nullptr) throw std::runtime_error("the recording has no tensor " + name);
    return file_.View(*info);
  }
  std::vector<int32_t> Ids(const std::string& name) const {
    const TensorView view = Tensor(name);
    std::vector<int32_t> ids;
    for (size_t i = 0; i < view.NumElements(); ++i) {
      int64_t id = 0;
      std::memcpy(&id, view.data + i * sizeof(id), sizeof(id));
      ids.push_back(static_cast<int32_t>(id));
    }
    return ids;
  }
  // The tokens whose logits are there: the prompt, or the prompt and its continuation.
  std::vector<int32_t> Tokens(size_t prompt) const {
    const std::string key = "p" + std::to_string(prompt) + ".";
    std::vector<int32_t> ids = Ids(key + "input_ids");
    const std::vector<int32_t> more = Ids(key + "greedy_ids");
    ids.insert(ids.end(), more.begin(), more.end());
    ids.resize(Tensor(key + "logits").shape[0]);
    return ids;
  }
  std::vector<float> Logits(size_t prompt) const {
    const TensorView view = Tensor("p" + std::to_string(prompt) + ".logits");
    std::vector<float> logits(view.NumElements());
    std::memcpy(logits.data(), view.data, view.NumBytes());
    return logits;
  }

 private:
  std::shared_ptr<const ModelFiles> files_;
  SafetensorsFile file_;
};

// The goldens of tests/golden and of the large set, the latter first; one of each name.
std::vector<Golden> Goldens(const std::string& part) {
  std::vector<fs::path> roots;
  if (testing::GoldenDir()) roots.push_back(*testing::GoldenDir() / part);
  roots.push_back(testing::LocalGoldenDir() / part);
  std::map<std::string, fs::path> folders;
  for (const fs::path& root : roots) {
    if (!fs::is_directory(root)) continue;
    for (const auto& entry : fs::directory_iterator(root)) {
      if (fs::exists(entry.path() / "manifest.json"))
        folders.emplace(entry.path().filename().string(), entry.path());
    }
  }
  std::vector<Golden> goldens;
  for (const auto& [name, folder] : folders) goldens.push_back({folder});
  return goldens;
}

struct Setup {
  std::string runner = "auto";
  bool activation_quant = false;
  std::string quantize = {};
  bool repack = true;
};

struct Loaded {
  Loaded(const std::shared_ptr<const ModelFiles>& files, const Setup& setup) : pool(2) {
    ModelOptions options;
    options.moe.runner = setup.runner;
    options.moe.act_dtype = "f32";
    options.moe.activation_quant = setup.activation_quant;
    options.quantize = setup.quantize;
    options.repack = setup.repack;
    model = Model::Load(files, options, pool);
    ExecutorOptions executor_options;
    executor_options.kv_dtype = DType::kF32;
    executor = std::make_unique<Executor>(*model, pool, executor_options);
  }

  std::vector<float> Logits(std::span<const int32_t> ids) {
    const SequenceId sequence = executor->Start(ids.size());
    const ExecutorChunk chunk{sequence, ids, LogitsWanted::kAll};
    const Rows rows = executor->Forward({&chunk, 1});
    std::vector<float> logits;
    for (size_t r = 0; r < rows.rows; ++r)
      logits.insert(logits.end(), rows.Row(r), rows.Row(r) + rows.cols);
    executor->End(sequence);
    return logits;
  }

  ThreadPool pool;
  std::unique_ptr<Model> model;
  std::unique_ptr<Executor> executor;
};

// The runners that the schemes of all experts list.
std::set<std::string> RunnersFor(const Model& model) {
  std::set<std::string> schemes;
  for (const StoredMatrix& matrix : model.matrices()) {
    if (matrix.module.find(".experts.") != std::string::npos) schemes.insert(matrix.scheme);
  }
  std::set<std::string> runners = {"aiter", "ascend", "reference"};
  for (const std::string& scheme : schemes) {
    const auto& listed = moe::BuiltinRegistry().FindScheme(scheme).runners;
    std::erase_if(runners, [&](const std::string& runner) {
      return std::ranges::find(listed, runner) == listed.end();
    });
  }
  return runners;
}

// Calls body(golden, runner) for all goldens with their runners on all instruction sets.
template <typename Body>
void ForEverySetup(const std::vector<Golden>& goldens, const Body& body) {
  for (const Golden& golden : goldens) {
    const std::string quantize = QuantizeOption(golden.name());
    const Loaded any(golden.Open(), {.quantize = quantize});
    const std::set<std::string> runners = RunnersFor(*any.model);
    EXPECT_TRUE(runners.contains("reference") && runners.contains("aiter")) << golden.name();
    for (Isa isa : SupportedIsas()) {
      CapIsa(isa);
      for (const std::string& runner : runners) {
        SCOPED_TRACE(golden.name() + " --isa " + std::string(IsaName(isa)) + " --moe-runner " +
                     runner);
        body(golden, runner);
      }
    }
    UncapIsa();
  }
}

void CheckPlainActivations(const Golden& golden, const std::string& runner,
                           const Recording& recording) {
  Loaded loaded(golden.Open(), {.runner = runner, .quantize = QuantizeOption(golden.name())});
  for (size_t p = 0; p < kNumPrompts; ++p) {
    const std::vector<float> logits = loaded.Logits(recording.Tokens(p));
    const std::vector<float> expected = recording.Logits(p);
    ASSERT_EQ(logits.size(), expected.size());
    double largest = 0;
    for (size_t i = 0; i < logits.size(); ++i) {
      const double error = std::abs(static_cast<double>(logits[i]) - expected[i]);
      largest = std::isnan(error) ? INFINITY : std::max(largest, error);
    }
    EXPECT_LT(largest, kLogitsTolerance) << "prompt " << p;
  }
}

// Sums over the positions of all prompts.
struct Deviation {
  size_t positions = 0;
  size_t near = 0;        // largest difference to the recording below kPositionTolerance
  double found = 0;       // squares of the differences to the recording
  double quantising = 0;  // squares of those between quantised and plain activations
};

void AddPositions(std::span<const float> logits, std::span<const float> expected,
                  std::span<const float> plain, size_t vocab, Deviation& sum) {
  ASSERT_EQ(logits.size(), expected.size());
  for (size_t at = 0; at < logits.size(); at += vocab, ++sum.positions) {
    double largest = 0;
    for (size_t i = at; i < at + vocab; ++i) {
      const double error = std::abs(static_cast<double>(logits[i]) - expected[i]);
      ASSERT_FALSE(std::isnan(error));
      const double quantising = static_cast<double>(expected[i]) - plain[i];
      largest = std::max(largest, error);
      sum.found += error * error;
      sum.quantising += quantising * quantising;
    }
    if (largest < kPositionTolerance) ++sum.near;
  }
}

void CheckQuantisedActivations(const Golden& golden, const std::string& runner) {
  const Recording plain(golden.folder / "expected_dequant.safetensors");
  const Recording recording(golden.folder / "expected_actquant.safetensors");
  Loaded loaded(
      golden.Open(),
      {.runner = runner, .activation_quant = true, .quantize = QuantizeOption(golden.name())});
  Deviation sum;
  for (size_t p = 0; p < kNumPrompts; ++p) {
    // Continuations may differ between the recordings, prompts do not.
    std::vector<int32_t> ids = recording.Tokens(p);
    const std::vector<int32_t> others = plain.Tokens(p);
    ids.erase(std::ranges::mismatch(ids, others).in1, ids.end());
    ASSERT_GE(ids.size(), recording.Ids("p" + std::to_string(p) + ".input_ids").size());
    const size_t vocab = loaded.model->config().vocab_size;
    const size_t count = ids.size() * vocab;
    const std::vector<float> expected = recording.Logits(p);
    const std::vector<float> without = plain.Logits(p);
    ASSERT_GE(std::min(expected.size(), without.size()), count);
    AddPositions(loaded.Logits(ids), std::span(expected).first(count),
                 std::span(without).first(count), vocab, sum);
  }
  EXPECT_GE(static_cast<double>(sum.near),
            kLeastNearPositions * static_cast<double>(sum.positions));
  EXPECT_LT(std::sqrt(sum.found), kMostRms * std::sqrt(sum.quantising));
}

void NoteWhichSetRuns() {
  if (!testing::GoldenDir())
    std::printf("[   NOTE   ] the large golden set is absent; the set in tests/golden runs\n");
}

TEST(QuantGoldens, LogitsWithPlainActivations) {
  NoteWhichSetRuns();
  const std::vector<Golden> goldens = Goldens("quant");
  ASSERT_GE(goldens.size(), 2u);
  ForEverySetup(goldens, [](const Golden& golden, const std::string& runner) {
    CheckPlainActivations(golden, runner,
                          Recording(golden.folder / "expected_dequant.safetensors"));
  });
}

TEST(QuantGoldens, LogitsOfGgufFiles) {
  NoteWhichSetRuns();
  const std::vector<Golden> goldens = Goldens("gguf");
  ASSERT_GE(goldens.size(), 1u);
  ForEverySetup(goldens, [](const Golden& golden, const std::string& runner) {
    CheckPlainActivations(golden, runner, Recording(golden.folder / "expected.safetensors"));
  });
}

TEST(QuantGoldens, LogitsWithQuantisedActivations) {
  SY_SKIP_WITHOUT_GOLDENS();
  std::vector<Golden> goldens = Goldens("quant");
  std::erase_if(goldens, [](const Golden& golden) {
    return !fs::exists(golden.folder / "expected_actquant.safetensors");
  });
  ASSERT_GE(goldens.size(), 11u);
  ForEverySetup(goldens, &CheckQuantisedActivations);
}

// One expert's matrix as it lies in memory: two's complement nibbles, a scale per output.
void ExpectSameCodes(const moe::ExpertBank& bank, size_t expert, const Recording& recording,
                     const std::string& name) {
  ASSERT_EQ(bank.format.dtype, DType::kI4);
  ASSERT_EQ(bank.format.scale_dtype, DType::kF32);
  const TensorView codes = recording.Tensor(name + ".int4");
  const TensorView scales = recording.Tensor(name + ".int4_scale");
  ASSERT_EQ(codes.shape, (Shape{bank.rows, bank.cols}));
  for (size_t n = 0; n < bank.rows; ++n) {
    for (size_t k = 0; k < bank.cols; ++k) {
      const size_t at = n * bank.cols + k;
      const auto byte = std::to_integer<unsigned>(bank.data[expert][at / 2]);
      const auto nibble = static_cast<int>((byte >> (at % 2 * 4)) & 15u);
      ASSERT_EQ(nibble < 8 ? nibble : nibble - 16,
                static_cast<int>(std::to_integer<int8_t>(codes.data[at])))
          << name << " [" << n << ", " << k << "]";
    }
    float found = 0, expected = 0;
    std::memcpy(&found, bank.scale[expert] + n * sizeof(float), sizeof(float));
    std::memcpy(&expected, scales.data + n * sizeof(float), sizeof(float));
    ASSERT_EQ(found, expected) << name << " scale " << n;
  }
}

TEST(QuantGoldens, QuantisingOnLoadingArrivesAtTheRecordedCodes) {
  SY_SKIP_WITHOUT_GOLDENS();
  const std::string name = "qwen3_moe_quark_int4fp8_online";
  const Golden golden{*testing::GoldenDir() / "quant" / name};
  const Recording recording(golden.folder / "online_weights.safetensors");
  const Loaded loaded(golden.Open(), {.quantize = QuantizeOption(name), .repack = false});
  const moe::ExpertWeights& experts = loaded.model->experts(0);
  ASSERT_EQ(experts.w1.data.size(), 3u);
  for (size_t e = 0; e < experts.w1.data.size(); ++e) {
    const std::string module = "model.layers.1.mlp.experts." + std::to_string(e) + ".";
    ExpectSameCodes(experts.w1, e, recording, module + "gate_proj.weight");
    ExpectSameCodes(experts.w3, e, recording, module + "up_proj.weight");
    ExpectSameCodes(experts.w2, e, recording, module + "down_proj.weight");
  }
}

// Writes a GGUF file of floats as a folder in hub layout, one tensor for each expert.
class HubFolder {
 public:
  HubFolder(const Golden& golden, const GgufModel& gguf)
      : path_(fs::temp_directory_path() / ("switchyard-hub-" + std::to_string(::getpid()))) {
    fs::create_directories(path_);
    std::ifstream manifest(golden.folder / "manifest.json");
    const auto config = nlohmann::json::parse(manifest).at("equivalent_hub_config");
    std::ofstream(path_ / "config.json") << config.dump();
    const std::string architecture(gguf.metadata().Text("general.architecture"));
    const auto add = [&](const std::string& name) {
      const auto file_name = GgufTensorName(architecture, name);
      ASSERT_TRUE(file_name) << name;
      const GgufModel::Tensor* tensor = gguf.Find(*file_name);
      ASSERT_NE(tensor, nullptr) << *file_name;
      tensors_.push_back({name, tensor->View()});
    };
    for (const char* name : {"model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"})
      add(name);
    for (size_t i = 0; i < config.at("num_hidden_layers").get<size_t>(); ++i) {
      const std::string layer = "model.layers." + std::to_string(i) + ".";
      for (const char* name : {"input_layernorm", "post_attention_layernorm", "self_attn.q_proj",
                               "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
                               "self_attn.q_norm", "self_attn.k_norm", "mlp.gate"})
        add(layer + name + ".weight");
      for (const char* name : {"gate_proj", "up_proj", "down_proj"})
        AddExperts(layer + "mlp.experts.", name, gguf, architecture);
    }
    WriteSafetensors(path_ / "model.safetensors", tensors_);
  }
  ~HubFolder() { fs::remove_all(path_); }
  HubFolder(const HubFolder&) = delete;
  HubFolder& operator=(const HubFolder&) = delete;

  std::shared_ptr<const ModelFiles> Open() const { return ModelFiles::OpenFolder(path_); }

 private:
  void AddExperts(const std::string& prefix, const std::string& name, const GgufModel& gguf,
                  const std::string& architecture) {
    const auto file_name = GgufTensorName(architecture, prefix + name);
    ASSERT_TRUE(file_name) << prefix << name;
    const TensorView bank = gguf.Find(*file_name)->View();
    const Shape shape{bank.shape[1], bank.shape[2]};
    const size_t bytes = bank.NumBytes() / bank.shape[0];
    for (size_t e = 0; e < bank.shape[0]; ++e) {
      tensors_.push_back({prefix + std::to_string(e) + "." + name + ".weight",
                          {bank.data + e * bytes, bank.dtype, shape}});
    }
  }

  fs::path path_;
  std::vector<NamedTensor> tensors_;
};

TEST(QuantGoldens, TheSameBf16WeightsGiveTheSameBitsFromBothContainers) {
  SY_SKIP_WITHOUT_GOLDENS();
  const Golden golden{*testing::GoldenDir() / "gguf" / "olmoe_bf16"};
  const GgufModel gguf = GgufModel::Open(golden.Open());
  const HubFolder hub(golden, gguf);
  const Recording recording(golden.folder / "expected.safetensors");
  for (const char* runner : {"aiter", "reference"}) {
    SCOPED_TRACE(runner);
    Loaded from_gguf(golden.Open(), {.runner = runner});
    Loaded from_hub(hub.Open(), {.runner = runner});
    for (size_t p = 0; p < kNumPrompts; ++p) {
      const std::vector<float> a = from_gguf.Logits(recording.Tokens(p));
      const std::vector<float> b = from_hub.Logits(recording.Tokens(p));
      ASSERT_EQ(a.size(), b.size());
      EXPECT_EQ(std::memcmp(a.data(), b.data(), a.size() * sizeof(float)), 0) << "prompt " << p;
    }
  }
}

}  // namespace
}  // namespace switchyard
