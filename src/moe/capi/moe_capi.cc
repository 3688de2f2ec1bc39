#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "switchyard/core/cpu.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/capi/switchyard_moe.h"
#include "switchyard/moe/layer/moe_layer.h"
#include "switchyard/moe/layer/register_builtins.h"

// NOLINTBEGIN(readability-identifier-naming): C names.
using switchyard::DType;
using switchyard::Error;
using switchyard::ErrorCode;

struct sy_context {
  explicit sy_context(size_t num_threads) : pool(num_threads) {}

  switchyard::ThreadPool pool;
  switchyard::Arena arena;
};

struct sy_moe_layer {
  std::vector<float> correction_bias;
  std::unique_ptr<switchyard::moe::MoeLayer> layer;
  size_t hidden_size = 0;
  size_t num_experts = 0;
  std::string runner;
};

namespace {

int CodeOf(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument: return SY_INVALID_ARGUMENT;
    case ErrorCode::kFailedPrecondition: return SY_FAILED_PRECONDITION;
    case ErrorCode::kNotFound: return SY_NOT_FOUND;
    case ErrorCode::kCorruptData: return SY_CORRUPT_DATA;
    case ErrorCode::kUnsupported: return SY_UNSUPPORTED;
    case ErrorCode::kResourceExhausted: return SY_RESOURCE_EXHAUSTED;
    case ErrorCode::kUnavailable: return SY_UNAVAILABLE;
    case ErrorCode::kCancelled: return SY_CANCELLED;
    case ErrorCode::kInternal: return SY_INTERNAL;
  }
  return SY_INTERNAL;
}

int Report(int code, const char* message, sy_error* error) noexcept {
  if (error != nullptr) {
    error->code = code;
    std::strncpy(error->message, message, sizeof(error->message) - 1);
    error->message[sizeof(error->message) - 1] = '\0';
  }
  return code;
}

// The border: whatever `body` throws becomes a code and a message.
template <typename Body>
int Guarded(sy_error* error, Body body) noexcept {
  try {
    body();
    return Report(SY_OK, "", error);
  } catch (const Error& caught) {
    return Report(CodeOf(caught.code()), caught.what(), error);
  } catch (const std::bad_alloc&) {
    return Report(SY_RESOURCE_EXHAUSTED, "out of memory", error);
  } catch (const std::exception& caught) {
    return Report(SY_INTERNAL, caught.what(), error);
  } catch (...) {
    return Report(SY_INTERNAL, "an exception of unknown type", error);
  }
}

[[noreturn]] void Refuse(const std::string& what) {
  throw Error(ErrorCode::kInvalidArgument, what);
}

void Require(const void* pointer, const char* name) {
  if (pointer == nullptr) Refuse(fmt::format("{} must not be NULL", name));
}

std::string TextOr(const char* text, const std::string& fallback) {
  return text != nullptr ? text : fallback;
}

// Any type that a bank may have, the 4-bit ones included.
DType DTypeOf(const char* name, const std::string& where) {
  for (DType dtype : {DType::kF32, DType::kF16, DType::kBF16, DType::kI8, DType::kU8, DType::kI4,
                      DType::kU4, DType::kF8E4M3, DType::kF4E2M1, DType::kF8E8M0}) {
    if (name != nullptr && switchyard::DTypeName(dtype) == name) return dtype;
  }
  Refuse(
      fmt::format("{}: dtype {} is not one of F32, F16, BF16, I8, U8, I4, U4, F8_E4M3, F4_E2M1 "
                  "(scales: F8_E8M0 too)",
                  where, name == nullptr ? "NULL" : name));
}

// Copies `count` pointers, none of which may be NULL.
template <typename T, typename U>
std::vector<T> Pointers(const U* const* list, size_t count, const std::string& where) {
  std::vector<T> pointers;
  for (size_t e = 0; e < count; ++e) {
    Require(list[e], fmt::format("{} of expert {}", where, e).c_str());
    pointers.push_back(static_cast<T>(static_cast<const void*>(list[e])));
  }
  return pointers;
}

// Routed and shared experts.
size_t NumMatrices(const sy_moe_layer_desc& desc) {
  return desc.num_experts + desc.num_shared_experts;
}

// Of those, the ones that this layer holds.
size_t NumLocal(const sy_moe_layer_desc& desc) {
  if (desc.expert_mask == nullptr) return NumMatrices(desc);
  return static_cast<size_t>(std::count_if(desc.expert_mask, desc.expert_mask + NumMatrices(desc),
                                           [](int32_t local) { return local != 0; }));
}

// Sizes come from outside: their products must not wrap.
void RequireProduct(size_t a, size_t b, const char* what) {
  if (b != 0 && a > std::numeric_limits<ptrdiff_t>::max() / sizeof(float) / b)
    Refuse(fmt::format("{}: {} x {} values are more than any memory holds", what, a, b));
}

switchyard::moe::ExpertBank BankOf(const sy_expert_bank& from, const std::string& name,
                                   size_t experts, size_t rows, size_t cols) {
  Require(from.data, fmt::format("{}.data", name).c_str());
  switchyard::moe::ExpertBank bank;
  bank.rows = rows;
  bank.cols = cols;
  bank.stride = from.stride;
  bank.scale_stride = from.scale_stride;
  if (from.bias_stride != 0) bank.bias_stride = from.bias_stride;
  bank.format.dtype = DTypeOf(from.dtype, name + ".dtype");
  bank.data = Pointers<const std::byte*>(from.data, experts, name + ".data");
  if (from.scale_rows != 0) {
    Require(from.scale, fmt::format("{}.scale", name).c_str());
    if (from.scale_cols == 0) Refuse(fmt::format("{}.scale_cols must not be 0", name));
    bank.format.scale_rows = from.scale_rows;
    bank.format.scale_cols = from.scale_cols;
    bank.format.scale_dtype = DTypeOf(from.scale_dtype, name + ".scale_dtype");
    bank.scale = Pointers<const std::byte*>(from.scale, experts, name + ".scale");
  }
  if (from.scale_rows == 0 && (from.scale != nullptr || from.zero != nullptr))
    Refuse(fmt::format("{} has scales or zero points, and {}.scale_rows is 0", name, name));
  if (from.zero != nullptr) {
    bank.format.has_zero = true;
    bank.zero = Pointers<const std::byte*>(from.zero, experts, name + ".zero");
  }
  if (from.bias != nullptr) bank.bias = Pointers<const float*>(from.bias, experts, name + ".bias");
  if (from.act_scale != 0) bank.act.scale = from.act_scale;
  bank.act.offset = from.act_offset;
  return bank;
}

void SetIfGiven(float value, std::optional<float>& field) {
  if (value != 0) field = value;
}

switchyard::moe::ScoringFunc ScoringOf(const std::string& name) {
  using switchyard::moe::ScoringFunc;
  for (ScoringFunc scoring :
       {ScoringFunc::kSoftmax, ScoringFunc::kSigmoid, ScoringFunc::kSqrtSoftplus}) {
    if (ScoringFuncName(scoring) == name) return scoring;
  }
  Refuse(fmt::format("scoring_func must be softmax, sigmoid or sqrtsoftplus, found {}", name));
}

// `bias` is the layer's copy of desc.correction_bias.
switchyard::moe::MoeLayerConfig ConfigOf(const sy_moe_layer_desc& desc,
                                         const std::vector<float>& bias) {
  switchyard::moe::MoeLayerConfig config;
  config.topk.num_experts = desc.num_experts;
  config.topk.top_k = desc.top_k;
  config.topk.scoring_func = ScoringOf(TextOr(desc.scoring_func, "softmax"));
  config.topk.renormalize = desc.keep_score == 0;
  config.topk.correction_bias = bias;
  config.topk.use_grouped_topk = desc.num_expert_group != 0;
  config.topk.num_expert_group = desc.num_expert_group;
  config.topk.topk_group = desc.topk_group;
  config.topk.num_fused_shared_experts = desc.num_shared_experts;
  if (desc.expert_mask != nullptr)
    config.expert_mask.assign(desc.expert_mask, desc.expert_mask + NumMatrices(desc));
  config.runner.apply_router_weight_on_input = desc.router_weight_on_input != 0;
  config.runner.layer_id = desc.layer_id;
  config.runner.activation = TextOr(desc.activation, "silu");
  config.runner.is_gated = desc.not_gated == 0;
  if (desc.routed_scaling_factor != 0) {
    // The runner multiplies; the router needs it for the weights of shared experts.
    config.runner.routed_scaling_factor = desc.routed_scaling_factor;
    config.topk.routed_scaling_factor = desc.routed_scaling_factor;
  }
  SetIfGiven(desc.gemm1_alpha, config.runner.gemm1_alpha);
  SetIfGiven(desc.gemm1_clamp_limit, config.runner.gemm1_clamp_limit);
  SetIfGiven(desc.swiglu_limit, config.runner.swiglu_limit);
  config.scheme_w13 = TextOr(desc.scheme_w13, "unquant");
  config.scheme_w2 = TextOr(desc.scheme_w2, config.scheme_w13);
  return config;
}

// Runs one call and copies its rows out.
template <typename Call>
int Forward(sy_moe_layer* layer, sy_context* context, const float* hidden, size_t num_tokens,
            float* out, sy_error* error, Call call) noexcept {
  return Guarded(error, [&] {
    Require(layer, "layer");
    Require(context, "context");
    if (num_tokens != 0) {
      Require(hidden, "hidden");
      Require(out, "out");
    }
    RequireProduct(num_tokens, layer->hidden_size, "hidden");
    context->arena.Reset();
    switchyard::ExecContext exec{context->pool, context->arena};
    const switchyard::ConstRows x(hidden, num_tokens, layer->hidden_size);
    const switchyard::Rows rows = call(exec, x);
    for (size_t t = 0; t < rows.rows; ++t) std::copy_n(rows.Row(t), rows.cols, out + t * rows.cols);
  });
}

}  // namespace

int sy_context_create(size_t num_threads, sy_context** context, sy_error* error) {
  return Guarded(error, [&] {
    Require(context, "context");
    *context = nullptr;
    *context = new sy_context(num_threads != 0 ? num_threads : switchyard::AvailableCpus());
  });
}

void sy_context_destroy(sy_context* context) { delete context; }

int sy_moe_layer_create(const sy_moe_layer_desc* desc, sy_moe_layer** layer, sy_error* error) {
  return Guarded(error, [&] {
    Require(layer, "layer");
    *layer = nullptr;
    Require(desc, "desc");
    if (desc->struct_size != sizeof(sy_moe_layer_desc))
      Refuse(fmt::format("desc.struct_size is {}, this library's is {}: set it to sizeof(*desc)",
                         desc->struct_size, sizeof(sy_moe_layer_desc)));
    const size_t h = desc->hidden_size;
    const size_t i = desc->intermediate_size;
    switchyard::moe::ExpertWeights weights;
    weights.hidden_size = h;
    weights.intermediate_size = i;
    RequireProduct(h, i, "hidden_size x intermediate_size");
    const size_t experts = NumLocal(*desc);
    weights.w1 = BankOf(desc->w1, "w1", experts, i, h);
    if (desc->not_gated == 0) weights.w3 = BankOf(desc->w3, "w3", experts, i, h);
    weights.w2 = BankOf(desc->w2, "w2", experts, h, i);
    switchyard::moe::MoeLayerOptions options;
    options.runner = TextOr(desc->runner, "auto");
    options.a2a = TextOr(desc->a2a, "none");
    options.act_dtype = TextOr(desc->act_dtype, "auto");
    options.activation_quant = desc->no_activation_quant == 0;
    auto made = std::make_unique<sy_moe_layer>();
    if (desc->correction_bias != nullptr)
      made->correction_bias.assign(desc->correction_bias,
                                   desc->correction_bias + desc->num_experts);
    made->layer = std::make_unique<switchyard::moe::MoeLayer>(
        switchyard::moe::BuiltinRegistry(), ConfigOf(*desc, made->correction_bias), options,
        std::move(weights));
    made->hidden_size = h;
    made->num_experts = desc->num_experts;
    made->runner = made->layer->runner().name();
    *layer = made.release();
  });
}

void sy_moe_layer_destroy(sy_moe_layer* layer) { delete layer; }

const char* sy_moe_layer_runner(const sy_moe_layer* layer) {
  return layer != nullptr ? layer->runner.c_str() : "";
}

int sy_moe_layer_forward(sy_moe_layer* layer, sy_context* context, const float* hidden,
                         const float* router_logits, size_t num_tokens, float* out,
                         sy_error* error) {
  return Forward(layer, context, hidden, num_tokens, out, error,
                 [&](switchyard::ExecContext& exec, switchyard::ConstRows x) {
                   if (num_tokens != 0) Require(router_logits, "router_logits");
                   RequireProduct(num_tokens, layer->num_experts, "router_logits");
                   return layer->layer->Forward(
                       exec, x,
                       switchyard::ConstRows(router_logits, num_tokens, layer->num_experts));
                 });
}

int sy_moe_layer_forward_routed(sy_moe_layer* layer, sy_context* context, const float* hidden,
                                const int32_t* ids, const float* weights, size_t num_tokens,
                                size_t top_k, float* out, sy_error* error) {
  return Forward(
      layer, context, hidden, num_tokens, out, error,
      [&](switchyard::ExecContext& exec, switchyard::ConstRows x) {
        if (num_tokens != 0) {
          Require(ids, "ids");
          Require(weights, "weights");
        }
        if (top_k == 0) Refuse("top_k must not be 0");
        RequireProduct(num_tokens, top_k, "ids");
        const switchyard::moe::TopKOutput topk{
            num_tokens, top_k, {weights, num_tokens * top_k}, {ids, num_tokens * top_k}, {}};
        return layer->layer->ForwardRouted(exec, x, topk);
      });
}
// NOLINTEND(readability-identifier-naming)
