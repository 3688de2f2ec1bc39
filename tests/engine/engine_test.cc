// Requests side by side: queueing, stopping, cancelling, limits; and perplexity.
#include "switchyard/engine/engine.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "switchyard/engine/evaluate.h"
#include "testing/errors.h"
#include "testing/golden_model.h"
#include "testing/goldens.h"
#include "testing/model_folder.h"

namespace switchyard {
namespace {

class EngineTest : public ::testing::Test {
 protected:
  EngineTest() : golden_(testing::LocalGoldenDir() / "mixtral_swa"), pool_(2) {
    ModelOptions options;
    options.moe.act_dtype = "f32";
    model_ = Model::Load(ModelFiles::OpenFolder(golden_.checkpoint()), options, pool_);
  }
  void MakeExecutor(size_t max_sequences, size_t context = 0) {
    executor_ = std::make_unique<Executor>(*model_, pool_,
                                           ExecutorOptions{context, max_sequences, DType::kF32});
  }
  GenerationRequest Request(size_t prompt, size_t tokens) const {
    GenerationRequest request;
    request.prompt = golden_.Ids("p" + std::to_string(prompt) + ".input_ids");
    request.max_new_tokens = tokens;
    return request;
  }
  std::vector<int32_t> Expected(size_t prompt) const {
    return golden_.Ids("p" + std::to_string(prompt) + ".greedy_ids");
  }

  struct Outcome {
    std::vector<int32_t> tokens;
    FinishReason finish = FinishReason::kNone;
  };
  static std::map<RequestId, Outcome> Drain(Engine& engine) {
    std::map<RequestId, Outcome> outcomes;
    while (engine.HasWork()) {
      for (const TokenEvent& event : engine.Step()) {
        if (event.token >= 0) outcomes[event.request].tokens.push_back(event.token);
        if (event.finish != FinishReason::kNone) outcomes[event.request].finish = event.finish;
      }
    }
    return outcomes;
  }

  testing::GoldenModel golden_;
  ThreadPool pool_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<Executor> executor_;
};

TEST_F(EngineTest, MoreRequestsThanPlacesQueueInOrderAndAnswerTheSame) {  // bug-log 22, 117
  MakeExecutor(2);
  Engine engine(*executor_, {.prefill_chunk = 3, .max_sequences = 2});
  std::map<RequestId, size_t> prompts;
  for (int round = 0; round < 2; ++round) {
    for (size_t p = 0; p < 4; ++p) prompts[engine.Submit(Request(p, Expected(p).size()))] = p;
  }
  engine.Step();
  EXPECT_EQ(engine.num_running(), 2u);
  EXPECT_EQ(engine.num_waiting(), 6u);
  std::map<RequestId, Outcome> outcomes = Drain(engine);
  // The very first step computed prompt tokens only for the first request; p0 has one token, so its
  // answer began there.
  for (auto& [id, outcome] : outcomes) {
    const std::vector<int32_t> expected = Expected(prompts.at(id));
    EXPECT_EQ(outcome.finish, FinishReason::kLength);
    const std::vector<int32_t> tail(
        expected.end() - static_cast<std::ptrdiff_t>(outcome.tokens.size()), expected.end());
    EXPECT_EQ(outcome.tokens, tail);
    EXPECT_GE(outcome.tokens.size() + 1, expected.size());
  }
  EXPECT_EQ(outcomes.size(), 8u);
  EXPECT_EQ(executor_->cache().used_blocks(), 0u);
}

TEST_F(EngineTest, StopsOnAnId) {
  MakeExecutor(1);
  Engine engine(*executor_, {});
  GenerationRequest request = Request(1, 24);
  request.stop_ids = {Expected(1)[5]};
  const RequestId id = engine.Submit(std::move(request));
  const auto outcomes = Drain(engine);
  const std::vector<int32_t> expected = Expected(1);
  size_t first = 0;
  while (expected[first] != expected[5]) ++first;
  EXPECT_EQ(outcomes.at(id).tokens.size(), first + 1);
  EXPECT_EQ(outcomes.at(id).finish, FinishReason::kStop);
}

TEST_F(EngineTest, EndsAtTheContext) {
  MakeExecutor(1, 20);
  Engine engine(*executor_, {});
  const RequestId id = engine.Submit(Request(1, 1000));
  const auto outcomes = Drain(engine);
  EXPECT_EQ(outcomes.at(id).finish, FinishReason::kContext);
  EXPECT_EQ(outcomes.at(id).tokens.size(), 20u - Request(1, 1).prompt.size());
}

TEST_F(EngineTest, CancelFreesEverythingAtOnce) {
  MakeExecutor(2);
  Engine engine(*executor_, {.prefill_chunk = 2, .max_sequences = 2});
  const RequestId running = engine.Submit(Request(3, 50));
  const RequestId other = engine.Submit(Request(2, 24));
  const RequestId waiting = engine.Submit(Request(1, 50));
  engine.Step();  // the first is in the middle of its prompt
  engine.Cancel(running);
  engine.Cancel(waiting);
  engine.Cancel(12345);
  const auto outcomes = Drain(engine);
  EXPECT_EQ(outcomes.at(running).finish, FinishReason::kCancelled);
  EXPECT_EQ(outcomes.at(waiting).finish, FinishReason::kCancelled);
  EXPECT_TRUE(outcomes.at(waiting).tokens.empty());
  EXPECT_EQ(outcomes.at(other).tokens, Expected(2)) << "the neighbour does not notice";
  EXPECT_EQ(executor_->cache().used_blocks(), 0u);
}

TEST_F(EngineTest, BadRequestsAreRefused) {
  using testing::ExpectError;
  MakeExecutor(1, 16);
  Engine engine(*executor_, {});
  ExpectError(ErrorCode::kInvalidArgument, {"prompt is empty"}, [&] { engine.Submit({}); });
  GenerationRequest long_prompt = Request(0, 4);
  long_prompt.prompt.assign(16, 1);
  ExpectError(ErrorCode::kInvalidArgument, {"16 tokens", "context of 16"},
              [&] { engine.Submit(long_prompt); });
  long_prompt.prompt.assign(15, 1);
  EXPECT_NO_THROW(engine.Submit(long_prompt));
  GenerationRequest bad_id = Request(0, 4);
  bad_id.prompt.push_back(256);
  ExpectError(ErrorCode::kInvalidArgument, {"token 256", "vocabulary of 256"},
              [&] { engine.Submit(bad_id); });
  GenerationRequest bad_sampling = Request(0, 4);
  bad_sampling.sampling.top_p = 3;
  ExpectError(ErrorCode::kInvalidArgument, {"top_p"}, [&] { engine.Submit(bad_sampling); });
  GenerationRequest nothing = Request(0, 0);
  const RequestId id = engine.Submit(std::move(nothing));
  EXPECT_EQ(Drain(engine).at(id).finish, FinishReason::kLength);
  ExpectError(ErrorCode::kInvalidArgument, {"--ctx 99999", "512"}, [&] {
    Executor(*model_, pool_, ExecutorOptions{99999, 1, DType::kF32});
  });
}

TEST_F(EngineTest, ATokenOutsideTheVocabularyIsNamedAndTheSequenceGoesOn) {
  MakeExecutor(1);
  const SequenceId sequence = executor_->Start(10);
  const std::vector<int32_t> bad = {3, 256};
  const ExecutorChunk chunk{sequence, bad, LogitsWanted::kLast};
  testing::ExpectError(ErrorCode::kInvalidArgument, {"token 256", "position 1", "256 entries"},
                       [&] {
                         executor_->Forward({&chunk, 1});
                       });
  EXPECT_EQ(executor_->Length(sequence), 0u);
  const std::vector<int32_t> good = {3, 255};
  const ExecutorChunk again{sequence, good, LogitsWanted::kLast};
  EXPECT_EQ(executor_->Forward({&again, 1}).rows, 1u);
  EXPECT_EQ(executor_->Length(sequence), 2u);
}

// A model whose logits are all NaN for one request: it ends with the reason, and the engine goes
// on.
TEST_F(EngineTest, AnErrorEndsTheRequestAndNotTheEngine) {
  testing::ModelFolder folder(golden_.checkpoint());
  auto& embedding = folder.tensors.at("model.embed_tokens.weight");
  const size_t row = embedding.bytes.size() / embedding.shape[0];
  for (size_t i = 0; i < row;
       i += 2) {  // token 7 is NaN; the head is tied, so only its own logit is
    embedding.bytes[7 * row + i] = std::byte{0xc0};
    embedding.bytes[7 * row + i + 1] = std::byte{0x7f};
  }
  ModelOptions options;
  options.moe.act_dtype = "f32";
  const std::unique_ptr<Model> model = Model::Load(folder.Write(), options, pool_);
  Executor executor(*model, pool_, ExecutorOptions{0, 2, DType::kF32});
  Engine engine(executor, {.prefill_chunk = 64, .max_sequences = 2});
  GenerationRequest bad;
  bad.prompt = {5, 7};
  bad.max_new_tokens = 5;
  GenerationRequest good;
  good.prompt = {5, 6};
  good.max_new_tokens = 5;
  const RequestId bad_id = engine.Submit(std::move(bad));
  const RequestId good_id = engine.Submit(std::move(good));
  std::map<RequestId, std::vector<TokenEvent>> events;
  while (engine.HasWork()) {
    for (const TokenEvent& event : engine.Step()) events[event.request].push_back(event);
  }
  ASSERT_EQ(events.at(bad_id).size(), 1u);
  EXPECT_EQ(events.at(bad_id)[0].finish, FinishReason::kError);
  ASSERT_NE(events.at(bad_id)[0].error, nullptr);
  EXPECT_NE(events.at(bad_id)[0].error->message().find("NaN"), std::string::npos);
  EXPECT_EQ(events.at(good_id).size(), 5u) << "the neighbour in the same pass does not notice";
  EXPECT_EQ(executor.cache().used_blocks(), 0u);
}

TEST_F(EngineTest, TwoRunsWithOneSeedGiveOneText) {
  MakeExecutor(2);
  std::vector<std::vector<int32_t>> texts;
  for (bool with_neighbour : {false, true}) {
    Engine engine(*executor_, {.prefill_chunk = 4, .max_sequences = 2});
    GenerationRequest request = Request(1, 20);
    request.sampling = {.temperature = 1.0, .seed = 7};
    if (with_neighbour) engine.Submit(Request(3, 9));
    const RequestId id = engine.Submit(std::move(request));
    texts.push_back(Drain(engine).at(id).tokens);
  }
  EXPECT_EQ(texts[0], texts[1]);
}

// Perplexity against log-softmax by hand, windows included.
TEST_F(EngineTest, PerplexityOfWindows) {
  MakeExecutor(1);
  const std::vector<int32_t> ids = golden_.PromptAndAnswer(3);
  const auto nll_of = [&](size_t begin, size_t end, size_t first) {
    const SequenceId sequence = executor_->Start(end - begin);
    const ExecutorChunk chunk{sequence, std::span(ids).subspan(begin, end - begin),
                              LogitsWanted::kAll};
    const Rows logits = executor_->Forward({&chunk, 1});
    double sum = 0;
    for (size_t i = first; i < end - begin; ++i) {
      double all = 0;
      for (float l : logits.RowSpan(i - 1)) all += std::exp(static_cast<double>(l));
      sum += std::log(all) - logits.Row(i - 1)[ids[begin + i]];
    }
    executor_->End(sequence);
    return sum;
  };
  const size_t n = ids.size();
  const PerplexityResult whole = Perplexity(*executor_, ids, {});
  EXPECT_EQ(whole.num_scored, n - 1);
  EXPECT_NEAR(whole.mean_nll, nll_of(0, n, 1) / static_cast<double>(n - 1), 1e-9);
  EXPECT_NEAR(Perplexity(*executor_, ids, {.chunk = 5}).mean_nll, whole.mean_nll, 1e-12);
  const PerplexityResult windows = Perplexity(*executor_, ids, {.window = 10});
  double sum = 0;
  size_t scored = 0;
  for (size_t begin = 0; begin < n; begin += 10) {
    const size_t end = std::min(n, begin + 10);
    sum += nll_of(begin, end, 1);
    scored += end - begin - 1;
  }
  EXPECT_EQ(windows.num_scored, scored);
  EXPECT_NEAR(windows.mean_nll, sum / static_cast<double>(scored), 1e-9);
  const PerplexityResult overlapping = Perplexity(*executor_, ids, {.window = 10, .stride = 4});
  EXPECT_EQ(overlapping.num_scored, n - 1) << "every token but the first once";
  testing::ExpectError(ErrorCode::kInvalidArgument, {"at least 2 tokens"},
                       [&] { Perplexity(*executor_, std::span(ids).first(1), {}); });
  testing::ExpectError(ErrorCode::kInvalidArgument, {"window"},
                       [&] { Perplexity(*executor_, ids, {.window = 9999}); });
  testing::ExpectError(ErrorCode::kInvalidArgument, {"stride"},
                       [&] { Perplexity(*executor_, ids, {.window = 8, .stride = 9}); });
}

}  // namespace
}  // namespace switchyard
