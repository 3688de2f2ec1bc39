// Kind "activation": gate and up rows -> activated rows, by the kernel that a layer with this
// config would use.
#include "replay/activation.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <optional>

#include "model/config_reader.h"
#include "switchyard/core/error.h"
#include "switchyard/moe/registry/activation.h"

namespace switchyard::replay {
namespace {

std::optional<float> OptionalFloat(const CaseFile& file, std::string_view key) {
  if (!file.HasConfig(key)) return std::nullopt;
  const double value = file.Number(key);
  if (std::abs(value) > std::numeric_limits<float>::max())
    file.Corrupt(fmt::format("\"{}\" of the config is {}, which f32 cannot hold", key, value));
  return static_cast<float>(value);
}

// One row of gate and up values, apart from each other.
struct GateUp {
  std::vector<float> gate, up;
};

// Shapes: row [2 n] with a gate (halves, or pairs of gate and up), else [n]; sets n values each.
void Split(const float* row, const moe::MoeRunnerConfig& config, GateUp& out) {
  const size_t n = out.gate.size();
  const size_t step = config.is_gated && config.gate_up_interleaved ? 2 : 1;
  const float* up = config.gate_up_interleaved ? row + 1 : row + n;
  for (size_t i = 0; i < n; ++i) {
    out.gate[i] = row[i * step];
    if (config.is_gated) out.up[i] = up[i * step];
  }
}

}  // namespace

void ReadActivation(const CaseFile& file, moe::MoeRunnerConfig& config) {
  config.activation = file.Text("activation");
  config.is_gated = file.Flag("is_gated");
  config.gemm1_alpha = OptionalFloat(file, "gemm1_alpha");
  config.gemm1_clamp_limit = OptionalFloat(file, "gemm1_clamp_limit");
  config.swiglu_limit = OptionalFloat(file, "swiglu_limit");
  const std::string layout = file.Text("gate_up_layout");
  if (layout != "halves" && layout != "interleaved") {
    throw Error(ErrorCode::kUnsupported,
                fmt::format("gate_up_layout is {}, expected halves or interleaved",
                            QuoteForMessage(layout)));
  }
  config.gate_up_interleaved = layout == "interleaved";
}

KindOutput ReplayActivation(const KindInput& input) {
  const CaseFile& file = input.file;
  moe::MoeRunnerConfig config;
  ReadActivation(file, config);
  const Activation activation = moe::ResolveActivation(input.registry, config);

  const size_t rows = file.Size("num_rows");
  const size_t n = file.Size("intermediate_size");
  const std::vector<float> gate_up = file.F32("in.gate_up");
  // The shape proves n: a row that is in the file is no larger than memory.
  const size_t columns = config.is_gated && n <= gate_up.size() ? 2 * n : n;
  file.View("in.gate_up", {rows, columns});
  if (rows == 0 || n == 0) return {{{"out.y", {{rows, n}, {}}}}, {}};

  GateUp row{std::vector<float>(n), std::vector<float>(n)};
  std::vector<double> values;
  for (size_t t = 0; t < rows; ++t) {
    Split(gate_up.data() + t * columns, config, row);
    activation(row.gate.data(), row.up.data(), n, row.gate.data());
    if (input.options.act_dtype == "bf16") {
      for (float& value : row.gate) value = ToFloat(ToBF16(value));
    }
    values.insert(values.end(), row.gate.begin(), row.gate.end());
  }
  return {{{"out.y", {{rows, n}, std::move(values)}}}, {}};
}

}  // namespace switchyard::replay
