#include "model/latent_attention.h"

#include <algorithm>

#include "kernels/norm/rms_norm.h"
#include "kernels/rope/rope.h"
#include "model/stage_work.h"
#include "quant/act_quant.h"
#include "quant/linear.h"

namespace switchyard {
namespace {

// Of the norms inside the block: transformers leaves them at its default, whatever the config says.
constexpr float kLatentNormEps = 1e-6f;

const float* DataOrNull(const std::vector<float>& values) {
  return values.empty() ? nullptr : values.data();
}

class LatentBlock {
 public:
  LatentBlock(ExecContext& context, const LatentAttentionArgs& args)
      : context_(context),
        args_(args),
        latent_(*args.config.latent),
        key_dim_(args.config.kv_shape().key_dim),
        head_dim_(args.config.head_dim),
        mine_(args.tensor_parallel.MySlice(args.config.num_heads)) {}

  Rows Run(ConstRows x) {
    const Rows kv = context_.arena.AllocateRows(x.rows, key_dim_);
    const Rows q = context_.arena.AllocateRows(x.rows, args_.config.num_heads * head_dim_);
    {
      const StageTimer timer(context_.profile, Stage::kQkv);
      Project(x, q, kv);
    }
    {
      const StageTimer timer(context_.profile, Stage::kRope);
      Rotate(q, kv);
      StoreKeysAndValues(context_, args_.config, args_.chunks, args_.cache, args_.layer, kv, {});
    }
    const Rows sums = context_.arena.AllocateRows(x.rows, mine_.count * latent_.kv_rank);
    if (mine_.count != 0) {
      const Rows absorbed = AbsorbKeys(q);
      const QueryHeads heads{0, 1, mine_.count};
      const StageTimer timer(context_.profile, Stage::kAttention, [&] {
        return AttentionWork(args_.config, args_.chunks, args_.cache, args_.layer, heads);
      });
      Attend(context_, args_.config, args_.chunks, args_.cache, args_.layer,
             args_.act_for(args_.weights.key_up[0]), heads, absorbed, sums);
    }
    return Values(sums);
  }

 private:
  // Queries of all heads, and the latent row [c ; r], normalised but not rotated.
  void Project(ConstRows x, Rows q, Rows kv) {
    const AttentionWeights& w = args_.weights;
    const quant::LinearJob to_kv = Job(w.kv_a, w.kv_a_bias, kv);
    const quant::LinearJob to_q = Job(w.q, {}, q);
    if (latent_.q_rank == 0) {
      const quant::LinearJob jobs[] = {to_q, to_kv};
      Count(jobs, x.rows);
      args_.tensor_parallel.RunLinears(context_, x, jobs, args_.layer);
    } else {
      const Rows q_a = context_.arena.AllocateRows(x.rows, latent_.q_rank);
      const quant::LinearJob jobs[] = {Job(w.q_a, w.q_a_bias, q_a), to_kv};
      Count(jobs, x.rows);
      Count({&to_q, 1}, x.rows);
      args_.tensor_parallel.RunLinears(context_, x, jobs, args_.layer);
      Normalize(q_a, w.q_a_norm);
      args_.tensor_parallel.Linear(context_, q_a, to_q, args_.layer);
    }
    const Rows latent(kv.data, kv.rows, latent_.kv_rank, kv.stride);
    Normalize(latent, w.kv_a_norm);
    if (w.kv_b_act.kind == ActQuantKind::kNone) return;
    // What kv_b would have met.
    quant::DequantizeRows(context_, quant::QuantizeRows(context_, latent, w.kv_b_act), latent);
  }

  void Count(std::span<const quant::LinearJob> jobs, size_t rows) const {
    if (context_.profile != nullptr) context_.profile->Add(Stage::kQkv, WorkOf(jobs, rows));
  }

  quant::LinearJob Job(const WeightMatrix& weight, const std::vector<float>& bias, Rows out) {
    return {weight, DataOrNull(bias), out, args_.act_for(weight)};
  }

  void Normalize(Rows rows, const std::vector<float>& weight) {
    quant::ForEachRow(context_, rows.rows, [&](size_t t) {
      kernels::RmsNorm(rows.Row(t), weight.data(), rows.cols, kLatentNormEps, rows.Row(t));
    });
  }

  // The last values of each of the own heads, and of the latent rows.
  void Rotate(Rows q, Rows kv) {
    const size_t half = args_.config.rope.rotary_dim / 2;
    const auto rotate =
        args_.config.rope.interleaved ? kernels::RotatePairs : kernels::RotateHalves;
    quant::ForEachRow(context_, q.rows, [&](size_t t) {
      const float* cos = args_.rope.cos.Row(t);
      const float* sin = args_.rope.sin.Row(t);
      rotate(kv.Row(t) + latent_.kv_rank, cos, sin, half);
      for (size_t h = mine_.first; h < mine_.first + mine_.count; ++h)
        rotate(q.Row(t) + h * head_dim_ + latent_.nope_dim, cos, sin, half);
    });
  }

  // [Wk^T q ; q_r] of the own heads. Shapes: returns [T, mine * key_dim].
  Rows AbsorbKeys(ConstRows q) {
    const StageTimer timer(context_.profile, Stage::kQkv);
    const Rows absorbed = context_.arena.AllocateRows(q.rows, mine_.count * key_dim_);
    const quant::ActRows acts =
        quant::PrepareActivations(context_, q, args_.act_for(args_.weights.key_up[0]));
    const std::span<quant::LinearCall> calls =
        context_.arena.AllocateSpan<quant::LinearCall>(mine_.count);
    for (size_t i = 0; i < mine_.count; ++i) {
      const size_t head = mine_.first + i;
      calls[i] = {quant::SliceColumns(context_.arena, acts, head * head_dim_, latent_.nope_dim),
                  {args_.weights.key_up[head], nullptr,
                   Rows(absorbed.data + i * key_dim_, q.rows, latent_.kv_rank, absorbed.stride)}};
      Count({&calls[i].job, 1}, q.rows);
    }
    quant::RunLinearCalls(context_, calls);
    quant::ForEachRow(context_, q.rows, [&](size_t t) {
      for (size_t i = 0; i < mine_.count; ++i) {
        std::copy_n(q.Row(t) + (mine_.first + i) * head_dim_ + latent_.nope_dim,
                    args_.config.rope.rotary_dim, absorbed.Row(t) + i * key_dim_ + latent_.kv_rank);
      }
    });
    return absorbed;
  }

  // Wv times the sums of the own heads, put together with those of the others.
  Rows Values(ConstRows sums) {
    const StageTimer timer(context_.profile, Stage::kQkv);
    const size_t width = latent_.value_dim;
    const Rows out = context_.arena.AllocateRows(sums.rows, args_.config.num_heads * width);
    if (mine_.count != 0) {
      const quant::ActRows acts =
          quant::PrepareActivations(context_, sums, args_.act_for(args_.weights.value_up[0]));
      const std::span<quant::LinearCall> calls =
          context_.arena.AllocateSpan<quant::LinearCall>(mine_.count);
      for (size_t i = 0; i < mine_.count; ++i) {
        const size_t head = mine_.first + i;
        calls[i] = {quant::SliceColumns(context_.arena, acts, i * latent_.kv_rank, latent_.kv_rank),
                    {args_.weights.value_up[head], nullptr,
                     Rows(out.data + head * width, out.rows, width, out.stride)}};
        Count({&calls[i].job, 1}, sums.rows);
      }
      quant::RunLinearCalls(context_, calls);
    }
    const TensorParallel::Matrix by_head{out, width};
    args_.tensor_parallel.Gather(context_, {&by_head, 1}, args_.layer);
    return out;
  }

  ExecContext& context_;
  const LatentAttentionArgs& args_;
  const LatentAttention& latent_;
  const size_t key_dim_;   // of a latent row, [c ; r]
  const size_t head_dim_;  // of a query, [q ; q_r]
  const TensorParallel::Slice mine_;
};

}  // namespace

Rows AttendLatent(ExecContext& context, const LatentAttentionArgs& args, ConstRows x) {
  return LatentBlock(context, args).Run(x);
}

}  // namespace switchyard
