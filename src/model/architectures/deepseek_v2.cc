// DeepSeek-V2: latent attention; softmax scores; the best experts of all, or of the groups whose
// best expert is best; weights as they are, times a factor.
#include "model/architectures/deepseek.h"

namespace switchyard {
namespace {

ModelConfig Parse(ConfigReader& config) {
  ModelConfig model = ParseDeepseek(config);
  if (config.Text("scoring_func", "softmax") != "softmax")
    config.Refuse("scoring_func", "this architecture has softmax scores");
  // transformers never renormalises here, whatever the field says; no published model sets it.
  if (config.Flag("norm_topk_prob", false))
    config.Refuse("norm_topk_prob", "no DeepSeek-V2 renormalises, and what it would mean is open");
  model.renormalize = false;
  model.routed_scaling_factor = config.Number("routed_scaling_factor", 1e-6, 1e6, 1.0);
  const std::string method = config.Text("topk_method", "greedy");
  const size_t groups = config.Count("n_group", 1, kMaxSize, 1);
  const size_t taken = config.Count("topk_group", 1, kMaxSize, 1);
  if (method == "group_limited_greedy") {
    model.num_expert_groups = groups;
    model.top_k_groups = taken;
  } else if (method != "greedy") {
    config.Refuse("topk_method", "known are greedy and group_limited_greedy");
  }
  RequireGroups(config, model);
  return model;
}

}  // namespace

extern constinit const ArchitectureEntry deepseek_v2_architecture{
    "deepseek_v2", "DeepseekV2ForCausalLM", "DeepSeek-V2, V2-Lite, V2.5, Coder-V2", &Parse};

}  // namespace switchyard
