// DeepSeek-V3: as V2, with sigmoid scores, a learned bias for the choice, groups worth the sum of
// their two best experts, and layers for multi-token prediction, which are left out. An expert of
// another group is never taken, as in the published model code (transformers gives it the score 0,
// which differs only where biased scores of the chosen groups are negative).
#include "model/architectures/deepseek.h"

namespace switchyard {
namespace {

ModelConfig Parse(ConfigReader& config) {
  ModelConfig model = ParseDeepseek(config);
  if (config.Text("scoring_func", "sigmoid") != "sigmoid")
    config.Refuse("scoring_func", "this architecture has sigmoid scores");
  if (config.Text("topk_method", "noaux_tc") != "noaux_tc")
    config.Refuse("topk_method", "this architecture chooses by noaux_tc");
  model.scoring_func = moe::ScoringFunc::kSigmoid;
  model.router_correction_bias = true;
  model.renormalize = config.Flag("norm_topk_prob", true);
  // Without defaults: a model without these fields would answer, and wrongly.
  model.routed_scaling_factor = config.Number("routed_scaling_factor", 1e-6, 1e6);
  model.num_expert_groups = config.Count("n_group", 1, kMaxSize);
  model.top_k_groups = config.Count("topk_group", 1, kMaxSize);
  RequireGroups(config, model);
  return model;
}

}  // namespace

extern constinit const ArchitectureEntry deepseek_v3_architecture{
    "deepseek_v3", "DeepseekV3ForCausalLM", "DeepSeek-V3, R1, Moonlight", &Parse};

}  // namespace switchyard
