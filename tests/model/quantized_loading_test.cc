// Quantised checkpoints of every format: what they compute is what their codes stand for, and every
// tensor or field that is wrong is refused by name.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>

#include "switchyard/core/log.h"
#include "switchyard/model/model.h"
#include "testing/errors.h"
#include "testing/model_logits.h"
#include "testing/quantized_model.h"

namespace switchyard {
namespace {

using testing::ExpectError;
using testing::LogitsOf;
using testing::ModelFolder;
using testing::QuantizedFormat;
using testing::QuantizedModel;

using Json = nlohmann::ordered_json;
using Tensor = ModelFolder::Tensor;

ModelOptions Options(const QuantizedFormat& format, const std::string& runner = "auto") {
  ModelOptions options;
  options.moe.act_dtype = "f32";
  options.moe.activation_quant = false;
  options.moe.runner = runner;
  options.w4a4_new_packing = format.w4a4_new_packing;
  return options;
}

class QuantizedLoading : public ::testing::Test {
 protected:
  std::unique_ptr<Model> Load(const ModelFolder& folder, const QuantizedFormat& format,
                              const std::string& runner = "auto") {
    return Model::Load(folder.Write(), Options(format, runner), pool_);
  }

  // What loading says; empty if it succeeds.
  std::string Refusal(const ModelFolder& folder, const QuantizedFormat& format) {
    try {
      Load(folder, format);
    } catch (const Error& error) {
      EXPECT_TRUE(error.code() == ErrorCode::kCorruptData ||
                  error.code() == ErrorCode::kUnsupported)
          << error.message();
      EXPECT_NE(error.message().find(folder.path().string()), std::string::npos)
          << "which folder? " << error.message();
      return error.message();
    }
    return {};
  }

  ThreadPool pool_{2};
};

// --- What is right -------------------------------------------------------------------------------

double Largest(const std::vector<float>& values) {
  double largest = 0;
  for (float value : values) largest = std::max(largest, std::fabs(double{value}));
  return largest;
}

TEST_F(QuantizedLoading, EveryFormatComputesWhatItsCodesStandFor) {  // bug-log 23, 30, 31, 33
  for (const QuantizedFormat& format : testing::QuantizedFormats()) {
    SCOPED_TRACE(format.name);
    const QuantizedModel model(format);
    const std::vector<float> expected = LogitsOf(*Load(model.plain, format), pool_);
    ASSERT_GT(Largest(expected), 0.1);
    for (const char* runner : {"aiter", "reference"}) {
      std::unique_ptr<Model> loaded;
      EXPECT_NO_THROW(loaded = Load(model.quantized, format, runner));
      if (loaded == nullptr) continue;
      const std::vector<float> found = LogitsOf(*loaded, pool_);
      ASSERT_EQ(found.size(), expected.size());
      double difference = 0;
      for (size_t i = 0; i < found.size(); ++i)
        difference = std::max(difference, std::fabs(double{found[i]} - double{expected[i]}));
      EXPECT_LE(difference, 1e-4 * Largest(expected)) << runner;
    }
  }
}

// --- Tensors that are wrong ----------------------------------------------------------------------

bool IsFloatType(DType dtype) {
  return dtype == DType::kF32 || dtype == DType::kF16 || dtype == DType::kBF16;
}

// Bytes of one number in the type.
std::vector<std::byte> Number(DType dtype, float value) {
  std::vector<std::byte> bytes(dtype == DType::kF32 ? 4 : 2);
  uint32_t bits = 0;
  std::memcpy(&bits, &value, 4);
  if (dtype == DType::kF32) {
    std::memcpy(bytes.data(), &bits, 4);
    return bytes;
  }
  uint16_t half = static_cast<uint16_t>(bits >> 16);  // exact for what the tests use
  if (dtype == DType::kF16) half = std::isnan(value) ? 0x7e00 : std::isinf(value) ? 0x7c00 : 0xbc00;
  std::memcpy(bytes.data(), &half, 2);
  return bytes;
}

// The modules whose tensors are broken: attention, and each product of an expert that is not first.
constexpr const char* kModules[] = {
    "model.layers.0.self_attn.v_proj", "model.layers.0.mlp.experts.2.gate_proj",
    "model.layers.0.mlp.experts.1.up_proj", "model.layers.0.mlp.experts.3.down_proj"};

class BrokenTensors : public QuantizedLoading {
 protected:
  // Calls body(name, broken) for every tensor of the modules, with a folder to break.
  template <typename Body>
  void ForEachTensor(const Body& body) {
    for (const QuantizedFormat& format : testing::QuantizedFormats()) {
      QuantizedModel model(format);
      for (const char* module : kModules) {
        std::vector<std::string> names;
        for (const auto& [name, tensor] : model.quantized.tensors) {
          if (name.starts_with(std::string(module) + ".")) names.push_back(name);
        }
        for (const std::string& name : names) {
          SCOPED_TRACE(format.name + ": " + name);
          const Tensor kept = model.quantized.tensors.at(name);
          body(format, name, model.quantized);
          model.quantized.tensors[name] = kept;
        }
      }
    }
  }
  void ExpectRefused(const ModelFolder& folder, const QuantizedFormat& format,
                     std::initializer_list<std::string> words) {
    const std::string message = Refusal(folder, format);
    EXPECT_FALSE(message.empty()) << "it was loaded";
    for (const std::string& word : words)
      EXPECT_NE(message.find(word), std::string::npos) << "\"" << word << "\" in: " << message;
  }
};

TEST_F(BrokenTensors, MissingOnesAreNamed) {
  const std::vector<std::string> optional = {"g_idx",         "weight_shape",     "scale_bias",
                                             "weight_offset", "input_zero_point", "input_global_scale",
                                             "weight_offset_second"};
  ForEachTensor([&](const QuantizedFormat& format, const std::string& name, ModelFolder& folder) {
    const std::string suffix = name.substr(name.rfind('.') + 1);
    // A permutation of columns is not optional where the config announces it.
    const bool is_order = suffix == "g_idx" && format.name.find("desc_act") != std::string::npos;
    if (!is_order && std::ranges::find(optional, suffix) != optional.end()) return;
    // NVFP4 is computed from the weights alone; the static scheme of ModelSlim from deq_scale.
    if (suffix == "input_scale" && format.name.starts_with("modelopt_nvfp4")) return;
    if (suffix == "weight_scale" && format.name == "modelslim_mixed" &&
        name.find("self_attn") != std::string::npos)
      return;
    folder.tensors.erase(name);
    ExpectRefused(folder, format, {name});
  });
}

TEST_F(BrokenTensors, ShapesAndTypesAreNamed) {
  ForEachTensor([&](const QuantizedFormat& format, const std::string& name, ModelFolder& folder) {
    Tensor& tensor = folder.tensors.at(name);
    const Tensor kept = tensor;
    tensor.shape.push_back(7);  // seven times as many
    tensor.bytes.resize(7 * tensor.bytes.size());
    ExpectRefused(folder, format, {name, Shape(std::span<const size_t>(tensor.shape)).ToString()});
    tensor = kept;
    tensor.shape[0] = 0;  // no elements at all
    tensor.bytes.clear();
    ExpectRefused(folder, format, {name, "expected"});
    tensor = kept;
    tensor.dtype = DType::kF64;
    size_t count = 1;
    for (size_t dim : tensor.shape) count *= dim;
    tensor.bytes.resize(8 * count);
    ExpectRefused(folder, format, {name, "F64"});
  });
}

// Tensors whose values are checked: all scales, offsets and zero points of activations.
TEST_F(BrokenTensors, NumbersThatAreNoScalesAreNamed) {
  ForEachTensor([&](const QuantizedFormat& format, const std::string& name, ModelFolder& folder) {
    Tensor& tensor = folder.tensors.at(name);
    const std::string suffix = name.substr(name.rfind('.') + 1);
    const bool is_nvfp4_input = suffix == "input_global_scale" ||
                                (suffix == "input_scale" && format.name.starts_with("modelopt_nv"));
    if (is_nvfp4_input) return;  // has no effect
    if (suffix == "weight_scale" && tensor.dtype == DType::kF32 && format.name == "modelslim_mixed" &&
        name.find("self_attn") != std::string::npos)
      return;  // deq_scale counts
    const Tensor kept = tensor;
    if (IsFloatType(tensor.dtype)) {
      for (float bad : {std::numeric_limits<float>::quiet_NaN(),
                        std::numeric_limits<float>::infinity(), -1.0f}) {
        const std::vector<std::byte> bytes = Number(tensor.dtype, bad);
        std::copy(bytes.begin(), bytes.end(), tensor.bytes.end() - std::ptrdiff_t(bytes.size()));
        ExpectRefused(folder, format, {name});
        tensor = kept;
      }
    }
    const bool is_scale = suffix.find("scale") != std::string::npos && suffix != "scale_bias";
    if (!is_scale) return;
    if (tensor.dtype == DType::kU8 || tensor.dtype == DType::kF8E8M0) {
      tensor.bytes.back() = std::byte{255};
      ExpectRefused(folder, format, {name});
      tensor = kept;
    }
    if (tensor.dtype == DType::kF8E4M3) {
      for (std::byte nan : {std::byte{0x7f}, std::byte{0xff}, std::byte{0xb8}}) {
        tensor.bytes.back() = nan;
        ExpectRefused(folder, format, {name});
      }
      tensor = kept;
    }
    std::ranges::fill(tensor.bytes, std::byte{0});  // never written
    ExpectRefused(folder, format, {name});
  });
}

TEST_F(BrokenTensors, UnknownOnesAreNamed) {
  for (const QuantizedFormat& format : testing::QuantizedFormats()) {
    SCOPED_TRACE(format.name);
    QuantizedModel model(format);
    for (const char* module : kModules) {
      const std::string name = std::string(module) + ".secret_scale";
      model.quantized.tensors[name] = {DType::kF32, {1}, std::vector<std::byte>(4)};
      ExpectRefused(model.quantized, format, {name});
      model.quantized.tensors.erase(name);
    }
  }
}

TEST_F(BrokenTensors, AnExpertThatIsMissingIsNamed) {  // bug-log 46
  for (const QuantizedFormat& format : testing::QuantizedFormats()) {
    SCOPED_TRACE(format.name);
    for (size_t expert : {0u, 3u}) {
      QuantizedModel model(format);
      const std::string prefix = "model.layers.0.mlp.experts." + std::to_string(expert) + ".";
      std::erase_if(model.quantized.tensors,
                    [&](const auto& entry) { return entry.first.starts_with(prefix); });
      ExpectRefused(model.quantized, format, {prefix + "gate_proj."});
    }
  }
}

}  // namespace
}  // namespace switchyard
