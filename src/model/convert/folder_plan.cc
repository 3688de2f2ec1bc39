// Folders in Hugging Face layout.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <nlohmann/json.hpp>
#include <set>

#include "model/convert/hub_config.h"
#include "model/convert/plan.h"
#include "model/convert/target.h"
#include "switchyard/core/error.h"
#include "switchyard/model/checkpoint.h"
#include "switchyard/model/safetensors.h"

namespace switchyard {
namespace {

using Kind = ModelPart::Kind;
using nlohmann::ordered_json;

constexpr std::string_view kIndexName = "model.safetensors.index.json";

// Weights, what describes how they are stored, and what the plan writes anew.
bool IsReplaced(std::string_view name) {
  constexpr std::array<std::string_view, 9> kWeights = {
      ".safetensors", ".gguf", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".onnx", ".index.json"};
  constexpr std::array<std::string_view, 3> kDescriptions = {"config.json", "hf_quant_config.json",
                                                             "quantize_config.json"};
  return name.starts_with(".") || name.starts_with("quant_model_description") ||
         std::ranges::find(kDescriptions, name) != kDescriptions.end() ||
         std::ranges::any_of(kWeights, [&](std::string_view end) { return name.ends_with(end); });
}

class Planner {
 public:
  Planner(ConvertSource& source, const QuantizeScheme& scheme, const QuantizeOptions& options)
      : source_(source), scheme_(scheme.name), options_(options) {
    if (source.gguf() != nullptr && HasOwnMxfp4(source.config())) {
      throw Error(ErrorCode::kUnsupported,
                  "a folder of gpt-oss is written from a folder alone: GGUF files do not hold its "
                  "biases as a folder does");
    }
    plan_.encodings.push_back(FolderEncoding(scheme_, source.config()));
    encoding_ = plan_.encodings.front().get();
  }

  ConvertPlan Plan() {
    for (const ModelPart& part : PartsOf(source_.config())) {
      if (part.is_matrix()) {
        Matrix(part);
      } else if (source_.gguf() != nullptr) {
        Vector(part);
      }
    }
    if (source_.checkpoint() != nullptr) CopyTheRest();
    LayOut();
    WriteConfig();
    return std::move(plan_);
  }

 private:
  // Adds a tensor; its place is found later.
  size_t Tensor(std::string name, DType dtype, const Shape& shape) {
    plan_.tensors.push_back({std::move(name), dtype, shape, 0, 0});
    return plan_.tensors.size() - 1;
  }

  void Matrix(const ModelPart& part) {
    if (source_.checkpoint() != nullptr) {
      for (std::string& name : source_.TensorNames(part)) used_.insert(std::move(name));
    }
    const ModelConfig& config = source_.config();
    const std::string module =
        part.kind == Kind::kExpert ? ExpertModule(config, part) : part.module;
    ConvertUnit unit;
    unit.name = module;
    unit.rows = part.rows;
    unit.cols = part.cols;
    unit.bind = [this_source = &source_, part] { return this_source->Bind(part); };
    unit.encoding = encoding_;
    if (!TakesPart(scheme_, config, part.kind)) {
      unit.encoding = nullptr;
    } else if (unit.note = encoding_->WhyNot(part.rows, part.cols); !unit.note.empty()) {
      if (HasOwnMxfp4(config))
        throw Error(ErrorCode::kUnsupported, fmt::format("{}: {}", module, unit.note));
      unit.encoding = nullptr;
    }
    if (unit.encoding == nullptr) {
      unit.encoding = plan_.EncodingOf(source_.KeptDType(part));
      if (encoding_->is_quantized()) LeaveOut(part, module);
    }
    if (HasOwnMxfp4(config) && part.kind == Kind::kExpert) {
      Bank(part, unit);
    } else {
      for (const EncodedTensor& tensor : unit.encoding->Tensors(part.rows, part.cols))
        unit.tensors.push_back(
            Tensor(fmt::format("{}.{}", module, tensor.suffix), tensor.dtype, tensor.shape));
    }
    plan_.units.push_back(std::move(unit));
  }

  void LeaveOut(const ModelPart& part, const std::string& module) {
    if (part.kind != Kind::kExpert) {
      left_out_.modules.push_back(module);
      return;
    }
    left_out_.expert_modules.push_back(module);
    const std::string product = module.substr(module.rfind('.') + 1);
    if (std::ranges::find(left_out_.expert_products, product) == left_out_.expert_products.end())
      left_out_.expert_products.push_back(product);
  }

  // gpt-oss: all experts in one tensor, gate and up rows in turn.
  void Bank(const ModelPart& part, ConvertUnit& unit) {
    const bool down = part.product == ModelPart::Product::kDown;
    const size_t step = down ? 1 : 2;
    const std::string name = part.module + (down ? "down_proj" : "gate_up_proj");
    unit.name = name;
    unit.place = {
        part.expert * part.rows * step + (part.product == ModelPart::Product::kUp ? 1 : 0), step};
    std::vector<size_t>& tensors = banks_[name];
    if (tensors.empty()) {
      for (const EncodedTensor& tensor : unit.encoding->Tensors(part.rows * step, part.cols)) {
        std::vector<size_t> dims = {source_.config().num_experts};
        dims.insert(dims.end(), tensor.shape.dims().begin(), tensor.shape.dims().end());
        tensors.push_back(Tensor(fmt::format("{}_{}", name, tensor.suffix), tensor.dtype,
                                 Shape(std::span<const size_t>(dims))));
      }
    }
    unit.tensors = tensors;
  }

  // From a GGUF model, whose vectors are F32.
  void Vector(const ModelPart& part) {
    ConvertUnit unit;
    unit.name = part.module;
    unit.rows = part.rows;
    unit.cols = part.cols;
    unit.bind = [this_source = &source_, part] { return this_source->Bind(part); };
    unit.encoding = plan_.EncodingOf(DType::kF32);
    unit.tensors = {Tensor(part.module, DType::kF32, Shape{part.cols})};
    plan_.units.push_back(std::move(unit));
  }

  // Norms, biases, draft layers: all tensors that belong to no matrix, as they are.
  void CopyTheRest() {
    const Checkpoint& checkpoint = *source_.checkpoint();
    const bool was_quantized = source_.is_quantized();
    size_t dropped = 0;
    for (std::string_view name : checkpoint.Names()) {
      if (used_.contains(name)) continue;
      const TensorInfo& info = *checkpoint.Info(name);
      // Quantised draft layers and scales of KV caches would need a description of their own.
      if (!IsFloat(info.dtype) || (was_quantized && !IsOfModel(name))) {
        ++dropped;
        continue;
      }
      ConvertUnit unit;
      unit.name = name;
      const size_t rank = info.shape.rank();
      unit.cols = rank == 0 ? 1 : info.shape[rank - 1];
      size_t count = 0;
      info.shape.NumElements(count);
      unit.rows = unit.cols == 0 ? 0 : count / unit.cols;
      unit.bind = [this_source = &source_, tensor = std::string(name)] {
        return this_source->BindTensor(tensor);
      };
      unit.encoding = plan_.EncodingOf(info.dtype);
      unit.tensors = {Tensor(std::string(name), info.dtype, info.shape)};
      plan_.units.push_back(std::move(unit));
    }
    if (dropped != 0) {
      plan_.warnings.push_back(fmt::format(
          "{} tensors that this engine does not use are stored in a quantised scheme: left out",
          dropped));
    }
    const size_t layers = source_.config().layers.size();
    for (size_t i = 0; i < source_.config().num_draft_layers; ++i)
      left_out_.modules.push_back(fmt::format("model.layers.{}", layers + i));
  }

  // Whether a name is that of a vector of the model.
  bool IsOfModel(std::string_view name) {
    if (vectors_.empty()) {
      for (const ModelPart& part : PartsOf(source_.config())) {
        if (part.is_matrix()) continue;
        for (std::string& vector : source_.TensorNames(part)) vectors_.insert(std::move(vector));
      }
    }
    return vectors_.contains(name);
  }

  // Shards, filled one after another; the tensors of a unit stay together.
  void LayOut() {
    std::vector<std::vector<size_t>> shards(1);
    size_t filled = 0;
    std::vector<bool> placed(plan_.tensors.size(), false);
    for (const ConvertUnit& unit : plan_.units) {
      size_t bytes = 0;
      std::vector<size_t> fresh;
      for (size_t tensor : unit.tensors) {
        if (placed[tensor]) continue;
        placed[tensor] = true;
        fresh.push_back(tensor);
        bytes += plan_.tensors[tensor].bytes();
      }
      if (filled != 0 && filled + bytes > options_.shard_bytes) {
        shards.emplace_back();
        filled = 0;
      }
      filled += bytes;
      shards.back().insert(shards.back().end(), fresh.begin(), fresh.end());
    }
    for (size_t i = 0; i < shards.size(); ++i) {
      const std::string name = shards.size() == 1 ? std::string("model.safetensors")
                                                  : fmt::format("model-{:05}-of-{:05}.safetensors",
                                                                i + 1, shards.size());
      Shard(name, shards[i]);
    }
    if (shards.size() > 1) WriteIndex();
  }

  void Shard(const std::string& name, const std::vector<size_t>& tensors) {
    std::vector<TensorSpec> specs;
    for (size_t i : tensors)
      specs.push_back({plan_.tensors[i].name, plan_.tensors[i].dtype, plan_.tensors[i].shape});
    SafetensorsLayout layout = LayOutSafetensors(name, specs, {{"format", "pt"}});
    for (size_t i = 0; i < tensors.size(); ++i) {
      plan_.tensors[tensors[i]].file = plan_.files.size();
      plan_.tensors[tensors[i]].offset = layout.offsets[i];
    }
    plan_.files.push_back({name, std::move(layout.header), layout.file_bytes});
  }

  void WriteIndex() {
    ordered_json index;
    index["metadata"]["total_size"] = plan_.data_bytes();
    std::map<std::string, std::string> files;
    for (const OutputTensor& tensor : plan_.tensors)
      files[tensor.name] = plan_.files[tensor.file].name;
    index["weight_map"] = files;
    plan_.texts.push_back({std::string(kIndexName), index.dump(2) + "\n"});
  }

  void WriteConfig() {
    ordered_json config;
    if (source_.gguf() != nullptr) {
      config = ordered_json::parse(HubConfigOf(source_.config()));
      plan_.texts.insert(plan_.texts.end(), options_.texts.begin(), options_.texts.end());
    } else {
      config = ordered_json::parse(source_.files().ReadText("config.json"));
      for (std::string& name : source_.files().Names()) {
        if (!IsReplaced(name)) plan_.copies.push_back(std::move(name));
      }
    }
    config.erase("quantization_config");
    config.erase("compression_config");
    const std::string quantization = QuantizationConfigOf(scheme_, source_.config(), left_out_);
    if (!quantization.empty()) config["quantization_config"] = ordered_json::parse(quantization);
    if (scheme_ == "bf16") config[config.contains("dtype") ? "dtype" : "torch_dtype"] = "bfloat16";
    plan_.texts.push_back({"config.json", config.dump(2) + "\n"});
  }

  ConvertSource& source_;
  std::string_view scheme_;
  const QuantizeOptions& options_;
  const Encoding* encoding_ = nullptr;
  ConvertPlan plan_;
  LeftOut left_out_;
  std::set<std::string, std::less<>> used_, vectors_;
  std::map<std::string, std::vector<size_t>> banks_;
};

}  // namespace

ConvertPlan PlanFolder(ConvertSource& source, const QuantizeScheme& scheme,
                       const QuantizeOptions& options) {
  return Planner(source, scheme, options).Plan();
}

}  // namespace switchyard
