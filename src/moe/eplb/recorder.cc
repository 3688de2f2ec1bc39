#include "switchyard/moe/eplb/recorder.h"

#include <fmt/format.h>

#include <string>
#include <utility>

#include "switchyard/core/error.h"
#include "switchyard/moe/eplb/algorithms.h"

namespace switchyard::moe {
namespace {

[[noreturn]] void Fail(ErrorCode code, const std::string& message) {
  throw Error(code, "expert recorder: " + message);
}

void CheckOptions(const RecorderOptions& options) {
  if (options.num_logical == 0 || options.num_physical < options.num_logical ||
      options.ep_size == 0 || options.num_physical % options.ep_size != 0 ||
      options.ep_rank >= options.ep_size) {
    Fail(ErrorCode::kInvalidArgument,
         fmt::format("{} logical and {} physical experts on rank {} of {} cannot be; physical "
                     "experts are at least as many as logical ones and a multiple of the ranks",
                     options.num_logical, options.num_physical, options.ep_rank, options.ep_size));
  }
  if (options.buffer_size < -1 || options.buffer_size == 0) {
    Fail(ErrorCode::kInvalidArgument,
         fmt::format("buffer_size must be -1 (all passes) or at least 1, found {}",
                     options.buffer_size));
  }
}

}  // namespace

RecorderMode ParseRecorderMode(std::string_view name) {
  if (name == "stat") return RecorderMode::kStat;
  if (name == "stat_approx") return RecorderMode::kStatApprox;
  if (name == "per_pass") return RecorderMode::kPerPass;
  if (name == "per_token") return RecorderMode::kPerToken;
  Fail(ErrorCode::kInvalidArgument,
       fmt::format("unknown mode \"{}\"; there are: stat, stat_approx, per_pass, per_token", name));
}

ExpertRecorder::ExpertRecorder(const RecorderOptions& options,
                               std::span<const int32_t> physical_to_logical)
    : options_(options) {
  CheckOptions(options);
  SetPlacement(physical_to_logical);
}

void ExpertRecorder::SetPlacement(std::span<const int32_t> physical_to_logical) {
  if (current_) Fail(ErrorCode::kFailedPrecondition, "a placement cannot change within a pass");
  const size_t expected = options_.num_layers * options_.num_physical;
  if (physical_to_logical.size() != expected) {
    Fail(ErrorCode::kInvalidArgument,
         fmt::format("physical_to_logical must have {} layers x {} experts, found {} entries",
                     options_.num_layers, options_.num_physical, physical_to_logical.size()));
  }
  for (size_t i = 0; i < expected; ++i) {
    const int32_t e = physical_to_logical[i];
    if (e < 0 || static_cast<size_t>(e) >= options_.num_logical) {
      Fail(ErrorCode::kInvalidArgument,
           fmt::format("layer {}: physical expert {} must hold a logical expert of 0 to {}, found "
                       "{}",
                       i / options_.num_physical, i % options_.num_physical,
                       options_.num_logical - 1, e));
    }
  }
  physical_to_logical_.assign(physical_to_logical.begin(), physical_to_logical.end());
  Clear();
}

void ExpertRecorder::BeginPass(uint64_t pass_id) {
  if (current_) {
    Fail(ErrorCode::kFailedPrecondition,
         fmt::format("pass {} begins within pass {}", pass_id, current_->pass_id));
  }
  current_ = std::exchange(spare_, {});
  current_->pass_id = pass_id;
  current_->physical_counts.assign(options_.num_layers * options_.num_physical, 0);
  current_->token_ids.assign(options_.mode == RecorderMode::kPerToken ? options_.num_layers : 0,
                             {});
  current_->token_columns.assign(current_->token_ids.size(), 0);
}

void ExpertRecorder::EndPass() {
  if (!current_) Fail(ErrorCode::kFailedPrecondition, "a pass ends that has not begun");
  RecordedPass pass = std::move(current_).value();
  current_.reset();
  if (!is_recording_) return;
  if (options_.buffer_size > 0 && passes_.size() == static_cast<size_t>(options_.buffer_size)) {
    spare_ = std::exchange(passes_[oldest_], std::move(pass));
    oldest_ = (oldest_ + 1) % passes_.size();
  } else {
    passes_.push_back(std::move(pass));
  }
}

void ExpertRecorder::CheckLayer(size_t layer) const {
  if (layer >= options_.num_layers) {
    Fail(ErrorCode::kInvalidArgument,
         fmt::format("layer {} is recorded, there are {}", layer, options_.num_layers));
  }
}

void ExpertRecorder::OnPhysicalExperts(const RoutedExperts& routed) {
  if (!is_recording_ || !current_ || options_.mode == RecorderMode::kStatApprox) return;
  CheckLayer(routed.layer_id);
  int32_t* counts = current_->physical_counts.data() + routed.layer_id * options_.num_physical;
  for (int32_t id : routed.ids)
    if (id >= 0 && static_cast<size_t>(id) < options_.num_physical) ++counts[id];
  if (options_.mode != RecorderMode::kPerToken) return;
  std::vector<int32_t>& kept = current_->token_ids[routed.layer_id];
  kept.insert(kept.end(), routed.ids.begin(), routed.ids.end());
  current_->token_columns[routed.layer_id] = routed.num_columns;
}

void ExpertRecorder::OnDispatchNormal(size_t layer, std::span<const int32_t> counts) {
  AddLocal(layer, counts);
}

void ExpertRecorder::OnDispatchLowLatency(size_t layer, std::span<const int32_t> masked_m) {
  AddLocal(layer, masked_m);
}

void ExpertRecorder::AddLocal(size_t layer, std::span<const int32_t> counts) {
  if (!is_recording_ || !current_ || options_.mode != RecorderMode::kStatApprox) return;
  CheckLayer(layer);
  const size_t per_rank = options_.num_physical / options_.ep_size;
  if (counts.size() != per_rank) {
    Fail(ErrorCode::kInvalidArgument,
         fmt::format("layer {}: {} counts of local experts were given, a rank has {}", layer,
                     counts.size(), per_rank));
  }
  int32_t* own = current_->physical_counts.data() + layer * options_.num_physical +
                 options_.ep_rank * per_rank;
  for (size_t i = 0; i < per_rank; ++i) own[i] += counts[i];
}

const RecordedPass& ExpertRecorder::Pass(size_t index) const {
  if (index >= passes_.size()) {
    Fail(ErrorCode::kInvalidArgument,
         fmt::format("pass {} is asked for, {} are kept", index, passes_.size()));
  }
  return passes_[(oldest_ + index) % passes_.size()];
}

RecordedLoads ExpertRecorder::Dump() const {
  const size_t num_rows = options_.num_layers * options_.num_physical;
  RecordedLoads loads;
  loads.num_steps = passes_.size();
  loads.tokens_per_expert.assign(passes_.size() * options_.num_layers * options_.num_logical, 0);
  double utilization = 0;
  for (size_t s = 0; s < passes_.size(); ++s) {
    const RecordedPass& pass = Pass(s);
    float* step = loads.tokens_per_expert.data() + s * options_.num_layers * options_.num_logical;
    for (size_t i = 0; i < num_rows; ++i) {
      const size_t layer = i / options_.num_physical;
      step[layer * options_.num_logical + static_cast<size_t>(physical_to_logical_[i])] +=
          static_cast<float>(pass.physical_counts[i]);
    }
    for (size_t l = 0; l < options_.num_layers; ++l) utilization += Balancedness(pass, l);
  }
  const size_t figures = passes_.size() * options_.num_layers;
  if (figures != 0) loads.mean_utilization = utilization / static_cast<double>(figures);
  return loads;
}

void ExpertRecorder::Clear() {
  passes_.clear();
  oldest_ = 0;
}

std::vector<double> ExpertRecorder::RankTokens(const RecordedPass& pass, size_t layer) const {
  CheckLayer(layer);
  std::vector<double> tokens(options_.ep_size, 0.0);
  const size_t per_rank = options_.num_physical / options_.ep_size;
  for (size_t p = 0; p < options_.num_physical; ++p)
    tokens[p / per_rank] += pass.physical_counts[layer * options_.num_physical + p];
  return tokens;
}

double ExpertRecorder::Balancedness(const RecordedPass& pass, size_t layer) const {
  return Utilization(RankTokens(pass, layer));
}

std::vector<double> ExpertRecorder::RankTokens(size_t layer) const {
  CheckLayer(layer);
  std::vector<double> sum(options_.ep_size, 0.0);
  for (const RecordedPass& pass : passes_) {
    const std::vector<double> tokens = RankTokens(pass, layer);
    for (size_t r = 0; r < sum.size(); ++r) sum[r] += tokens[r];
  }
  return sum;
}

}  // namespace switchyard::moe
