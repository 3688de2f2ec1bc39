// ModelSlim (contract 5.3 - 5.5): quant_model_description.json gives the scheme of each tensor.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <unordered_map>

#include "model/quantization/quantization.h"
#include "model/quantization/repacked_codes.h"
#include "model/quantization/stored_codes.h"
#include "switchyard/core/error.h"

namespace switchyard {
namespace {

// "W8A8" of dense layers: static activations, and what the device adds and multiplies with:
//   y = (sum of code * w + quant_bias) * deq_scale, deq_scale = input_scale * weight scale.
// quant_bias undoes the offset of the codes; what it holds beyond that is the layer's bias.
class StaticInt8 : public StorageScheme {
 public:
  std::string_view moe_scheme() const override { return "w8a8_int8_static"; }
  std::string Describe() const override {
    return "I8, a scale per output; activations int8, static";
  }
  std::string_view codes() const override { return "weight"; }
  bool repacks() const override { return false; }
  std::string_view act_scale() const override { return "input_scale"; }

  std::vector<StoredTensor> Tensors(size_t rows, size_t cols) const override {
    const std::vector<DType> floats = FloatDTypes();
    std::vector<DType> offsets = floats;
    offsets.push_back(DType::kI8);
    return {{"weight", {Shape{rows, cols}}, {DType::kI8}},
            {"deq_scale", PerRowShapes(rows), {DType::kF32, DType::kI64}},
            {"quant_bias", PerRowShapes(rows), {DType::kI32}},
            {"input_scale", ScalarShapes(), floats},
            {"input_offset", ScalarShapes(), offsets},
            {"weight_scale", PerRowShapes(rows), floats, false},
            {"weight_offset", PerRowShapes(rows), floats, false}};
  }

  WeightMatrix Load(const MatrixTensors& tensors, WeightMemory& memory) const override {
    const TensorView& codes = tensors.views[0];
    if (tensors.Has(6)) RequireZeroOffsets(tensors, "weight_offset", tensors.views[6]);
    const float input_scale = PositiveScalar(tensors, "input_scale", tensors.views[3]);
    const float offset = ActOffset(tensors, "input_offset", tensors.views[4]);
    WeightMatrix matrix =
        WeightMatrix::Dense(codes.data, DType::kI8, tensors.rows, tensors.cols);
    matrix.format.scale_rows = 1;
    matrix.format.scale_cols = std::max<size_t>(1, tensors.cols);
    matrix.scale_stride = 1;
    matrix.act.kind = ActQuantKind::kInt8Static;
    matrix.act.scale = input_scale;
    matrix.act.offset = offset;
    float* scales = memory.New<float>(tensors.rows);
    float* bias = memory.New<float>(tensors.rows);
    bool has_bias = false, any_scale = false;
    const auto* quant_bias = reinterpret_cast<const int32_t*>(tensors.views[2].data);
    for (size_t n = 0; n < tensors.rows; ++n) {
      const float deq = DeqScale(tensors, n);
      if (!(deq >= 0.0f) || !std::isfinite(deq))
        tensors.Refuse("deq_scale", fmt::format("scale {} is {}, expected a finite number that is "
                                                "not negative",
                                                n, deq));
      any_scale = any_scale || deq != 0.0f;
      scales[n] = deq / input_scale;
      if (!std::isfinite(scales[n]))
        tensors.Refuse("deq_scale", fmt::format("scale {} is {} and input_scale {}: their quotient "
                                                "is not finite",
                                                n, deq, input_scale));
      int64_t sum = 0;
      const auto* row = reinterpret_cast<const int8_t*>(codes.data) + n * tensors.cols;
      for (size_t k = 0; k < tensors.cols; ++k) sum += row[k];
      const int64_t rest = static_cast<int64_t>(offset) * sum + quant_bias[n];
      bias[n] = static_cast<float>(static_cast<double>(rest) * double{deq});
      has_bias = has_bias || rest != 0;
    }
    const auto is_zero = [](std::byte code) { return code == std::byte{0}; };
    if (!any_scale && !std::all_of(codes.data, codes.data + codes.NumBytes(), is_zero))
      tensors.Refuse("deq_scale", fmt::format("all {} scales are 0 and the codes are not: they were "
                                              "never written",
                                              tensors.rows));
    matrix.scale = reinterpret_cast<const std::byte*>(scales);
    if (has_bias) matrix.bias = bias;
    return matrix;
  }

 private:
  // An f32, or its bits in an i64.
  static float DeqScale(const MatrixTensors& tensors, size_t n) {
    const TensorView& view = tensors.views[1];
    if (view.dtype == DType::kF32) return ScaleValue(view, n);
    const int64_t bits = reinterpret_cast<const int64_t*>(view.data)[n];
    if (bits < 0 || bits > 0xffffffff)
      tensors.Refuse("deq_scale", fmt::format("element {} is {}, no f32 in an i64", n, bits));
    return std::bit_cast<float>(static_cast<uint32_t>(bits));
  }
};

StoredCodesOptions PerOutput(std::string_view moe_scheme, ActQuantKind act) {
  StoredCodesOptions options;
  options.moe_scheme = moe_scheme;
  options.dtype = DType::kI8;
  options.act.kind = act;
  options.zero_offset = "weight_offset";
  return options;
}

StoredCodesOptions Microscaled(std::string_view moe_scheme, DType dtype, ActQuantKind act) {
  StoredCodesOptions options;
  options.moe_scheme = moe_scheme;
  options.dtype = dtype;
  options.scale_cols = 32;
  options.scale_dtypes = {DType::kF8E8M0};
  options.act.kind = act;
  return options;
}

std::unique_ptr<StorageScheme> MakeScheme(const std::string& name, size_t group,
                                          bool new_packing) {
  if (name == "W8A8") return std::make_unique<StaticInt8>();
  if (name == "W8A8_DYNAMIC")
    return std::make_unique<StoredCodes>(PerOutput("w8a8_int8", ActQuantKind::kInt8Token));
  if (name == "W8A16")
    return std::make_unique<StoredCodes>(PerOutput("wna16", ActQuantKind::kNone));
  if (name == "W8A8_MXFP8")
    return std::make_unique<StoredCodes>(
        Microscaled("mxfp8", DType::kF8E4M3, ActQuantKind::kMxFp8));
  if (name == "W4A8_MXFP")
    return std::make_unique<StoredCodes>(
        Microscaled("mxfp4_w4a8", DType::kF4E2M1, ActQuantKind::kMxFp8));
  if (name == "W4A4_MXFP4")
    return std::make_unique<StoredCodes>(
        Microscaled("mxfp4_w4a4", DType::kF4E2M1, ActQuantKind::kMxFp4));
  Int4Codes::Options options;
  options.is_modelslim = true;
  if (name == "W4A8_DYNAMIC") {
    options.is_paired = true;
    options.moe_scheme = "w4a8_int";
    options.act.kind = ActQuantKind::kInt8Token;
    options.group = group;
    return std::make_unique<Int4Codes>(options);
  }
  if (name == "W4A4_DYNAMIC") {
    options.is_paired = new_packing;
    options.moe_scheme = "w4a4_int";
    options.act.kind = ActQuantKind::kInt4Token;
    return std::make_unique<Int4Codes>(options);
  }
  return nullptr;
}

constexpr std::string_view kFloat = "FLOAT";
constexpr std::string_view kKnown =
    "FLOAT, W8A8, W8A8_DYNAMIC, W8A16, W4A8_DYNAMIC, W4A4_DYNAMIC, W8A8_MXFP8, W4A8_MXFP, "
    "W4A4_MXFP4";

// Other spellings of a module (contract 5.3).
std::vector<std::string> Spellings(std::string_view module) {
  std::vector<std::string> names = {std::string(module)};
  const auto add = [&](std::string_view from, std::string_view to) {
    for (size_t i = 0, count = names.size(); i < count; ++i) {
      const size_t at = names[i].find(from);
      if (at == std::string::npos) continue;
      std::string other = names[i];
      names.push_back(other.replace(at, from.size(), to));
    }
  };
  add(".mlp.", ".block_sparse_moe.");
  add(".gate_proj", ".w1");
  add(".down_proj", ".w2");
  add(".up_proj", ".w3");
  for (size_t i = 0, count = names.size(); i < count; ++i) {
    constexpr std::string_view kPrefix = "language_model.";
    names.push_back(std::string(kPrefix) + names[i]);
  }
  return names;
}

class Rules : public QuantizationRules {
 public:
  std::string file;
  std::unordered_map<std::string, std::string> scheme_of;  // by name of the weight
  std::map<std::string, std::unique_ptr<StorageScheme>> schemes;

  const StorageScheme* SchemeOf(std::string_view module) const override {
    const std::vector<std::string> tried = Spellings(module);
    for (const std::string& name : tried) {
      const auto found = scheme_of.find(name + ".weight");
      if (found == scheme_of.end()) continue;
      return found->second == kFloat ? nullptr : schemes.at(found->second).get();
    }
    throw Error(ErrorCode::kCorruptData,
                fmt::format("{}: says nothing about {}.weight (tried {})", file, module,
                            fmt::join(tried, ", ")));
  }
};

std::unique_ptr<QuantizationRules> Read(ConfigReader& config, const QuantizationOptions& options) {
  auto rules = std::make_unique<Rules>();
  rules->file = config.file_name();
  size_t group = 0;
  if (config.Has("group_size")) group = config.Count("group_size", 0, 65536);
  for (const std::string& name : config.Names()) {
    if (!name.ends_with(".weight")) {
      config.Ignore({name});  // other tensors of the same matrix, and remarks
      continue;
    }
    const std::string scheme = config.Text(name);
    if (scheme != kFloat && !rules->schemes.contains(scheme)) {
      auto made = MakeScheme(scheme, group, options.w4a4_new_packing);
      if (made == nullptr) config.Refuse(name, fmt::format("known schemes are {}", kKnown));
      rules->schemes.emplace(scheme, std::move(made));
    }
    rules->scheme_of.emplace(name, scheme);
  }
  return rules;
}

}  // namespace

extern constinit const QuantizationProducer modelslim_producer{
    "modelslim", "Ascend's W8A8, W4A8, W4A4 and MX schemes, tensor by tensor", &Read};

}  // namespace switchyard
