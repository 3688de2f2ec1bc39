#include "switchyard/model/quantize.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <optional>
#include <utility>

#include "model/config_reader.h"
#include "model/convert/partial_output.h"
#include "model/convert/plan.h"
#include "model/convert/source.h"
#include "model/convert/target.h"
#include "switchyard/core/error.h"
#include "switchyard/model/model.h"

namespace switchyard {
namespace {

namespace fs = std::filesystem;

// f32 values that a worker holds at a time, twice: as read and as read back.
constexpr size_t kSlabElements = size_t{1} << 20;
// Slabs of a batch for each worker: few enough to bound what is in memory, enough that none waits.
constexpr size_t kSlabsPerWorker = 4;

// FNV-1a.
class Hash {
 public:
  void Add(std::string_view text) {
    for (char c : text) value_ = (value_ ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    Add(text.size());
  }
  void Add(uint64_t number) {
    for (int i = 0; i < 8; ++i) value_ = (value_ ^ (number >> (8 * i) & 0xff)) * 0x100000001b3u;
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325u;
};

// The input as far as its files' names, sizes and times tell.
uint64_t InputHash(const fs::path& in, const ModelFiles& files) {
  const fs::path folder = in.extension() == ".gguf" ? in.parent_path() : in;
  Hash hash;
  std::error_code ignored;
  hash.Add(fs::weakly_canonical(in, ignored).string());
  for (const std::string& name : files.Names()) {
    const fs::path file = folder / name;
    hash.Add(name);
    hash.Add(static_cast<uint64_t>(fs::file_size(file, ignored)));
    hash.Add(static_cast<uint64_t>(fs::last_write_time(file, ignored).time_since_epoch().count()));
  }
  return hash.value();
}

// A part of a split input, or another name of a file of it, must not be replaced.
void RequireNoFileOf(const fs::path& in, const ModelFiles& files, const fs::path& out) {
  const fs::path folder = in.extension() == ".gguf" ? in.parent_path() : in;
  for (const std::string& name : files.Names()) {
    std::error_code ignored;
    if (!fs::equivalent(folder / name, out, ignored) || ignored) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}: OUT is {}, a file of IN", out.string(), name));
  }
}

uint64_t LayoutHash(const ConvertPlan& plan) {
  Hash hash;
  for (const OutputFile& file : plan.files) {
    hash.Add(file.name);
    hash.Add(file.header);
  }
  for (const TextFile& text : plan.texts) {
    hash.Add(text.name);
    hash.Add(text.content);
  }
  for (const ConvertUnit& unit : plan.units) hash.Add(unit.name);
  return hash.value();
}

// How far what was written lies from what was read.
struct Deviation {
  double error_squares = 0;
  double squares = 0;
  double max_error = 0;

  void Add(const Deviation& other) {
    error_squares += other.error_squares;
    squares += other.squares;
    max_error = std::max(max_error, other.max_error);
  }
  double relative() const { return squares == 0 ? 0 : std::sqrt(error_squares / squares); }
};

// What the journal keeps of a unit.
struct UnitResult {
  Deviation deviation;
  size_t bytes_before = 0;
  std::string from;

  std::string ToLine() const {
    return fmt::format("{:a} {:a} {:a} {} {}", deviation.error_squares, deviation.squares,
                       deviation.max_error, bytes_before, from);
  }
  static UnitResult FromLine(const std::string& line) {
    UnitResult result;
    const char* at = line.c_str();
    char* next = nullptr;
    for (double* value : {&result.deviation.error_squares, &result.deviation.squares,
                          &result.deviation.max_error}) {
      *value = std::strtod(at, &next);
      at = next;
    }
    result.bytes_before = std::strtoull(at, &next, 10);
    result.from = *next == ' ' ? std::string(next + 1) : std::string();
    return result;
  }
};

Deviation Compare(std::span<const float> values, std::span<const float> written) {
  Deviation deviation;
  for (size_t i = 0; i < values.size(); ++i) {
    const double value = values[i], error = value - double{written[i]};
    deviation.squares += value * value;
    deviation.error_squares += error * error;
    deviation.max_error = std::max(deviation.max_error, std::fabs(error));
  }
  return deviation;
}

// Some rows of a unit.
struct Slab {
  size_t unit = 0;  // in the batch
  size_t first = 0;
  size_t count = 0;
  Deviation deviation;
};

size_t SlabRows(const ConvertUnit& unit) {
  const size_t step = unit.encoding->row_step();
  const size_t rows = kSlabElements / std::max<size_t>(1, unit.cols);
  return std::max(step, rows / step * step);
}

class Converter {
 public:
  Converter(ConvertPlan& plan, PartialOutput& output, const QuantizeOptions& options,
            ThreadPool& pool)
      : plan_(plan), output_(output), options_(options), pool_(pool) {
    results_.resize(plan.units.size());
    for (const auto& [unit, line] : output.complete()) {
      results_[unit] = UnitResult::FromLine(line);
      done_bytes_ += plan_.units[unit].bytes_after;
    }
    resumed_bytes_ = done_bytes_;
  }

  void Run() {
    const size_t batch_elements = kSlabElements * kSlabsPerWorker * pool_.num_threads();
    size_t next = 0;
    while (next < plan_.units.size()) {
      std::vector<size_t> batch;
      for (size_t elements = 0; next < plan_.units.size() && elements < batch_elements &&
                                batch.size() < options_.max_batch_units;
           ++next) {
        if (results_[next]) continue;
        batch.push_back(next);
        elements += plan_.units[next].rows * plan_.units[next].cols;
      }
      if (!batch.empty()) RunBatch(batch);
    }
    output_.Sync();
  }

  const std::vector<std::optional<UnitResult>>& results() const { return results_; }
  size_t resumed_bytes() const { return resumed_bytes_; }

 private:
  void RunBatch(const std::vector<size_t>& batch) {
    std::vector<std::unique_ptr<SourceMatrix>> matrices;
    for (size_t unit : batch) matrices.push_back(plan_.units[unit].bind());
    pool_.Run(batch.size(), [&](size_t i, size_t) { matrices[i]->Load(); });
    std::vector<Slab> slabs = SlabsOf(batch);
    pool_.Run(slabs.size(), [&](size_t i, size_t) {
      Slab& slab = slabs[i];
      slab.deviation = Convert(plan_.units[batch[slab.unit]], *matrices[slab.unit], slab);
    });
    std::vector<Deviation> deviations(batch.size());
    for (const Slab& slab : slabs) deviations[slab.unit].Add(slab.deviation);
    for (size_t i = 0; i < batch.size(); ++i) {
      const SourceMatrix& matrix = *matrices[i];
      matrix.Release();
      results_[batch[i]] = {deviations[i], matrix.bytes(), matrix.format()};
      output_.Done(batch[i], results_[batch[i]]->ToLine());
      done_bytes_ += plan_.units[batch[i]].bytes_after;
      unsynced_bytes_ += plan_.units[batch[i]].bytes_after;
    }
    Report();
  }

  std::vector<Slab> SlabsOf(const std::vector<size_t>& batch) const {
    std::vector<Slab> slabs;
    for (size_t i = 0; i < batch.size(); ++i) {
      const ConvertUnit& unit = plan_.units[batch[i]];
      const size_t step = SlabRows(unit);
      for (size_t first = 0; first < unit.rows; first += step)
        slabs.push_back({i, first, std::min(step, unit.rows - first), {}});
    }
    return slabs;
  }

  Deviation Convert(const ConvertUnit& unit, const SourceMatrix& matrix, const Slab& slab) {
    std::vector<float> values(slab.count * unit.cols);
    matrix.ReadRows(slab.first, slab.count, values.data());
    matrix.ReleaseRows(slab.first, slab.count);
    if (unit.encoding->is_quantized()) RequireFinite(unit, slab, values);
    const EncodedRows encoded = unit.encoding->Encode(
        ConstRows(values.data(), slab.count, unit.cols), slab.first, unit.rows, unit.place);
    for (const EncodedPiece& piece : encoded.pieces)
      output_.Write(plan_.tensors[unit.tensors[piece.tensor]], piece);
    std::vector<float> row(unit.cols);
    const SourceMatrix::Read read = ReaderOf(encoded.matrix);
    Deviation deviation;
    for (size_t n = 0; n < slab.count; ++n) {
      read(n, 1, row.data());
      deviation.Add(Compare(std::span(values).subspan(n * unit.cols, unit.cols), row));
    }
    return deviation;
  }

  static void RequireFinite(const ConvertUnit& unit, const Slab& slab,
                            const std::vector<float>& values) {
    for (size_t i = 0; i < values.size(); ++i) {
      if (std::isfinite(values[i])) continue;
      throw Error(ErrorCode::kCorruptData,
                  fmt::format("tensor {}: cannot be quantised: element [{}, {}] is {}", unit.name,
                              slab.first + i / unit.cols, i % unit.cols, values[i]));
    }
  }

  void Report() {
    if (unsynced_bytes_ >= options_.sync_bytes) {
      output_.Sync();
      unsynced_bytes_ = 0;
    }
    if (!options_.on_progress || options_.on_progress(done_bytes_, plan_.data_bytes())) return;
    output_.Sync();
    throw Error(ErrorCode::kCancelled,
                fmt::format("stopped; {} holds what is complete, and the same command goes on",
                            output_.folder().string()));
  }

  ConvertPlan& plan_;
  PartialOutput& output_;
  const QuantizeOptions& options_;
  ThreadPool& pool_;
  std::vector<std::optional<UnitResult>> results_;
  size_t done_bytes_ = 0, resumed_bytes_ = 0, unsynced_bytes_ = 0;
};

size_t BytesAfter(const ConvertPlan& plan, const ConvertUnit& unit) {
  size_t bytes = 0;
  for (const EncodedTensor& tensor : unit.encoding->Tensors(unit.rows, unit.cols)) {
    size_t count = 0;
    tensor.shape.NumElements(count);
    bytes += BytesOf(tensor.dtype, count);
  }
  // A unit that is a whole tensor has its bytes; so has one without elements.
  return unit.tensors.size() == 1 ? std::min(bytes, plan.tensors[unit.tensors[0]].bytes()) : bytes;
}

// Units of one name are one tensor.
QuantizeReport MakeReport(const ConvertPlan& plan, const Converter& converter) {
  QuantizeReport report;
  std::map<std::string_view, size_t> by_name;
  std::vector<Deviation> deviations;
  for (size_t i = 0; i < plan.units.size(); ++i) {
    const ConvertUnit& unit = plan.units[i];
    const UnitResult& result = *converter.results()[i];
    const auto [at, is_new] = by_name.emplace(unit.name, report.tensors.size());
    if (is_new) {
      TensorReport tensor;
      tensor.name = unit.name;
      tensor.from = result.from;
      tensor.to = unit.encoding->Describe();
      tensor.note = unit.note;
      tensor.is_quantized = unit.encoding->is_quantized();
      report.tensors.push_back(std::move(tensor));
      deviations.emplace_back();
    }
    TensorReport& tensor = report.tensors[at->second];
    tensor.elements += unit.rows * unit.cols;
    tensor.bytes_before += result.bytes_before;
    tensor.bytes_after += unit.bytes_after;
    deviations[at->second].Add(result.deviation);
  }
  for (size_t i = 0; i < report.tensors.size(); ++i) {
    TensorReport& tensor = report.tensors[i];
    tensor.rms_error = deviations[i].relative();
    tensor.max_error = deviations[i].max_error;
    report.bytes_before += tensor.bytes_before;
    report.bytes_after += tensor.bytes_after;
    report.elements += tensor.elements;
  }
  report.resumed_bytes = converter.resumed_bytes();
  return report;
}

// A file made from a folder must say what the folder says, to this engine at least.
void ProveGguf(const ConvertSource& source, const ConvertPlan& plan, PartialOutput& output) {
  if (source.gguf() != nullptr) return;
  try {
    RequireSameConfig(source.config(),
                      Model::ReadConfig(OpenGgufFiles(output.folder() / plan.files.front().name)));
  } catch (...) {
    output.Discard();
    throw;
  }
}

}  // namespace

QuantizeReport QuantizeCheckpoint(const fs::path& in, const fs::path& out,
                                  const QuantizeOptions& options, ThreadPool& pool) {
  const QuantizeScheme& scheme = FindQuantizeScheme(options.scheme);
  RequireOutput(in, out, scheme.is_gguf, options.force);
  const std::unique_ptr<ConvertSource> source = ConvertSource::Open(in);
  RequireNoFileOf(in, source->files(), out);
  ConvertPlan plan = scheme.is_gguf ? PlanGguf(*source, scheme, options, out.filename().string())
                                    : PlanFolder(*source, scheme, options);
  for (ConvertUnit& unit : plan.units) unit.bytes_after = BytesAfter(plan, unit);
  if (source->is_quantized()) {
    plan.warnings.insert(plan.warnings.begin(),
                         fmt::format("{} is quantised already: its error and that of {} add up; "
                                     "start from the original floats where there are any",
                                     in.string(), scheme.name));
  }
  PartialOutput output(out, plan,
                       fmt::format("switchyard-quantize 1 {} {:016x} {:016x}", scheme.name,
                                   InputHash(in, source->files()), LayoutHash(plan)),
                       options.force);
  if (scheme.is_gguf) ProveGguf(*source, plan, output);
  Converter converter(plan, output, options, pool);
  converter.Run();
  for (const TextFile& text : plan.texts) output.AddText(text);
  for (const std::string& name : plan.copies) output.AddCopy(name, source->files().Map(name));
  QuantizeReport report = MakeReport(plan, converter);
  report.scheme = scheme.name;
  report.warnings = std::move(plan.warnings);
  output.Commit(scheme.is_gguf);
  return report;
}

}  // namespace switchyard
