// quant_method "w4afp8" (contract 5.13): experts of signed int4 pairs with static e4m3 activations,
// the other layers e4m3 in blocks.
#include <fmt/format.h>

#include "model/quantization/module_rules.h"
#include "model/quantization/quantization.h"
#include "model/quantization/stored_codes.h"

namespace switchyard {
namespace {

class W4AFp8Rules : public QuantizationRules {
 public:
  W4AFp8Rules(StoredCodesOptions experts, StoredCodesOptions others,
              std::vector<std::string> left_out)
      : experts_(std::move(experts)), others_(std::move(others)), left_out_(std::move(left_out)) {}

  const StorageScheme* SchemeOf(std::string_view module) const override {
    for (const std::string& line : left_out_) {
      if (NamesModule(line, module)) return nullptr;
    }
    const bool is_expert = module.find(".experts.") != std::string_view::npos;
    return is_expert ? &experts_ : &others_;
  }

 private:
  StoredCodes experts_, others_;
  std::vector<std::string> left_out_;
};

std::unique_ptr<QuantizationRules> Read(ConfigReader& config, const QuantizationOptions&) {
  StoredCodesOptions experts;
  experts.moe_scheme = "w4afp8";
  experts.dtype = DType::kI4;
  experts.scale = "weight_scale_inv";
  experts.scale_cols = config.Count("group_size", 1, 65536, 128);
  if (config.Text("moe_activation_scheme", "static") != "static")
    config.Refuse("moe_activation_scheme", "only static activations are known");
  experts.act.kind = ActQuantKind::kFp8TensorStatic;
  StoredCodesOptions others;
  others.moe_scheme = "fp8_block";
  others.scale = "weight_scale_inv";
  const std::vector<size_t> block =
      config.Counts("weight_block_size", 1, 65536, std::vector<size_t>{128, 128});
  if (block.size() != 2) config.Refuse("weight_block_size", "expected two sizes");
  others.scale_rows = block[0];
  others.scale_cols = block[1];
  others.act.kind = ActQuantKind::kFp8Group;
  others.act.group = block[1];
  if (config.Text("linear_activation_scheme", "dynamic") != "dynamic")
    config.Refuse("linear_activation_scheme", "blocks of weights go with dynamic activations");
  std::vector<std::string> left_out =
      ListedModules(config, {"ignored_layers", "modules_to_not_convert"});
  config.Ignore({"quant_method", "activation_scheme", "fmt"});
  return std::make_unique<W4AFp8Rules>(std::move(experts), std::move(others), std::move(left_out));
}

}  // namespace

extern constinit const QuantizationProducer w4afp8_producer{
    "w4afp8", "experts int4 with e4m3 activations, other layers e4m3 in blocks", &Read};

}  // namespace switchyard
