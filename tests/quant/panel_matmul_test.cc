// Products with matrices in panels as layers run them: experts' gate, up and down products and
// linear layers, of every kind of weights, against f64; and the same bits for any number of threads
// and NUMA nodes and in any company.
#include "quant/panel_matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "kernels/activations/activations.h"
#include "kernels/convert/convert.h"
#include "quant/expert_matmul.h"
#include "quant/expert_rows.h"
#include "quant/ggml_quant.h"
#include "quant/weight_quant.h"
#include "testing/guarded.h"
#include "testing/random.h"
#include "testing/targets.h"

namespace switchyard::quant {
namespace {

constexpr size_t kExperts = 3;

// How a matrix is made: by a quantiser, or in a type that is one by itself.
struct Kind {
  std::string name;
  DType dtype = DType::kF32;
  WeightQuant how = {};
  ActQuant act = {};  // of the scheme

  bool is_quantized() const { return dtype == DType::kF32; }
  QuantMatrix Make(ConstRows w) const {
    if (is_quantized()) return QuantizeMatrix(w, how);
    QuantMatrix matrix = QuantMatrix::Make({.dtype = dtype}, w.rows, w.cols);
    const size_t row_bytes = BytesOf(dtype, matrix.stride);
    for (size_t n = 0; n < w.rows; ++n) {
      const std::span<std::byte> row(matrix.data.data() + n * row_bytes, row_bytes);
      if (IsGgmlBlock(dtype)) {
        EncodeGgmlRow(dtype, w.RowSpan(n), row);
      } else {
        kernels::ConvertFromF32(w.Row(n), w.cols, dtype, row.data());
      }
    }
    return matrix;
  }
};

std::vector<Kind> AllKinds() {
  return {
      {"bf16", DType::kBF16},
      {"f16", DType::kF16},
      {"Q8_0", DType::kGgmlQ80},
      {"Q4_1", DType::kGgmlQ41},
      {"Q4_K", DType::kGgmlQ4K},
      {"Q6_K", DType::kGgmlQ6K},
      {"u4 with zeros", DType::kF32, WeightQuant::Uint4Group(32, DType::kF16)},
      {"w8a8", DType::kF32, WeightQuant::Int8Channel(), {.kind = ActQuantKind::kInt8Token}},
      {"fp8 block",
       DType::kF32,
       WeightQuant::Fp8Block(128, 128),
       {.kind = ActQuantKind::kFp8Group}},
      {"mxfp4", DType::kF32, WeightQuant::MxFp4(MxScaleRule::kOcpFloor, MxRounding::kHalfToEven)}};
}

// Sizes of an expert: inputs, and outputs of gate and up. Those of gpt-oss and of small models with
// experts of 192, and the smallest that there are.
struct Sizes {
  size_t hidden, inner;
};
std::vector<Sizes> SizesFor(DType dtype) {
  switch (DTypeBlock(dtype)) {
    case 256: return {{768, 256}, {256, 256}};
    case 32: return {{2880, 192}, {896, 32}, {32, 32}};
    default: return {{2880, 192}, {896, 33}, {33, 5}, {5, 1}, {1, 1}};
  }
}

// The matrices of all experts, as they were made and in panels that end at an unreadable page.
class PanelBank {
 public:
  PanelBank(const Kind& kind, size_t rows, size_t cols, std::mt19937_64& random)
      : source_(Matrices(kind, rows, cols, random)) {
    view_ = source_.View();
    const MatrixFormat format = InPanels(view_.format, cols);
    for (size_t expert = 0; expert < kExperts && format.in_panels; ++expert) {
      const PanelMatrix panels(format, cols);
      std::byte* data = bytes_.emplace_back(PanelBytes(format, rows, cols)).data();
      for (size_t panel = 0; panel < kernels::NumPanels(rows); ++panel)
        PackPanel(view_, expert, panel, data + panel * panels.layout.panel_bytes);
      data_.push_back(data);
    }
    if (!format.in_panels) return;
    view_ = {};
    view_.format = format;
    view_.rows = rows;
    view_.cols = cols;
    view_.data = data_;
  }
  bool has_panels() const { return view_.format.in_panels; }
  const ExpertMatrices& view() const { return view_; }
  ExpertMatrices source() const { return source_.View(); }

 private:
  static MatrixBank Matrices(const Kind& kind, size_t rows, size_t cols, std::mt19937_64& random) {
    std::vector<QuantMatrix> matrices;
    for (size_t expert = 0; expert < kExperts; ++expert) {
      const std::vector<float> w = testing::RandomFloats(random, rows * cols, 0.1f);
      matrices.push_back(kind.Make(ConstRows(w.data(), rows, cols)));
    }
    return MatrixBank(std::move(matrices));
  }

  MatrixBank source_;
  std::deque<testing::GuardedBuffer<std::byte>> bytes_;
  std::vector<const std::byte*> data_;
  ExpertMatrices view_;
};

struct Layer {
  Layer(const Kind& kind_in, const Sizes& sizes_in, std::mt19937_64& random)
      : kind(kind_in),
        sizes(sizes_in),
        gate(kind, sizes.inner, sizes.hidden, random),
        up(kind, sizes.inner, sizes.hidden, random),
        down(kind, sizes.hidden, sizes.inner, random),
        x(testing::RandomFloats(random, kRows * sizes.hidden)) {}

  // Expert 0 has one row, expert 1 none, expert 2 the others.
  static constexpr size_t kRows = 5;
  static constexpr uint32_t kIds[] = {0, 2};
  static constexpr uint32_t kBegin[] = {0, 1, kRows};

  bool has_panels() const { return gate.has_panels() && down.has_panels(); }
  std::string Name() const {
    return kind.name + " " + std::to_string(sizes.hidden) + " x " + std::to_string(sizes.inner);
  }

  const Kind& kind;
  Sizes sizes;
  PanelBank gate, up, down;
  std::vector<float> x;
};

const Activation& Silu() {
  static const Activation silu{kernels::FindActivation("silu"), {}};
  return silu;
}

// Workers, and the nodes that they are on, made up.
struct Workers {
  size_t threads = 1, nodes = 1;

  std::vector<size_t> NodeOfWorker() const {
    std::vector<size_t> node(threads);
    for (size_t w = 0; w < threads; ++w) node[w] = w * nodes / threads;
    return node;
  }
};
constexpr Workers kManyWorkers[] = {{2, 1}, {3, 1}, {2, 2}, {3, 2}, {4, 4}};

// What the experts make of some of the rows.
std::vector<float> RunExperts(const Layer& layer, const ExpertGroups& groups, ConstRows x,
                              const ActQuant& how, DType act_dtype, const Workers& workers) {
  ThreadPool pool(workers.NodeOfWorker());
  Arena arena;
  ExecContext context{pool, arena};
  const ExpertMatrices& w1 = layer.gate.view();
  const ExpertMatrices& w2 = layer.down.view();
  const ActRows rows = PrepareExpertRows(context, QuantRows::Plain(x), how, w1.format, act_dtype);
  const QuantRows hidden = GateUp(context, groups, rows, {w1, layer.up.view(), true, Silu()},
                                  HiddenDType(how, w2.format, act_dtype));
  const Rows out =
      Down(context, groups, PrepareExpertRows(context, hidden, how, w2.format, act_dtype), w2);
  return {out.data, out.data + out.rows * out.stride};
}
std::vector<float> RunAll(const Layer& layer, const ActQuant& how, DType act_dtype,
                          const Workers& workers) {
  return RunExperts(layer, {Layer::kIds, Layer::kBegin},
                    ConstRows(layer.x.data(), Layer::kRows, layer.sizes.hidden), how, act_dtype,
                    workers);
}

std::vector<double> Product(const std::vector<double>& x, const ExpertMatrices& w, size_t expert) {
  std::vector<double> out(w.rows);
  std::vector<double> row(w.cols);
  for (size_t n = 0; n < w.rows; ++n) {
    MatrixRow(w, expert, n, row);
    for (size_t k = 0; k < w.cols; ++k) out[n] += x[k] * row[k];
  }
  return out;
}

// Row m of RunAll in f64, by the matrices before they were packed.
std::vector<double> Expected(const Layer& layer, size_t m) {
  const size_t expert = m == 0 ? 0 : 2;
  const float* x = layer.x.data() + m * layer.sizes.hidden;
  const std::vector<double> row(x, x + layer.sizes.hidden);
  std::vector<double> hidden = Product(row, layer.gate.source(), expert);
  const std::vector<double> up = Product(row, layer.up.source(), expert);
  for (size_t i = 0; i < hidden.size(); ++i) hidden[i] *= up[i] / (1 + std::exp(-hidden[i]));
  return Product(hidden, layer.down.source(), expert);
}

double RelativeL2(const float* values, const std::vector<double>& expected) {
  double error = 0, size = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    error += std::pow(double{values[i]} - expected[i], 2);
    size += std::pow(expected[i], 2);
  }
  return std::sqrt(error / (size + 1e-30));
}

bool SameBits(std::span<const float> a, std::span<const float> b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size_bytes()) == 0;
}

// Made once: encoding takes most of the time.
const std::deque<Layer>& AllLayers() {
  static const std::vector<Kind> kinds = AllKinds();
  static const std::deque<Layer> layers = [] {
    auto random = testing::MakeRandom(111);
    std::deque<Layer> all;
    for (const Kind& kind : kinds) {
      for (const Sizes& sizes : SizesFor(kind.dtype)) {
        const Layer& layer = all.emplace_back(kind, sizes, random);
        if (!layer.has_panels()) all.pop_back();
      }
    }
    return all;
  }();
  return layers;
}

template <typename Check>
void ForEachLayer(const Check& check) {
  ASSERT_GE(AllLayers().size(), 20u);
  testing::ForEachTarget([&] {
    for (const Layer& layer : AllLayers()) {
      SCOPED_TRACE(layer.Name());
      check(layer);
      if (::testing::Test::HasFatalFailure()) return;
    }
  });
}

constexpr DType kActDTypes[] = {DType::kF32, DType::kBF16, DType::kI8};

TEST(PanelExperts, AgreeWithF64) {
  constexpr size_t kChecked[] = {0, Layer::kRows - 1};
  std::map<const Layer*, std::vector<std::vector<double>>> expected;
  ForEachLayer([&](const Layer& layer) {
    std::vector<std::vector<double>>& rows = expected[&layer];
    if (rows.empty()) {
      for (size_t m : kChecked) rows.push_back(Expected(layer, m));
    }
    for (DType act_dtype : kActDTypes) {
      // Two products, each after a rounding of its rows: to f32, to 8 bits of mantissa, or to 127
      // steps of the largest of 32 values. The few terms of the smallest layers may cancel.
      if (act_dtype != DType::kF32 && layer.sizes.inner < 32) continue;
      const double bound = act_dtype == DType::kF32 ? 1e-5 : act_dtype == DType::kBF16 ? 0.02 : 0.1;
      const std::vector<float> out = RunAll(layer, {}, act_dtype, {2});
      for (size_t i = 0; i < std::size(kChecked); ++i)
        ASSERT_LE(RelativeL2(out.data() + kChecked[i] * layer.sizes.hidden, rows[i]), bound)
            << DTypeName(act_dtype) << " row " << kChecked[i];
    }
  });
}

// Threads and nodes share the panels out, and a row is as well alone as beside others.
TEST(PanelExperts, BitsDoNotDependOnThreadsOrCompany) {
  ForEachLayer([](const Layer& layer) {
    const size_t width = layer.sizes.hidden;
    const size_t last = Layer::kRows - 1;
    const uint32_t expert[] = {2};
    const uint32_t begin[] = {0, 1};
    const auto check = [&](const ActQuant& how, DType act_dtype) {
      const std::vector<float> all = RunAll(layer, how, act_dtype, {});
      for (const Workers& workers : kManyWorkers) {
        EXPECT_TRUE(SameBits(RunAll(layer, how, act_dtype, workers), all))
            << workers.threads << " threads on " << workers.nodes << " nodes";
      }
      const std::vector<float> alone =
          RunExperts(layer, {expert, begin}, ConstRows(layer.x.data() + last * width, 1, width),
                     how, act_dtype, {2});
      EXPECT_TRUE(SameBits(alone, std::span(all).subspan(last * width))) << "alone";
    };
    for (DType act_dtype : kActDTypes) {
      SCOPED_TRACE(std::string("activations in ") + std::string(DTypeName(act_dtype)));
      check({}, act_dtype);
    }
    if (layer.kind.act.kind != ActQuantKind::kNone) check(layer.kind.act, DType::kF32);
  });
}

// Linear layers in panels: a job of all outputs, and one of a part that starts inside a panel.
TEST(PanelLinears, BitsDoNotDependOnThreadsOrSplit) {
  ForEachLayer([](const Layer& layer) {
    const ConstRows x(layer.x.data(), Layer::kRows, layer.sizes.hidden);
    WeightMatrix weight;
    weight.format = layer.gate.view().format;
    weight.rows = layer.sizes.inner;
    weight.cols = layer.sizes.hidden;
    weight.data = layer.gate.view().data[1];
    weight.act = layer.kind.act;
    const size_t first = weight.rows / 3;
    const auto run = [&](DType act_dtype, const Workers& workers) {
      ThreadPool pool(workers.NodeOfWorker());
      Arena arena;
      ExecContext context{pool, arena};
      std::vector<float> out(2 * x.rows * weight.rows, 0.0f);
      LinearJob whole{weight, nullptr, Rows(out.data(), x.rows, weight.rows), act_dtype};
      LinearJob part = whole;
      part.out = Rows(out.data() + x.rows * weight.rows, x.rows, weight.rows);
      part.first = first;
      const LinearJob jobs[] = {whole, part};
      RunLinears(context, x, jobs);
      return out;
    };
    for (DType act_dtype : kActDTypes) {
      SCOPED_TRACE(std::string("activations in ") + std::string(DTypeName(act_dtype)));
      const std::vector<float> expected = run(act_dtype, {});
      for (const Workers& workers : kManyWorkers) {
        EXPECT_TRUE(SameBits(run(act_dtype, workers), expected))
            << workers.threads << " threads on " << workers.nodes << " nodes";
      }
      for (size_t t = 0; t < x.rows; ++t) {
        const std::span<const float> row(expected.data() + t * weight.rows, weight.rows);
        const std::span<const float> part(row.data() + x.rows * weight.rows, weight.rows);
        EXPECT_TRUE(SameBits(part.subspan(first), row.subspan(first))) << "row " << t;
      }
    }
  });
}

}  // namespace
}  // namespace switchyard::quant
