/* The C API as a C program sees it: a layer, a call, refusals with their messages, and a good call after each. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "switchyard/moe/capi/switchyard_moe.h"

enum { kExperts = 3, kHidden = 4, kInner = 5, kTokens = 2 };

static void require(int condition, const char* what) {
  if (condition) return;
  fprintf(stderr, "failed: %s\n", what);
  exit(1);
}

/* silu(1) * 1 in every inner value, down weights 0.2, weights of a token that add up to 1. */
static void good_call(sy_moe_layer* layer, sy_context* context) {
  float hidden[kTokens * kHidden], out[kTokens * kHidden];
  const int32_t ids[kTokens * 2] = {0, 2, 1, -1};
  const float weights[kTokens * 2] = {0.25f, 0.75f, 0.5f, 9.0f};
  sy_error error;
  for (int i = 0; i < kTokens * kHidden; ++i) hidden[i] = 1.0f;
  require(sy_moe_layer_forward_routed(layer, context, hidden, ids, weights, kTokens, 2, out, &error) == SY_OK,
          error.message);
  const double silu = 1.0 / (1.0 + exp(-1.0));
  require(fabs(out[0] - silu) < 1e-5 && fabs(out[kHidden] - 0.5 * silu) < 1e-5, "the values of a good call");
}

int main(void) {
  float w13[kInner * kHidden], w2[kHidden * kInner];
  const void *up[kExperts], *down[kExperts];
  for (int i = 0; i < kInner * kHidden; ++i) w13[i] = 0.25f;
  for (int i = 0; i < kHidden * kInner; ++i) w2[i] = 0.2f;
  for (int e = 0; e < kExperts; ++e) up[e] = w13, down[e] = w2;

  sy_moe_layer_desc desc;
  memset(&desc, 0, sizeof desc);
  desc.struct_size = sizeof desc;
  desc.layer_id = 7;
  desc.num_experts = kExperts;
  desc.hidden_size = kHidden;
  desc.intermediate_size = kInner;
  desc.top_k = 2;
  desc.w1.dtype = desc.w3.dtype = desc.w2.dtype = "F32";
  desc.w1.data = desc.w3.data = up;
  desc.w2.data = down;

  sy_error error;
  sy_context* context = NULL;
  sy_moe_layer* layer = NULL;
  require(sy_context_create(2, &context, &error) == SY_OK, error.message);
  require(sy_moe_layer_create(&desc, &layer, &error) == SY_OK, error.message);
  require(strcmp(sy_moe_layer_runner(layer), "aiter") == 0, "the runner that auto takes");
  good_call(layer, context);

  float x[kHidden] = {0}, out[kHidden];
  const int32_t wrong_id[2] = {0, kExperts};
  const float weights[2] = {1, 1};
  require(sy_moe_layer_forward_routed(layer, context, x, wrong_id, weights, 1, 2, out, &error) == SY_INVALID_ARGUMENT &&
              strstr(error.message, "layer 7") && strstr(error.message, "expert 3"), error.message);
  good_call(layer, context);
  require(sy_moe_layer_forward(layer, context, x, NULL, 1, out, &error) == SY_INVALID_ARGUMENT, "NULL logits");
  good_call(layer, context);

  require(sy_moe_layer_forward_routed(layer, context, x, wrong_id, weights, 8, (size_t)1 << 61, out, &error) ==
              SY_INVALID_ARGUMENT && strstr(error.message, "more than any memory"), error.message);
  require(sy_moe_layer_forward(layer, context, x, weights, (size_t)1 << 61, out, &error) == SY_INVALID_ARGUMENT,
          "a wrapping number of tokens");
  good_call(layer, context);

  /* gate and up rows in turn, the second expert held elsewhere, the bias copied at once */
  float interleaved[2 * kInner * kHidden], bias[kExperts] = {0, 0, 0};
  const void *gate[kExperts], *second[kExperts];
  for (int i = 0; i < 2 * kInner * kHidden; ++i) interleaved[i] = i / kHidden % 2 == 0 ? 0.25f : -0.25f;
  for (int e = 0; e < kExperts; ++e) gate[e] = interleaved, second[e] = interleaved + kHidden;
  const int32_t mask[kExperts] = {1, 0, 1};
  desc.w1.data = gate;
  desc.w3.data = second;
  desc.w1.stride = desc.w3.stride = 2 * kHidden;
  desc.expert_mask = mask;
  desc.correction_bias = bias;
  sy_moe_layer* masked = NULL;
  require(sy_moe_layer_create(&desc, &masked, &error) == SY_OK, error.message);
  bias[1] = 100;
  const float one[kHidden] = {1, 1, 1, 1}, logits[kExperts] = {3, 0, 0};
  require(sy_moe_layer_forward(masked, context, one, logits, 1, out, &error) == SY_OK, error.message);
  const double share = exp(3) / (exp(3) + 1);  /* experts 0 and 1 are chosen, 1 is elsewhere */
  require(fabs(out[0] + share / (1.0 + exp(-1.0))) < 1e-5, "a masked, interleaved layer");
  sy_moe_layer_destroy(masked);
  desc.w1.data = desc.w3.data = up;
  desc.w1.stride = desc.w3.stride = 0;
  desc.expert_mask = NULL;
  desc.correction_bias = NULL;

  sy_moe_layer* none = layer;
  desc.w1.scale = up;
  require(sy_moe_layer_create(&desc, &none, &error) == SY_INVALID_ARGUMENT && strstr(error.message, "scale_rows"),
          error.message);
  desc.w1.scale = NULL;
  desc.top_k = 9;
  require(sy_moe_layer_create(&desc, &none, &error) == SY_INVALID_ARGUMENT && none == NULL, "top_k 9 of 3");
  desc.top_k = 2;
  desc.scheme_w13 = "fp8_blok";
  require(sy_moe_layer_create(&desc, &none, NULL) == SY_NOT_FOUND, "an unknown scheme");
  desc.scheme_w13 = "fp8_block";
  require(sy_moe_layer_create(&desc, &none, &error) == SY_INVALID_ARGUMENT && strstr(error.message, "fp8_block"),
          error.message);
  desc.struct_size = 3;
  require(sy_moe_layer_create(&desc, &none, &error) == SY_INVALID_ARGUMENT, "another struct_size");
  sy_moe_layer_destroy(layer);
  sy_moe_layer_destroy(NULL);
  sy_context_destroy(context);
  puts("all good");
  return 0;
}
