// Recorded models of every known architecture, through loading, routing, both runners and the
// engine: logits, hidden states, routing and greedy answers; and the promise that batches, chunks
// and threads do not change a bit.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "switchyard/core/cpu.h"
#include "switchyard/engine/engine.h"
#include "switchyard/engine/executor.h"
#include "switchyard/model/model.h"
#include "testing/golden_model.h"
#include "testing/goldens.h"
#include "testing/random.h"

namespace switchyard {
namespace {

using testing::GoldenModel;

struct Setup {
  std::string runner = "aiter";
  size_t threads = 1;
  DType kv_dtype = DType::kF32;
};

// A loaded golden with everything that runs it.
struct Loaded {
  Loaded(const GoldenModel& golden, const Setup& setup, size_t max_sequences = 4)
      : pool(setup.threads) {
    ModelOptions options;
    options.moe.runner = setup.runner;
    options.moe.act_dtype = "f32";
    model = Model::Load(ModelFiles::OpenFolder(golden.checkpoint()), options, pool);
    ExecutorOptions executor_options;
    executor_options.max_sequences = max_sequences;
    executor_options.kv_dtype = setup.kv_dtype;
    executor = std::make_unique<Executor>(*model, pool, executor_options);
  }
  ThreadPool pool;
  std::unique_ptr<Model> model;
  std::unique_ptr<Executor> executor;
};

// Logits of every position, the sequence cut into chunks of `chunk` tokens (0 = whole).
std::vector<float> AllLogits(Executor& executor, std::span<const int32_t> ids, size_t chunk,
                             ForwardObserver* observer = nullptr) {
  std::vector<float> logits;
  const SequenceId sequence = executor.Start(ids.size());
  for (size_t at = 0; at < ids.size();) {
    const size_t count = chunk == 0 ? ids.size() : std::min(chunk, ids.size() - at);
    const ExecutorChunk piece{sequence, ids.subspan(at, count), LogitsWanted::kAll};
    const Rows rows = executor.Forward({&piece, 1}, observer);
    for (size_t r = 0; r < rows.rows; ++r)
      logits.insert(logits.end(), rows.Row(r), rows.Row(r) + rows.cols);
    at += count;
  }
  executor.End(sequence);
  return logits;
}

double MaxDifference(std::span<const float> a, std::span<const float> b) {
  double largest = 0;
  for (size_t i = 0; i < a.size(); ++i)
    largest = std::max(largest, std::abs(static_cast<double>(a[i]) - b[i]));
  return largest;
}

std::span<const float> Floats(const TensorView& view) {
  return {reinterpret_cast<const float*>(view.data), view.NumElements()};
}

class Recorder : public ForwardObserver {
 public:
  void OnLayer(size_t layer, ConstRows hidden) override {
    for (size_t t = 0; t < hidden.rows; ++t) {
      hidden_[layer].insert(hidden_[layer].end(), hidden.Row(t), hidden.Row(t) + hidden.cols);
    }
  }
  void OnRouting(size_t layer, const moe::TopKOutput& topk) override {
    ids_[layer].insert(ids_[layer].end(), topk.ids.begin(), topk.ids.end());
    weights_[layer].insert(weights_[layer].end(), topk.weights.begin(), topk.weights.end());
  }
  std::map<size_t, std::vector<float>> hidden_;
  std::map<size_t, std::vector<int32_t>> ids_;
  std::map<size_t, std::vector<float>> weights_;
};

// Columns are ordered by choice here and by id in the record.
void ExpectSameRouting(const GoldenModel& golden, size_t prompt, size_t layer,
                       const Recorder& recorder, size_t top_k) {
  const std::string key = "p" + std::to_string(prompt) + ".router_";
  const std::string suffix = "." + std::to_string(layer);
  const TensorView ids = golden.Tensor(key + "ids" + suffix);
  const std::span<const float> weights = Floats(golden.Tensor(key + "weights" + suffix));
  const auto* expected_ids = reinterpret_cast<const int32_t*>(ids.data);
  const size_t tokens = ids.NumElements() / top_k;
  for (size_t t = 0; t < tokens; ++t) {
    std::map<int32_t, float> chosen;
    for (size_t k = 0; k < top_k; ++k)
      chosen[recorder.ids_.at(layer)[t * top_k + k]] = recorder.weights_.at(layer)[t * top_k + k];
    ASSERT_EQ(chosen.size(), top_k);
    size_t k = 0;
    for (const auto& [id, weight] : chosen) {
      ASSERT_EQ(id, expected_ids[t * top_k + k]) << "token " << t << " layer " << layer;
      ASSERT_NEAR(weight, weights[t * top_k + k], 5e-5) << "token " << t << " layer " << layer;
      ++k;
    }
  }
}

void CheckAgainstRecord(const GoldenModel& golden, const Setup& setup) {
  Loaded loaded(golden, setup);
  for (size_t p = 0; p < GoldenModel::kNumPrompts; ++p) {
    SCOPED_TRACE("prompt " + std::to_string(p));
    const std::string key = "p" + std::to_string(p) + ".";
    const std::vector<int32_t> ids = golden.PromptAndAnswer(p);
    Recorder recorder;
    const std::vector<float> logits = AllLogits(*loaded.executor, ids, 0, &recorder);
    const std::span<const float> expected = Floats(golden.Tensor(key + "logits"));
    ASSERT_LE(expected.size(), logits.size());
    EXPECT_LT(MaxDifference(expected, logits), golden.logits_tolerance());
    for (const auto& [layer, hidden] : recorder.hidden_) {
      const std::string name = key + "hidden." + std::to_string(layer);
      if (golden.Has(name)) {
        EXPECT_LT(MaxDifference(Floats(golden.Tensor(name)), hidden), golden.hidden_tolerance())
            << name;
      }
    }
    for (const auto& [layer, chosen] : recorder.ids_) {
      ExpectSameRouting(golden, p, layer, recorder, loaded.model->config().top_k);
    }
  }
}

// The engine's greedy answer, all four prompts at once.
void CheckGreedy(const GoldenModel& golden, const Setup& setup) {
  Loaded loaded(golden, setup);
  Engine engine(*loaded.executor, {.prefill_chunk = 5, .max_sequences = 4});
  std::map<RequestId, size_t> prompts;
  std::map<size_t, std::vector<int32_t>> answers;
  for (size_t p = 0; p < GoldenModel::kNumPrompts; ++p) {
    GenerationRequest request;
    request.prompt = golden.Ids("p" + std::to_string(p) + ".input_ids");
    request.max_new_tokens = golden.Ids("p" + std::to_string(p) + ".greedy_ids").size();
    prompts[engine.Submit(std::move(request))] = p;
  }
  while (engine.HasWork()) {
    for (const TokenEvent& event : engine.Step()) {
      if (event.token >= 0) answers[prompts.at(event.request)].push_back(event.token);
    }
  }
  for (size_t p = 0; p < GoldenModel::kNumPrompts; ++p) {
    EXPECT_EQ(answers[p], golden.Ids("p" + std::to_string(p) + ".greedy_ids")) << "prompt " << p;
  }
  EXPECT_EQ(loaded.executor->cache().used_blocks(), 0u);
}

class GoldenModelsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    models_ = testing::GoldenModels();
    ASSERT_FALSE(models_.empty()) << "tests/golden holds at least one model per family";
    if (!testing::GoldenDir())
      std::printf("[   NOTE   ] the large golden set is absent; the set in tests/golden runs\n");
  }
  void TearDown() override { UncapIsa(); }
  std::vector<GoldenModel> models_;
};

TEST_F(GoldenModelsTest, LogitsHiddenStatesAndRoutingOnEveryIsaAndRunner) {
  for (Isa isa : SupportedIsas()) {
    CapIsa(isa);
    for (const GoldenModel& golden : models_) {
      for (const char* runner : {"aiter", "reference"}) {
        SCOPED_TRACE(golden.name() + " --isa " + std::string(IsaName(isa)) + " --moe-runner " +
                     runner);
        CheckAgainstRecord(golden, {.runner = runner, .threads = 2});
      }
    }
  }
}

TEST_F(GoldenModelsTest, GreedyAnswersInOneBatch) {
  for (const GoldenModel& golden : models_) {
    SCOPED_TRACE(golden.name());
    CheckGreedy(golden, {.threads = 2});
  }
}

// One sequence alone and whole is the reference; chunks, batches and threads must give the same
// bits.
TEST_F(GoldenModelsTest, BitsDoNotDependOnChunksBatchesOrThreads) {
  for (Isa isa : SupportedIsas()) {
    CapIsa(isa);
    for (const GoldenModel& golden : models_) {
      for (DType kv_dtype : {DType::kF32, DType::kBF16}) {
        SCOPED_TRACE(golden.name() + " --isa " + std::string(IsaName(isa)) + " kv " +
                     std::string(DTypeName(kv_dtype)));
        std::vector<std::vector<int32_t>> ids;
        std::vector<std::vector<float>> alone;
        Loaded one(golden, {.threads = 1, .kv_dtype = kv_dtype});
        for (size_t p = 0; p < GoldenModel::kNumPrompts; ++p) {
          ids.push_back(golden.PromptAndAnswer(p));
          alone.push_back(AllLogits(*one.executor, ids[p], 0));
        }
        for (size_t threads : {1u, 2u, 3u}) {
          Loaded many(golden, {.threads = threads, .kv_dtype = kv_dtype});
          for (size_t chunk : {1u, 3u, 16u}) {
            for (size_t p = 0; p < ids.size(); ++p) {
              const std::vector<float> chunked = AllLogits(*many.executor, ids[p], chunk);
              ASSERT_EQ(
                  std::memcmp(chunked.data(), alone[p].data(), chunked.size() * sizeof(float)), 0)
                  << "chunk " << chunk << ", " << threads << " threads, prompt " << p;
            }
          }
          std::vector<ExecutorChunk> batch;
          for (const std::vector<int32_t>& sequence : ids) {
            batch.push_back({many.executor->Start(sequence.size()), sequence, LogitsWanted::kAll});
          }
          const Rows rows = many.executor->Forward(batch);
          size_t row = 0;
          for (size_t p = 0; p < ids.size(); ++p) {
            ASSERT_EQ(std::memcmp(rows.Row(row), alone[p].data(), alone[p].size() * sizeof(float)),
                      0)
                << "batch of four, " << threads << " threads, prompt " << p;
            row += ids[p].size();
          }
        }
      }
    }
  }
}

TEST_F(GoldenModelsTest, AWarmDecodeStepAllocatesNothing) {
  const GoldenModel& golden = models_.front();
  Loaded loaded(golden, {.threads = 2});
  const std::vector<int32_t> ids = golden.PromptAndAnswer(1);
  const SequenceId sequence = loaded.executor->Start(ids.size());
  size_t before = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    const ExecutorChunk chunk{sequence, std::span(ids).subspan(i, 1), LogitsWanted::kLast};
    loaded.executor->Forward({&chunk, 1});
    if (i == 2) before = loaded.executor->arena().num_system_allocations();
  }
  EXPECT_EQ(loaded.executor->arena().num_system_allocations(), before);
}

}  // namespace
}  // namespace switchyard
