// A dispatcher and an activation that Switchyard does not have, added from outside by registration:
// tokens whose router is unsure are not sent to experts at all, and experts use a cubed ReLU.
#include <cmath>
#include <cstdio>
#include <vector>

#include "switchyard/core/thread_pool.h"
#include "switchyard/moe/layer/moe_layer.h"
#include "switchyard/moe/layer/register_builtins.h"

namespace moe = switchyard::moe;
using switchyard::ConstRows;
using switchyard::ExecContext;
using switchyard::Rows;

// Emits the format "standard", so that every runner with that permute pair takes it. Nothing moves
// between ranks, so the stages that would start an exchange only keep what the others hand on.
class ConfidentDispatcher : public moe::Dispatcher {
 public:
  explicit ConfidentDispatcher(size_t layer_id) : Dispatcher(layer_id) {}
  std::string_view name() const override { return "confident"; }
  moe::DispatchFormat format() const override { return moe::DispatchFormat::kStandard; }

 protected:
  void StartDispatch(ExecContext& context, ConstRows hidden,
                     const moe::TopKOutput& topk) override {
    moe::TopKOutput kept = topk;
    auto ids = context.arena.AllocateSpan<int32_t>(topk.ids.size());
    for (size_t slot = 0; slot < ids.size(); ++slot)
      ids[slot] = topk.weights[slot] < 0.3f ? -1 : topk.ids[slot];
    kept.ids = ids;
    output_ = context.arena.New<moe::StandardDispatchOutput>(hidden, kept);
  }
  const moe::DispatchOutput& FinishDispatch(ExecContext&) override { return *output_; }
  void StartCombine(ExecContext&, const moe::CombineInput& input) override {
    rows_ = moe::As<moe::StandardCombineInput>(input).hidden_states;
  }
  Rows FinishCombine(ExecContext&) override { return rows_; }
  void Reset() noexcept override {}

 private:
  const moe::StandardDispatchOutput* output_ = nullptr;
  Rows rows_;
};

double Relu3(double gate, double up, const switchyard::ActivationParams&) {
  return std::pow(std::fmax(gate, 0.0), 3) * up;
}
void Relu3Row(const float* gate, const float* up, size_t n,
              const switchyard::ActivationParams& params, float* out) noexcept {
  for (size_t i = 0; i < n; ++i) out[i] = static_cast<float>(Relu3(gate[i], up[i], params));
}

int main() {
  moe::Registry registry;
  moe::RegisterBuiltins(registry);
  registry.Add(switchyard::ActivationEntry{"relu3", "max(g, 0)^3 * u", true, &Relu3Row, &Relu3});
  registry.Add(moe::DispatcherEntry{
      "confident", "confident", "drops unsure slots", moe::DispatchFormat::kStandard,
      moe::DispatchMode::kAny, [](const moe::DispatcherArgs& args) -> std::unique_ptr<moe::Dispatcher> {
        return std::make_unique<ConfidentDispatcher>(args.config.layer_id);
      }});

  constexpr size_t kExperts = 4, kHidden = 8, kInner = 16, kTokens = 3;
  const std::vector<float> weights(kHidden * kInner, 0.25f), logits{5, 1, 0, 0, 0, 0, 0, 0, 9, 9, 0, 0};
  moe::ExpertBank up_bank{.rows = kInner, .cols = kHidden}, down_bank{.rows = kHidden, .cols = kInner};
  for (moe::ExpertBank* bank : {&up_bank, &down_bank})
    bank->data.assign(kExperts, reinterpret_cast<const std::byte*>(weights.data()));
  moe::MoeLayerConfig config;
  config.topk.num_experts = kExperts;
  config.topk.top_k = 2;
  config.topk.renormalize = false;
  config.runner.activation = "relu3";
  moe::MoeLayer layer(registry, config, {.a2a = "confident"}, {up_bank, up_bank, down_bank, kHidden, kInner});

  switchyard::ThreadPool pool(2);
  switchyard::Arena arena;
  ExecContext context{pool, arena};
  const std::vector<float> hidden(kTokens * kHidden, 0.5f);
  const Rows out = layer.Forward(context, ConstRows(hidden.data(), kTokens, kHidden),
                                 ConstRows(logits.data(), kTokens, kExperts));
  for (size_t t = 0; t < kTokens; ++t) std::printf("token %zu: %.4f\n", t, out.Row(t)[0]);
}
