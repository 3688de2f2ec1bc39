// Where the time of a forward pass goes, by stage.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

#include "switchyard/core/dtype.h"

namespace switchyard {

// Parts of a forward pass, in their order. Every moment of a profiled run belongs to one of them.
enum class Stage : uint8_t {
  kEmbedding,
  kNorm,        // norms and residual sums
  kQkv,         // projections to queries, keys and values, those of latent attention included
  kRope,        // rotation, norms of heads, and writing the KV cache
  kAttention,   // scores and sums over the cache
  kOutput,      // projection of the heads' results
  kRouter,      // router product, top-k
  kMoePrepare,  // exchange between ranks, sorting rows by expert, quantising them
  kGateUp,      // first product of the experts, and their activation
  kDown,        // second product of the experts
  kCombine,     // weighted sums of the experts' results
  kDense,       // shared experts and MLPs of dense layers
  kHead,        // last norm and logits
  kOther        // between the others: the engine, choosing the next token
};
inline constexpr size_t kNumStages = static_cast<size_t>(Stage::kOther) + 1;

// "gate and up".
std::string_view StageName(Stage stage);

// The units that a product keeps busy, of those whose peak is measured.
enum class Arithmetic : uint8_t { kF32, kBF16, kInt8 };
inline constexpr size_t kNumArithmetics = 3;

// "f32", "bf16" or "int8".
std::string_view ArithmeticName(Arithmetic arithmetic);

// What bounds a product of weights of a type with activations of a type on a CPU that has all
// units: bf16 pairs with bf16 activations, int8 dots with codes of integers or of 4 bits, else f32.
Arithmetic ArithmeticOf(DType weights, DType activations);

// What a stage cannot avoid: bytes of weights and of the KV cache that it reads, once each, and
// operations (2 a multiply-add) of its products.
struct StageWork {
  double bytes = 0;
  double ops = 0;
  Arithmetic arithmetic = Arithmetic::kF32;
};

// Time and work of each stage since Begin. Used by one thread, the one that runs the passes.
class Profile {
 public:
  // What was measured of one stage.
  struct Row {
    uint64_t calls = 0;
    double seconds = 0;
    double bytes = 0;
    std::array<double, kNumArithmetics> ops = {};
  };

  // Time counts from here, first as kOther, until End. What was measured before stays.
  void Begin() { last_ = Clock::now(); }
  void End() { Charge(); }

  // The time from now on belongs to `stage`. Returns the stage that was interrupted, for Leave.
  Stage Enter(Stage stage) {
    Charge();
    ++rows_[static_cast<size_t>(stage)].calls;
    return std::exchange(current_, stage);
  }
  void Leave(Stage interrupted) {
    Charge();
    current_ = interrupted;
  }
  void Add(Stage stage, const StageWork& work) {
    Row& row = rows_[static_cast<size_t>(stage)];
    row.bytes += work.bytes;
    row.ops[static_cast<size_t>(work.arithmetic)] += work.ops;
  }

  const Row& row(Stage stage) const { return rows_[static_cast<size_t>(stage)]; }
  // Between Begin and End: the sum over all stages.
  double seconds() const;

 private:
  using Clock = std::chrono::steady_clock;

  // Adds the time since the last change to the stage it was spent in.
  void Charge() {
    const Clock::time_point now = Clock::now();
    rows_[static_cast<size_t>(current_)].seconds +=
        std::chrono::duration<double>(now - last_).count();
    last_ = now;
  }

  std::array<Row, kNumStages> rows_ = {};
  Stage current_ = Stage::kOther;
  Clock::time_point last_ = {};
};

// The time of a scope belongs to a stage; timers may nest, the inner one then counts alone. Without
// a profile (null) it costs the test for it.
class StageTimer {
 public:
  StageTimer(Profile* profile, Stage stage) : profile_(profile) {
    if (profile_ != nullptr) interrupted_ = profile_->Enter(stage);
  }
  // work() returns what the scope does, a StageWork; it is not called without a profile.
  template <typename Work>
  StageTimer(Profile* profile, Stage stage, const Work& work) : StageTimer(profile, stage) {
    if (profile_ != nullptr) profile_->Add(stage, work());
  }
  ~StageTimer() {
    if (profile_ != nullptr) profile_->Leave(interrupted_);
  }
  StageTimer(const StageTimer&) = delete;
  StageTimer& operator=(const StageTimer&) = delete;

 private:
  Profile* profile_;
  Stage interrupted_ = Stage::kOther;
};

}  // namespace switchyard
