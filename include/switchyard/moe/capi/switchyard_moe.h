// The MoE layer for C and for every language that can call C.
//
// Every function that can fail returns SY_OK or an error code, and fills `error` if it is not NULL;
// nothing is thrown across this border, and a failed call leaves its objects usable. Strings are
// UTF-8 and only read during the call. Objects are not thread-safe: one call at a time each.
#pragma once

#include <stddef.h>
#include <stdint.h>

// C names.
// NOLINTBEGIN(readability-identifier-naming)
#ifdef __cplusplus
extern "C" {
#endif

// Kinds of failure; core/error.h says more.
enum sy_code {
  SY_OK = 0,
  SY_INVALID_ARGUMENT = 1,
  SY_FAILED_PRECONDITION = 2,
  SY_NOT_FOUND = 3,
  SY_CORRUPT_DATA = 4,
  SY_UNSUPPORTED = 5,
  SY_RESOURCE_EXHAUSTED = 6,
  SY_UNAVAILABLE = 7,
  SY_CANCELLED = 8,
  SY_INTERNAL = 9
};

// What failed: one of the codes, and a message that names layer, tensor, shape or setting.
typedef struct sy_error {
  int code;
  char message[1024];
} sy_error;

// Threads and scratch memory of calls.
typedef struct sy_context sy_context;
// One MoE layer.
typedef struct sy_moe_layer sy_moe_layer;

// The matrices of one product, one pointer per expert; the bytes stay the caller's and must outlive
// the layer; the lists of pointers are copied. Shapes: w1 (gate) and w3 (up) [I, H], w2 (down) [H,
// I], row-major. dtype: "F32", "F16", "BF16", "I8", "U8", "I4", "U4", "F8_E4M3", "F4_E2M1" (two
// elements a byte, the even one in the low nibble). With scale_rows != 0, w = (q - zero) * scale on
// a grid [ceil(rows / scale_rows), ceil(cols / scale_cols)] of scale_dtype ("F32", "F16", "BF16",
// "F8_E8M0"). zero and bias may be NULL. stride, scale_stride and bias_stride count elements from
// one row to the next; 0 = the rows touch. A stacked w13 whose gate and up rows alternate is w1 and
// w3 with twice the strides, w3 starting one row later.
typedef struct sy_expert_bank {
  const char* dtype;
  const void* const* data;
  size_t scale_rows;
  size_t scale_cols;
  const char* scale_dtype;
  const void* const* scale;
  const uint8_t* const* zero;
  const float* const* bias;
  size_t stride, scale_stride, bias_stride;
  float act_scale;   // of the static activation quantisers; 0 = 1
  float act_offset;  // of scheme w8a8_int8_static
} sy_expert_bank;

// A layer. Set struct_size to sizeof(sy_moe_layer_desc) and the rest to 0; NULL strings take the
// defaults in parentheses.
typedef struct sy_moe_layer_desc {
  size_t struct_size;
  size_t layer_id;  // for messages
  size_t num_experts, hidden_size, intermediate_size, top_k;
  const char* scoring_func;      // softmax, sigmoid or sqrtsoftplus (softmax)
  int keep_score;                // 1 = do not divide the chosen weights by their sum
  const float* correction_bias;  // [num_experts] or NULL; copied
  size_t num_expert_group;       // 0 = experts are not grouped
  size_t topk_group;             // groups that a token may choose from
  size_t num_shared_experts;     // fused shared experts: columns of top_k, and the last matrices
  double routed_scaling_factor;  // 0 = 1
  const char* activation;        // (silu)
  int not_gated;                 // 1 = w3 is absent
  int router_weight_on_input;    // 1 = x is multiplied by its weight before w1; top_k 1
  const int32_t* expert_mask;    // [num_experts + num_shared_experts], 1 = held here; or NULL = all
  float gemm1_alpha, gemm1_clamp_limit, swiglu_limit;  // 0 = unset
  const char* scheme_w13;                              // (unquant)
  const char* scheme_w2;                               // (that of w13)
  const char* runner;                                  // (auto)
  const char* a2a;                                     // (none)
  const char* act_dtype;                               // (auto)
  int no_activation_quant;                             // 1 = weight-only arithmetic
  sy_expert_bank w1, w3, w2;
} sy_moe_layer_desc;

// num_threads 0 = one for each core. Errors: SY_RESOURCE_EXHAUSTED.
int sy_context_create(size_t num_threads, sy_context** context, sy_error* error);
// NULL is allowed.
void sy_context_destroy(sy_context* context);

// Errors: SY_INVALID_ARGUMENT (shapes, top_k, a bank that is not of its scheme, a NULL pointer),
// SY_NOT_FOUND (unknown scheme, runner, activation), SY_UNSUPPORTED.
int sy_moe_layer_create(const sy_moe_layer_desc* desc, sy_moe_layer** layer, sy_error* error);
// NULL is allowed.
void sy_moe_layer_destroy(sy_moe_layer* layer);
// The runner that was chosen; lives as long as the layer.
const char* sy_moe_layer_runner(const sy_moe_layer* layer);

// Routes and runs. Shapes: hidden [T, H], router_logits [T, E], out [T, H]; T may be 0.
int sy_moe_layer_forward(sy_moe_layer* layer, sy_context* context, const float* hidden,
                         const float* router_logits, size_t num_tokens, float* out,
                         sy_error* error);
// Runs a routing made elsewhere. Shapes: ids and weights [T, K], id -1 = no expert.
// Errors: SY_INVALID_ARGUMENT naming token and id for an id that is no expert.
int sy_moe_layer_forward_routed(sy_moe_layer* layer, sy_context* context, const float* hidden,
                                const int32_t* ids, const float* weights, size_t num_tokens,
                                size_t top_k, float* out, sy_error* error);

#ifdef __cplusplus
}
#endif
// NOLINTEND(readability-identifier-naming)
