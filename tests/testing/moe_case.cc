#include "testing/moe_case.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "kernels/convert/convert.h"
#include "kernels/ggml/ggml.h"
#include "quant/act_quant.h"
#include "quant/ggml_quant.h"
#include "switchyard/core/small_floats.h"
#include "switchyard/moe/layer/register_builtins.h"
#include "switchyard/moe/registry/activation.h"
#include "testing/quant_formats.h"

namespace switchyard::testing {
namespace {

using quant::QuantMatrix;
using quant::WeightQuant;

WeightQuant Dense(DType dtype) {
  WeightQuant how;
  how.format.dtype = dtype;
  return how;
}

// Everything that QuantizeMatrix makes, and dense matrices.
std::vector<WeightQuant> AllFormats() {
  std::vector<WeightQuant> all = {Dense(DType::kF32), Dense(DType::kBF16), Dense(DType::kF16)};
  for (const auto& [name, how] : AllWeightQuants()) all.push_back(how);
  WeightQuant bytes = WeightQuant::Uint4Group(32, DType::kF32);
  bytes.format.dtype = DType::kU8;
  WeightQuant int8_groups = WeightQuant::Int4Group(32, DType::kF16);
  int8_groups.format.dtype = DType::kI8;
  WeightQuant narrow_scales = WeightQuant::Int8Channel();
  narrow_scales.format.scale_dtype = DType::kBF16;
  for (DType dtype : {DType::kGgmlQ80, DType::kGgmlQ40}) all.push_back(Dense(dtype));
  all.insert(all.end(), {bytes, int8_groups, narrow_scales, WeightQuant::Int4Group(64, DType::kF32),
                         WeightQuant::Uint4Group(32, DType::kBF16)});
  return all;
}

// Without scales beside the codes.
bool IsDense(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16 ||
         IsGgmlBlock(dtype);
}

QuantMatrix MakeMatrix(ConstRows values, const WeightQuant& how) {
  if (!IsDense(how.format.dtype)) return quant::QuantizeMatrix(values, how);
  QuantMatrix dense = QuantMatrix::Make(how.format, values.rows, values.cols);
  if (IsGgmlBlock(how.format.dtype)) {
    for (size_t n = 0; n < values.rows; ++n) {
      const size_t bytes = BytesOf(how.format.dtype, values.cols);
      quant::EncodeGgmlRow(how.format.dtype, values.RowSpan(n),
                           std::span(dense.data).subspan(n * bytes, bytes));
    }
    return dense;
  }
  kernels::ConvertFromF32(values.data, values.rows * values.cols, how.format.dtype,
                          dense.data.data());
  return dense;
}

template <typename T>
T Load(const std::byte* at) {
  T value;
  std::memcpy(&value, at, sizeof(T));
  return value;
}

double Code(const QuantMatrix& m, size_t n, size_t k) {
  if (IsGgmlBlock(m.format.dtype)) {
    std::vector<float> row(m.cols);
    kernels::DecodeGgmlRowReference(
        m.format.dtype, m.data.data() + BytesOf(m.format.dtype, n * m.stride), m.cols, row.data());
    return row[k];
  }
  const size_t at = n * m.stride + k;
  const std::byte* byte = m.data.data() + BytesOf(m.format.dtype, at - at % 2);
  if (DTypeBits(m.format.dtype) > 4) byte += at % 2 * DTypeBytes(m.format.dtype);
  const auto bits = static_cast<uint8_t>(*byte);
  const auto nibble = static_cast<uint8_t>(at % 2 == 0 ? bits & 15 : bits >> 4);
  switch (m.format.dtype) {
    case DType::kF32: return Load<float>(byte);
    case DType::kF16: return ToFloat(Load<F16>(byte));
    case DType::kBF16: return ToFloat(Load<BF16>(byte));
    case DType::kI8: return static_cast<int8_t>(bits);
    case DType::kU8: return bits;
    case DType::kI4: return nibble < 8 ? nibble : nibble - 16;
    case DType::kU4: return nibble;
    case DType::kF8E4M3: return DecodeE4M3(bits);
    case DType::kF4E2M1: return DecodeE2M1(nibble);
    default: throw std::runtime_error("MoeCase cannot decode this type");
  }
}

double Scale(const QuantMatrix& m, size_t at) {
  const std::byte* scale = m.scale.data() + at * DTypeBytes(m.format.scale_dtype);
  switch (m.format.scale_dtype) {
    case DType::kF32: return Load<float>(scale);
    case DType::kF16: return ToFloat(Load<F16>(scale));
    case DType::kBF16: return ToFloat(Load<BF16>(scale));
    case DType::kF8E8M0: return DecodeE8M0(static_cast<uint8_t>(*scale));
    case DType::kF8E4M3: return DecodeE4M3(static_cast<uint8_t>(*scale));
    default: throw std::runtime_error("MoeCase cannot decode scales of this type");
  }
}

// (q - zero) * scale of `rows` rows from `first` on, every `step`-th.
std::vector<double> Decode(const QuantMatrix& m, size_t first, size_t step, size_t rows) {
  std::vector<double> values;
  for (size_t i = 0; i < rows; ++i) {
    const size_t n = first + i * step;
    for (size_t k = 0; k < m.cols; ++k) {
      double value = Code(m, n, k);
      if (!m.scale.empty()) {
        const size_t at = n / m.format.scale_rows * m.scale_stride + k / m.format.scale_cols;
        if (m.format.has_zero) value -= static_cast<double>(m.zero[at]);
        // Both factors are one f32 (contract 5.14).
        value *= m.format.has_tensor_scale ? static_cast<float>(Scale(m, at)) * m.tensor_scale
                                           : Scale(m, at);
      }
      values.push_back(value);
    }
  }
  return values;
}

// Static scales that suit rows of unit size (w13) and the rows after the activation (w2).
void SetStaticScales(const moe::SchemeEntry& scheme, bool down, ActQuant& act) {
  if (scheme.act_quant == ActQuantKind::kInt8Static) {
    act.scale = down ? 0.07f : 0.03f;
    act.offset = down ? -3.0f : 5.0f;
  } else if (scheme.act_quant == ActQuantKind::kFp8TensorStatic) {
    act.scale = down ? 0.02f : 0.01f;
  }
}

WeightQuant FormatOf(const moe::SchemeEntry& scheme, size_t variant, size_t rows, size_t cols) {
  const std::vector<WeightQuant> formats = FormatsOf(scheme, rows, cols);
  if (formats.empty()) {
    throw std::runtime_error("no maker of MoeCase fits scheme " + std::string(scheme.name) + " (" +
                             std::string(scheme.format_summary) +
                             "); add its format to AllFormats in tests/testing/moe_case.cc");
  }
  return formats[variant % formats.size()];
}

}  // namespace

std::vector<WeightQuant> FormatsOf(const moe::SchemeEntry& scheme, size_t rows, size_t cols) {
  std::vector<WeightQuant> formats;
  for (WeightQuant how : AllFormats()) {
    if (!IsDense(how.format.dtype)) {
      if (how.format.scale_rows == 0) how.format.scale_rows = rows;
      if (how.format.scale_cols == 0) how.format.scale_cols = cols;
    }
    if (IsGgmlBlock(how.format.dtype) && cols % DTypeBlock(how.format.dtype) != 0) continue;
    if (scheme.accepts(how.format, rows, cols)) formats.push_back(how);
  }
  return formats;
}

void FitSizes(MoeCaseOptions& options) {
  if (options.scheme_w13 != "gguf" && options.scheme_w2 != "gguf") return;
  for (size_t* size : {&options.hidden, &options.intermediate}) *size = (*size + 31) / 32 * 32;
}

MoeTokens MoeTokens::Slice(size_t first, size_t n) const {
  const auto part = [&](const auto& values, size_t width) {
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(first * width);
    return std::remove_cvref_t<decltype(values)>(begin,
                                                 begin + static_cast<std::ptrdiff_t>(n * width));
  };
  return {n, top_k, cols, part(hidden, cols), part(ids, top_k), part(weights, top_k)};
}

MoeTokens RandomTokens(size_t count, size_t top_k, size_t experts, size_t hidden, Spread spread,
                       std::mt19937_64& random) {
  MoeTokens tokens{count, top_k, hidden, RandomFloats(random, count * hidden), {}, {}};
  std::vector<int32_t> order(experts);
  std::iota(order.begin(), order.end(), 0);
  for (size_t t = 0; t < count; ++t) {
    if (spread != Spread::kAllToOne) std::shuffle(order.begin(), order.end(), random);
    if (spread == Spread::kNoneToFirst)
      std::partition(order.begin(), order.end(), [](int32_t id) { return id != 0; });
    for (size_t k = 0; k < top_k; ++k) {
      const bool skip =
          spread == Spread::kAllSkipped || (spread == Spread::kSomeSkipped && random() % 3 == 0);
      tokens.ids.push_back(skip ? -1 : order[k]);
      tokens.weights.push_back(0.05f + static_cast<float>(random() % 1000) / 1000.0f);
    }
  }
  return tokens;
}

MoeCase::MoeCase(const MoeCaseOptions& options, std::mt19937_64& random) : options_(options) {
  Build(random);
}

MoeCase::MoeCase(size_t experts, size_t hidden, size_t intermediate, DType dtype,
                 std::mt19937_64& random) {
  options_.experts = experts;
  options_.hidden = hidden;
  options_.intermediate = intermediate;
  options_.variant = dtype == DType::kF32 ? 0 : dtype == DType::kBF16 ? 1 : 2;
  Build(random);
}

const QuantMatrix& MoeCase::AddMatrix(const WeightQuant& how, size_t rows, size_t cols,
                                      std::mt19937_64& random) {
  const float size = 1.2f / std::sqrt(static_cast<float>(cols));
  const std::vector<float> values = RandomFloats(random, rows * cols, size);
  matrices_.push_back(MakeMatrix(ConstRows(values.data(), rows, cols), how));
  return matrices_.back();
}

const float* MoeCase::AddBias(size_t count, std::mt19937_64& random) {
  if (!options_.bias) return nullptr;
  biases_.push_back(RandomFloats(random, count, 0.5f));
  return biases_.back().data();
}

moe::ExpertBank MoeCase::BankOf(const std::vector<const QuantMatrix*>& matrices) const {
  moe::ExpertBank bank;
  for (size_t e = 0; e < experts(); ++e) {
    const QuantMatrix& m = *matrices[e < matrices.size() ? e : e - matrices.size()];
    bank.format = m.format;
    bank.rows = m.rows;
    bank.cols = m.cols;
    bank.stride = m.stride;
    bank.scale_stride = m.scale_stride;
    bank.data.push_back(m.data.data());
    if (!m.scale.empty()) bank.scale.push_back(m.scale.data());
    if (!m.zero.empty()) bank.zero.push_back(m.zero.data());
    if (m.format.has_tensor_scale) bank.tensor_scale.push_back(&m.tensor_scale);
  }
  return bank;
}

void MoeCase::Build(std::mt19937_64& random) {
  const moe::Registry& registry = moe::BuiltinRegistry();
  const moe::SchemeEntry& scheme_w13 = registry.FindScheme(options_.scheme_w13);
  const moe::SchemeEntry& scheme_w2 = registry.FindScheme(options_.scheme_w2);
  const size_t inner = options_.intermediate;
  const bool gated = options_.runner.is_gated;
  const bool stacked = gated && options_.storage != GateUpStorage::kSeparate;
  const bool in_turn = options_.storage == GateUpStorage::kInterleaved;
  const size_t w13_rows = stacked ? 2 * inner : inner;
  const WeightQuant how13 = FormatOf(scheme_w13, options_.variant, w13_rows, options_.hidden);
  const WeightQuant how2 = FormatOf(scheme_w2, options_.variant, options_.hidden, inner);

  std::vector<const QuantMatrix*> first, second, down;
  std::vector<const float*> bias1, bias3, bias2;
  exact_.resize(options_.experts);
  for (Exact& exact : exact_) {
    first.push_back(&AddMatrix(how13, w13_rows, options_.hidden, random));
    bias1.push_back(AddBias(w13_rows, random));
    exact.w1 = Decode(*first.back(), 0, stacked && in_turn ? 2 : 1, inner);
    if (stacked) {
      exact.w3 = Decode(*first.back(), in_turn ? 1 : inner, in_turn ? 2 : 1, inner);
    } else if (gated) {
      second.push_back(&AddMatrix(how13, inner, options_.hidden, random));
      bias3.push_back(AddBias(inner, random));
      exact.w3 = Decode(*second.back(), 0, 1, inner);
    }
    down.push_back(&AddMatrix(how2, options_.hidden, inner, random));
    bias2.push_back(AddBias(options_.hidden, random));
    exact.w2 = Decode(*down.back(), 0, 1, options_.hidden);
  }
  const auto with_bias = [&](moe::ExpertBank bank, const std::vector<const float*>& bias) {
    for (size_t e = 0; options_.bias && e < experts(); ++e)
      bank.bias.push_back(bias[e < bias.size() ? e : e - bias.size()]);
    return bank;
  };
  weights_.hidden_size = options_.hidden;
  weights_.intermediate_size = inner;
  weights_.w1 = with_bias(BankOf(first), bias1);
  SetStaticScales(scheme_w13, false, weights_.w1.act);
  if (stacked) {
    std::tie(weights_.w1, weights_.w3) = SplitGateUp(weights_.w1, in_turn);
  } else if (gated) {
    weights_.w3 = with_bias(BankOf(second), bias3);
    weights_.w3.act = weights_.w1.act;
  }
  weights_.w2 = with_bias(BankOf(down), bias2);
  SetStaticScales(scheme_w2, true, weights_.w2.act);
  for (size_t e = 0; options_.bias && e < exact_.size(); ++e) {
    exact_[e].b2 = bias2[e];
    // Where they lie does not matter here: the bank's own pointers are read, with their stride.
    exact_[e].b1 = weights_.w1.bias[e];
    exact_[e].b3 = gated ? weights_.w3.bias[e] : nullptr;
  }
}

moe::MoeQuantInfo MoeCase::Info(bool activation_quant) const {
  const moe::Registry& registry = moe::BuiltinRegistry();
  moe::MoeQuantInfo info;
  info.w1 = weights_.w1.View();
  if (options_.runner.is_gated) info.w3 = weights_.w3.View();
  info.w2 = weights_.w2.View();
  if (!activation_quant) return info;
  info.a13 = weights_.w1.act;
  info.a13.kind = registry.FindScheme(options_.scheme_w13).act_quant;
  info.a2 = weights_.w2.act;
  info.a2.kind = registry.FindScheme(options_.scheme_w2).act_quant;
  return info;
}

moe::MoeQuantInfo MoeCase::InfoOfExperts(size_t first, size_t count) const {
  moe::MoeQuantInfo info = Info();
  for (ExpertMatrices* bank : {&info.w1, &info.w3, &info.w2}) {
    if (bank->data.empty()) continue;
    bank->data = bank->data.subspan(first, count);
    if (!bank->scale.empty()) bank->scale = bank->scale.subspan(first, count);
    if (!bank->tensor_scale.empty()) bank->tensor_scale = bank->tensor_scale.subspan(first, count);
    if (!bank->zero.empty()) bank->zero = bank->zero.subspan(first, count);
    if (!bank->bias.empty()) bank->bias = bank->bias.subspan(first, count);
  }
  return info;
}

moe::MoeRunnerConfig MoeCase::Config(size_t top_k) const {
  moe::MoeRunnerConfig config = options_.runner;
  config.num_experts = config.num_local_experts = experts();
  config.hidden_size = options_.hidden;
  config.intermediate_size_per_partition = options_.intermediate;
  config.top_k = top_k;
  config.formula = ResolveActivation(moe::BuiltinRegistry(), config);
  return config;
}

void MoeCase::FillW2(float value) {
  for (size_t e = 0; e < options_.experts; ++e) {
    for (QuantMatrix& m : matrices_) {
      if (m.data.data() != weights_.w2.data[e]) continue;
      const std::vector<float> values(m.rows * m.cols, value);
      m = MakeMatrix(ConstRows(values.data(), m.rows, m.cols), Dense(m.format.dtype));
      weights_.w2.data[e] = m.data.data();
      exact_[e].w2 = Decode(m, 0, 1, m.rows);
    }
  }
}

namespace {

using RowSet = std::vector<std::vector<double>>;

// One evaluation.
class Evaluator {
 public:
  Evaluator(moe::OracleKind kind, const MoeCase& layer, const moe::MoeQuantInfo& info,
            const moe::MoeRunnerConfig& config, const MoeTokens& tokens)
      : faithful_(kind == moe::OracleKind::kFaithful),
        layer_(layer),
        info_(info),
        config_(config),
        tokens_(tokens) {}

  MoeRows Run() const {
    RowSet x(tokens_.count);
    for (size_t slot = 0; slot < tokens_.ids.size(); ++slot) {
      if (tokens_.ids[slot] >= 0) x[slot / tokens_.top_k] = Input(slot / tokens_.top_k);
    }
    if (faithful_) Quantize(info_.a13, x);
    RowSet hidden(tokens_.ids.size());
    for (size_t slot = 0; slot < hidden.size(); ++slot) {
      if (tokens_.ids[slot] >= 0) hidden[slot] = Hidden(ExpertOf(slot), x[slot / tokens_.top_k]);
    }
    MoeRows out{
        config_.no_combine ? hidden.size() : tokens_.count, layer_.hidden(), {}, {}, x, hidden};
    if (faithful_) Quantize(info_.a2, hidden);
    out.values.resize(out.rows * out.cols);
    out.size.resize(out.rows * out.cols);
    for (size_t slot = 0; slot < hidden.size(); ++slot) {
      if (tokens_.ids[slot] >= 0) AddDown(slot, hidden[slot], out);
    }
    return out;
  }

 private:
  const MoeCase::Exact& ExpertOf(size_t slot) const {
    return layer_.exact(static_cast<size_t>(tokens_.ids[slot]));
  }

  std::vector<double> Input(size_t token) const {
    std::vector<double> x;
    for (float value : tokens_.Hidden().RowSpan(token)) {
      const float weight = config_.apply_router_weight_on_input ? tokens_.weights[token] : 1.0f;
      x.push_back(faithful_ ? double{value * weight} : double{value} * double{weight});
    }
    return x;
  }

  // All rows that are there, at once: some kinds have one scale over all of them.
  static void Quantize(const ActQuant& how, RowSet& rows) {
    if (how.kind == ActQuantKind::kNone) return;
    std::vector<float> values;
    size_t count = 0;
    for (const std::vector<double>& row : rows) {
      for (double value : row) values.push_back(static_cast<float>(value));
      count += row.empty() ? 0 : 1;
    }
    if (count == 0) return;
    ThreadPool pool(1);
    Arena arena;
    ExecContext context{pool, arena};
    const QuantRows codes =
        quant::QuantizeRows(context, ConstRows(values.data(), count, values.size() / count), how);
    size_t i = 0;
    for (std::vector<double>& row : rows) {
      for (size_t k = 0; k < row.size(); ++k) row[k] = RowElement(codes, i, k);
      i += row.empty() ? 0 : 1;
    }
  }

  std::vector<double> Hidden(const MoeCase::Exact& expert, const std::vector<double>& x) const {
    const moe::ExpertWeights& weights = layer_.Weights();
    std::vector<double> hidden;
    for (size_t i = 0; i < layer_.intermediate(); ++i) {
      double gate = expert.b1 == nullptr ? 0.0 : expert.b1[i * weights.w1.bias_stride];
      double up = expert.b3 == nullptr ? 0.0 : expert.b3[i * weights.w3.bias_stride];
      for (size_t h = 0; h < x.size(); ++h) {
        gate += expert.w1[i * x.size() + h] * x[h];
        if (config_.is_gated) up += expert.w3[i * x.size() + h] * x[h];
      }
      hidden.push_back(config_.formula.entry.scalar(gate, up, config_.formula.params));
    }
    return hidden;
  }

  void AddDown(size_t slot, const std::vector<double>& hidden, MoeRows& out) const {
    const MoeCase::Exact& expert = ExpertOf(slot);
    double factor = config_.routed_scaling_factor;
    if (!config_.apply_router_weight_on_input &&
        (!config_.no_combine || config_.no_combine_keep_router_weight))
      factor *= double{tokens_.weights[slot]};
    const size_t row = (config_.no_combine ? slot : slot / tokens_.top_k) * out.cols;
    for (size_t h = 0; h < out.cols; ++h) {
      double sum = expert.b2 == nullptr ? 0.0 : expert.b2[h];
      double size = std::abs(sum);
      for (size_t i = 0; i < hidden.size(); ++i) {
        const double term = expert.w2[h * hidden.size() + i] * hidden[i];
        sum += term;
        size += std::abs(term);
      }
      out.values[row + h] += factor * sum;
      out.size[row + h] += std::abs(factor) * size;
    }
  }

  bool faithful_;
  const MoeCase& layer_;
  const moe::MoeQuantInfo& info_;
  const moe::MoeRunnerConfig& config_;
  const MoeTokens& tokens_;
};

}  // namespace

MoeRows EvaluateMoe(moe::OracleKind kind, const MoeCase& layer, const moe::MoeQuantInfo& info,
                    const moe::MoeRunnerConfig& config, const MoeTokens& tokens) {
  return Evaluator(kind, layer, info, config, tokens).Run();
}

double RelativeL2(ConstRows rows, const std::vector<double>& expected,
                  const std::vector<double>& size) {
  double error = 0;
  double norm = 0;
  for (size_t t = 0; t < rows.rows; ++t) {
    for (size_t h = 0; h < rows.cols; ++h) {
      const size_t at = t * rows.cols + h;
      error += std::pow(rows.Row(t)[h] - expected[at], 2);
      norm += std::pow(size[at], 2);
    }
  }
  return norm == 0 ? std::sqrt(error) : std::sqrt(error / norm);
}

}  // namespace switchyard::testing
