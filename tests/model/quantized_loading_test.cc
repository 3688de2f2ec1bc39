// Quantised checkpoints of every format: what they compute is what their codes stand for, and every
// tensor or field that is wrong is refused by name.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>

#include "quant/expert_matmul.h"
#include "switchyard/model/checkpoint.h"
#include "switchyard/model/model.h"
#include "testing/errors.h"
#include "testing/goldens.h"
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
constexpr const char* kModules[] = {"model.layers.0.self_attn.v_proj",
                                    "model.layers.0.mlp.experts.2.gate_proj",
                                    "model.layers.0.mlp.experts.3.down_proj"};

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
  const std::vector<std::string> optional = {"g_idx",
                                             "weight_shape",
                                             "scale_bias",
                                             "weight_offset",
                                             "input_zero_point",
                                             "input_global_scale",
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
    if (suffix == "weight_scale" && tensor.dtype == DType::kF32 &&
        format.name == "modelslim_mixed" && name.find("self_attn") != std::string::npos)
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

// --- Fields that are wrong -----------------------------------------------------------------------

class BrokenConfigs : public QuantizedLoading {
 protected:
  // A model of the format whose config has been changed.
  template <typename Change>
  void Expect(const std::string& name, const Change& change,
              std::initializer_list<std::string> words) {
    SCOPED_TRACE(name);
    const QuantizedFormat format = testing::QuantizedFormatOf(name);
    QuantizedModel model(format);
    Json& config =
        format.file_of_config.empty() ? model.quantized.config["quantization_config"] : of_file_;
    if (!format.file_of_config.empty()) of_file_ = format.config;
    change(config);
    SCOPED_TRACE(config.dump());
    if (!format.file_of_config.empty())
      model.quantized.texts[format.file_of_config] = config.dump();
    const std::string message = Refusal(model.quantized, format);
    EXPECT_FALSE(message.empty()) << "it was loaded";
    EXPECT_LT(message.size(), 2000u);
    for (const std::string& word : words)
      EXPECT_NE(message.find(word), std::string::npos) << "\"" << word << "\" in: " << message;
  }
  // One field, by its path ("config_groups/group_0/weights/num_bits"), with another value.
  void ExpectField(const std::string& name, const std::string& path, const Json& value,
                   std::initializer_list<std::string> words = {}) {
    Expect(
        name, [&](Json& config) { config[Json::json_pointer("/" + path)] = value; }, words);
    const std::string field = path.substr(path.rfind('/') + 1);
    Expect(name, [&](Json& config) { config[Json::json_pointer("/" + path)] = value; }, {field});
  }

 private:
  Json of_file_;
};

TEST_F(BrokenConfigs, UnknownMethodsAreRefusedWithTheKnownOnes) {
  for (const char* method : {"bitsandbytes", "", "FP8", "ascend"})
    ExpectField("fp8_block", "quant_method", method,
                {"config.json", "known are", "fp8", "awq", "gptq", "compressed-tensors", "quark",
                 "modelopt", "mxfp4", "w4afp8", "w8a8_int8"});
  for (const Json& method : {Json(1), Json(nullptr), Json(Json::array()), Json(Json::object())})
    ExpectField("fp8_block", "quant_method", method, {"config.json"});
  Expect("awq", [](Json& config) { config = "awq"; }, {"quantization_config", "an object"});
  Expect("awq", [](Json& config) { config = Json::object(); }, {"quant_method", "missing"});
}

TEST_F(BrokenConfigs, UnknownFieldsAreNamed) {
  for (const QuantizedFormat& format : testing::QuantizedFormats()) {
    if (format.described) continue;
    Expect(format.name, [](Json& config) { config["rotation"] = "hadamard"; }, {"rotation"});
  }
  for (const char* path : {"config_groups/group_0/weights/sparsity", "config_groups/group_0/lora"})
    ExpectField("ct_int8", path, 1);
  ExpectField("quark_w4a4", "global_quant_config/weight/zero_point", 1);
  ExpectField("gptq", "dynamic/+:.*down_proj", Json{{"act_bits", 8}}, {"act_bits"});
}

TEST_F(BrokenConfigs, NumbersThatCannotBeAreNamed) {
  const Json absurd[] = {0,   -1,    -2,   1152921504606846976, 1e300,
                         0.5, "128", true, Json::array({128})};
  for (const Json& value : absurd) {
    ExpectField("awq", "group_size", value);
    if (value != -1) ExpectField("gptq", "group_size", value);
    ExpectField("w4afp8", "group_size", value);
    ExpectField("modelopt_nvfp4", "group_size", value);
    ExpectField("quark_w4a4", "global_quant_config/weight/group_size", value);
    ExpectField("fp8_block", "weight_block_size", Json::array({value, 128}));
    ExpectField("fp8_block", "weight_block_size", Json::array({128, value}));
    ExpectField("fp8_block", "weight_block_size", value);
    ExpectField("ct_fp8_block", "config_groups/group_0/weights/block_structure",
                Json::array({value, 128}));
    ExpectField("ct_int8", "config_groups/group_0/weights/num_bits", value);
  }
  ExpectField("ct_w4a16", "config_groups/group_0/weights/group_size", nullptr, {"needs one"});
  for (const Json& value : {Json(1152921504606846976), Json("32"), Json(-7)})
    ExpectField("ct_w4a16", "config_groups/group_0/weights/group_size", value);
  for (int bits : {1, 2, 3, 5, 16, 33}) {
    ExpectField("awq", "bits", bits);
    ExpectField("gptq", "bits", bits);
    ExpectField("gptq", "dynamic/.*down_proj", Json{{"bits", bits}}, {"bits"});
    Expect("ct_w4a16",
           [&](Json& config) { config["config_groups"]["group_0"]["weights"]["num_bits"] = bits; },
           {"config_groups.group_0.weights"});
  }
  ExpectField("fp8_block", "weight_block_size", Json::array({128}));
  ExpectField("fp8_block", "weight_block_size", Json::array({128, 128, 1}));
  ExpectField("mxfp8", "weight_block_size", Json::array({1, 16}));
}

TEST_F(BrokenConfigs, SchemesThatNobodyComputesAreNamed) {
  ExpectField("fp8_block", "activation_scheme", "static");
  ExpectField("fp8_block", "activation_scheme", "sometimes", {"dynamic and static"});
  ExpectField("fp8_block", "fmt", "e5m2", {"e4m3"});
  ExpectField("fp8_block", "scale_fmt", "fp4", {"ue8m0"});
  ExpectField("awq", "version", "gemv", {"gemm"});
  ExpectField("awq", "zero_point", false);
  ExpectField("gptq", "checkpoint_format", "marlin", {"gptq_v2"});
  ExpectField("w4afp8", "moe_activation_scheme", "dynamic", {"static"});
  ExpectField("modelopt_nvfp4", "quant_algo", "W4A8_AWQ", {"NVFP4"});
  ExpectField("modelopt_nvfp4_file", "quantization/quant_algo", "MIXED_PRECISION", {"NVFP4"});
  ExpectField("ct_w4a16", "quantization_status", "initialized");
  Expect("ct_w4a16", [](Json& config) { config["format"] = "marlin-24"; },
         {"weights", "marlin-24"});
  ExpectField("ct_w4a16", "sparsity_config", Json{{"format", "sparse-24-bitmask"}}, {"format"});
  ExpectField("ct_w4a16", "config_groups", Json::object(), {"no group"});
  ExpectField("ct_w4a16", "config_groups/group_0/weights/type", "complex");
  ExpectField("ct_int8", "config_groups/group_0/weights/strategy", "block", {"weights"});
  ExpectField("ct_int8", "config_groups/group_0/output_activations", Json{{"num_bits", 8}});
  ExpectField("ct_int8", "config_groups/group_0/input_activations/dynamic", "never");
  ExpectField("quark_w4a4", "global_quant_config/weight/qscheme", "per_block", {"per_group"});
  ExpectField("quark_w4a4", "global_quant_config/weight/dtype", "fp6_e3m2", {"weight"});
  ExpectField("quark_w4a4", "global_quant_config/bias", Json{{"dtype", "int8"}});
  ExpectField("quark_w4a4", "export/weight_format", "fake_quantized");
  ExpectField("quark_fp8_channel", "global_quant_config/weight/qscheme", "per_group", {"weight"});
}

TEST_F(BrokenConfigs, SizesThatAPackingCannotHoldAreNamed) {
  // Groups of 48 divide neither 128 nor 64.
  Expect("awq", [](Json& config) { config["group_size"] = 48; }, {"128", "48", "self_attn.q_proj"});
  const auto expect = [&](const std::string& name, size_t hidden, size_t inner,
                          std::initializer_list<std::string> words) {
    SCOPED_TRACE(name);
    QuantizedFormat format = testing::QuantizedFormatOf(name);
    QuantizedModel model(format);
    model.quantized.config["hidden_size"] = hidden;
    model.quantized.config["moe_intermediate_size"] = inner;
    const std::string message = Refusal(model.quantized, format);
    EXPECT_FALSE(message.empty());
    for (const std::string& word : words)
      EXPECT_NE(message.find(word), std::string::npos) << "\"" << word << "\" in: " << message;
  };
  // Of floats any size is read, whatever the packing.
  QuantizedFormat format = testing::QuantizedFormatOf("awq");
  format.vocab = 61;
  EXPECT_EQ(Refusal(QuantizedModel(format).quantized, format), "");
  expect("awq", 128, 36, {"experts.0.gate_proj", "36", "multiple of 8"});
  expect("gptq", 100, 64, {"self_attn.q_proj", "100"});
  expect("mxfp8", 120, 64, {"self_attn.q_proj", "120", "32"});
  expect("ct_nvfp4", 120, 64, {"self_attn.q_proj", "120", "16"});
  expect("quark_w4a4", 128, 40, {"experts.0.down_proj", "40", "32"});
  expect("modelslim_w4a8", 128, 63, {"experts.0.gate_proj", "63", "multiple of 2"});
  expect("w4afp8", 128, 33, {"experts.0.down_proj", "33"});
}

TEST_F(BrokenConfigs, ExpressionsThatTakeTooLongAreRefused) {
  const std::string deep = "(?=.*(?=.*(?=.*(?=.*(?=.*(?=.*(?=.*x)))))))";
  const std::string bombs[] = {"(a{1000}){1000}",
                               "x{0,30000}",
                               "(?:(?:x?){90}){90}",
                               deep,
                               "(a)\\1",
                               "[z-a]",
                               "((((",
                               "*",
                               std::string(600, 'a'),
                               "a{99999999999999999999}"};
  for (const std::string& bomb : bombs) {
    SCOPED_TRACE(bomb);
    const std::string start = bomb.substr(0, 4);
    Expect("ct_int8", [&](Json& config) { config["ignore"].push_back("re:" + bomb); },
           {"config.json", start == "(a)\\" ? "(a)" : start});
    Expect("ct_int8",
           [&](Json& config) { config["config_groups"]["group_0"]["targets"] = {"re:" + bomb}; },
           {"config.json"});
    Expect("gptq", [&](Json& config) { config["dynamic"]["-:" + bomb] = Json::object(); },
           {"config.json"});
    Expect("quark_w4a4", [&](Json& config) { config["exclude"].push_back("re:" + bomb); },
           {"config.json"});
  }
  // Those that only look bad are read, and decide in no time.
  QuantizedFormat format = testing::QuantizedFormatOf("ct_int8");
  for (const char* harmless : {"re:(.*)*(.*)*(.*)*Z", "re:(((((.*)*)*)*)*)*Z",
                               "re:(?=.*zz)(?!.*y)q", "re:model\\.layers\\.\\d{1,2}\\.nothing"})
    format.config["ignore"].push_back(harmless);
  EXPECT_EQ(Refusal(QuantizedModel(format).quantized, format), "");
}

// --- Files and configs that do not belong together -----------------------------------------------

TEST_F(QuantizedLoading, ConfigsAndTensorsMustAgree) {
  const auto expect = [&](const QuantizedFormat& format, const ModelFolder& folder,
                          std::initializer_list<std::string> words) {
    const std::string message = Refusal(folder, format);
    EXPECT_FALSE(message.empty()) << "it was loaded";
    for (const std::string& word : words)
      EXPECT_NE(message.find(word), std::string::npos) << "\"" << word << "\" in: " << message;
  };
  const std::string query = "model.layers.0.self_attn.q_proj";
  for (const QuantizedFormat& format : testing::QuantizedFormats()) {
    SCOPED_TRACE(format.name);
    {  // No config: the tensors are named as what they are.
      QuantizedModel model(format);
      model.quantized.config.erase("quantization_config");
      model.quantized.texts.clear();
      expect(format, model.quantized, {query + "."});
    }
    if (format.described) continue;
    {  // Floats everywhere.
      QuantizedModel model(format);
      model.quantized.tensors = model.plain.tensors;
      expect(format, model.quantized, {"quantization_config", "plain floats"});
      // Nor with scales beside them.
      model.quantized.tensors[query + ".weight_scale"] = {
          DType::kF32, {1}, std::vector<std::byte>(4)};
      expect(format, model.quantized, {query + ".weight_scale"});
    }
  }
  // The config says float, the file has codes.
  QuantizedFormat ignoring = testing::QuantizedFormatOf("ct_int8");
  QuantizedModel model(ignoring);
  model.quantized.config["quantization_config"]["ignore"].push_back("re:.*q_proj");
  expect(ignoring, model.quantized, {query + ".weight", "I8", "F32", query + ".weight_scale"});
}

TEST_F(QuantizedLoading, ExpertsOfOneLayerAreStoredAlike) {
  const auto expect = [&](const QuantizedFormat& format,
                          const std::function<bool(const std::string&)>& other_modules,
                          const testing::Encoder& other, std::initializer_list<std::string> words) {
    QuantizedFormat mixed = format;
    mixed.encode = [&](testing::Random& random, const std::string& module, size_t rows,
                       size_t cols) {
      return (other_modules(module) ? other : format.encode)(random, module, rows, cols);
    };
    const QuantizedModel model(mixed);
    const std::string message = Refusal(model.quantized, mixed);
    EXPECT_FALSE(message.empty()) << "it was loaded";
    for (const std::string& word : words)
      EXPECT_NE(message.find(word), std::string::npos) << "\"" << word << "\" in: " << message;
  };
  const auto plain = [](auto&&...) { return testing::StoredWeights{}; };
  const auto third = [](const std::string& module) {
    return module.find("experts.2.up") != std::string::npos;
  };
  const auto all_up = [](const std::string& module) { return module.ends_with("up_proj"); };
  for (const char* name : {"fp8_block", "ct_w4a16", "quark_w4a4", "gptq", "awq", "mxfp8"}) {
    SCOPED_TRACE(name);
    expect(testing::QuantizedFormatOf(name), third, plain,
           {"model.layers.0.mlp.experts.2.up_proj", "unquant", "must share one scheme"});
    expect(testing::QuantizedFormatOf(name), all_up, plain,
           {"model.layers.0.mlp.experts.", "gate_proj", "up_proj", "must share one scheme"});
  }
  // One scheme, but other bits or scales.
  QuantizedFormat bits = testing::QuantizedFormatOf("gptq");
  bits.config["dynamic"][".*experts.2.up_proj"] = Json{{"bits", 8}};
  const testing::Encoder eight = testing::QuantizedFormatOf("gptq_8bit").encode;
  expect(bits, third, eight, {"model.layers.0.mlp.experts.2.up_proj", "U8", "U4"});
  bits.config["dynamic"] = {{"-:.*mlp.gate$", Json::object()}, {".*up_proj", {{"bits", 8}}}};
  expect(bits, all_up, eight, {"model.layers.0.mlp.experts.", "gate_proj", "U4", "up_proj", "U8"});
  expect(testing::QuantizedFormatOf("fp8_block_ragged_f32"), third,
         testing::QuantizedFormatOf("fp8_block_ragged_bf16").encode,
         {"model.layers.0.mlp.experts.2.up_proj", "BF16", "F32"});
}

// --- ModelSlim's description ---------------------------------------------------------------------

TEST_F(QuantizedLoading, DescriptionsAreCheckedEntryByEntry) {
  const QuantizedFormat format = testing::QuantizedFormatOf("modelslim_w8a8_dynamic");
  const std::string file = "quant_model_description.json";
  const auto expect = [&](const std::function<void(Json&)>& change,
                          std::initializer_list<std::string> words) {
    QuantizedModel model(format);
    Json description = Json::parse(model.quantized.texts[file]);
    change(description);
    model.quantized.texts[file] = description.dump();
    const std::string message = Refusal(model.quantized, format);
    EXPECT_FALSE(message.empty()) << "it was loaded";
    for (const std::string& word : words)
      EXPECT_NE(message.find(word), std::string::npos) << "\"" << word << "\" in: " << message;
  };
  const std::string gate = "model.layers.0.mlp.experts.1.gate_proj.weight";
  expect([&](Json& d) { d[gate] = "W2A2"; }, {file, gate, "W2A2", "W8A8_DYNAMIC"});
  expect([&](Json& d) { d[gate] = 8; }, {file, gate, "8"});
  expect([&](Json& d) { d[gate] = nullptr; }, {file, gate, "null"});
  expect([&](Json& d) { d.erase(gate); }, {file, gate, "tried"});
  const std::string value = "model.layers.0.self_attn.v_proj.weight";
  expect([&](Json& d) { d[value] = "FLOAT"; }, {value, "I8"});
  expect([&](Json& d) { d[value] = "W4A8_DYNAMIC"; }, {value, "[16, 128]", "[32, 128]"});
  expect([&](Json& d) { d[gate] = "W4A8_DYNAMIC"; },
         {"experts.1.gate_proj", "w4a8_int", "w8a8_int8"});
  expect([&](Json& d) { d["model.layers.0.mlp.gate.weight"] = "W2A2"; },
         {file, "mlp.gate", "W2A2"});
  expect([&](Json& d) { d["group_size"] = -1; }, {file, "group_size", "-1"});
  expect([&](Json& d) { d["group_size"] = 1152921504606846976; }, {file, "group_size"});
  QuantizedModel broken(format);
  broken.quantized.texts[file] = "{\"model.layers.0\":";
  EXPECT_NE(Refusal(broken.quantized, format).find(file), std::string::npos);
  QuantizedModel array(format);
  array.quantized.texts[file] = "[]";
  EXPECT_NE(Refusal(array.quantized, format).find("expected a JSON object"), std::string::npos);
}

TEST_F(QuantizedLoading, ThePackingOfW4A4MustBeTheOneThatIsSet) {
  for (const char* name : {"modelslim_w4a4", "modelslim_w4a4_new"}) {
    SCOPED_TRACE(name);
    QuantizedFormat format = testing::QuantizedFormatOf(name);
    const QuantizedModel model(format);
    format.w4a4_new_packing = !format.w4a4_new_packing;
    const std::string message = Refusal(model.quantized, format);
    for (const char* word : {"experts.0.gate_proj.weight", "[32, 128]", "[64, 128]"})
      EXPECT_NE(message.find(word), std::string::npos) << word << " in: " << message;
  }
}

// --- Values of tensors of integers ---------------------------------------------------------------

TEST_F(QuantizedLoading, GroupsAndShapesThatContradictAreNamed) {
  const auto expect = [&](const char* name, const std::string& tensor, auto element, size_t at,
                          std::initializer_list<std::string> words) {
    SCOPED_TRACE(std::string(name) + " " + tensor + " " + std::to_string(element));
    const QuantizedFormat format = testing::QuantizedFormatOf(name);
    QuantizedModel model(format);
    std::memcpy(model.quantized.tensors.at(tensor).bytes.data() + at * sizeof(element), &element,
                sizeof(element));
    const std::string message = Refusal(model.quantized, format);
    EXPECT_FALSE(message.empty()) << "it was loaded";
    const size_t dot = tensor.rfind('.');  // "module suffix" or "module.suffix"
    for (const std::string& word : {tensor.substr(0, dot), tensor.substr(dot + 1)})
      EXPECT_NE(message.find(word), std::string::npos) << word << " in: " << message;
    for (const std::string& word : words)
      EXPECT_NE(message.find(word), std::string::npos) << word << " in: " << message;
  };
  const std::string expert = "model.layers.0.mlp.experts.1.";
  const std::string query = "model.layers.0.self_attn.q_proj.";
  for (int32_t group : {-1, 4, INT32_MAX, INT32_MIN}) {
    expect("gptq", expert + "up_proj.g_idx", group, 127, {std::to_string(group)});
    expect("gptq_desc_act", query + "g_idx", group, 3, {std::to_string(group)});
    expect("ct_w4a16_actorder", expert + "up_proj.weight_g_idx", group, 0, {std::to_string(group)});
  }
  expect("gptq_channel", expert + "down_proj.g_idx", int32_t{1}, 5, {"there are 1"});
  for (int64_t size : {int64_t{0}, int64_t{-64}, int64_t{128}, INT64_MAX, INT64_MIN})
    expect("ct_w4a16", expert + "up_proj.weight_shape", size, 0, {"expected [64, 128]"});
  expect("modelslim_w4a4", expert + "up_proj.weight", int8_t{9}, 17, {"9", "[-8, 7]"});
  expect("gptq_8bit", expert + "up_proj.qzeros", int32_t{-1}, 0, {"256"});
}

// --- NaN in codes --------------------------------------------------------------------------------

TEST_F(QuantizedLoading, CodesThatAreNanAreNamedAndStillLoad) {
  QuantizedFormat format = testing::QuantizedFormatOf("fp8_block");
  QuantizedModel model(format);
  const std::string name = "model.layers.0.mlp.experts.2.up_proj.weight";
  model.quantized.tensors.at(name).bytes[130] = std::byte{0xff};
  const std::unique_ptr<Model> loaded = Load(model.quantized, format);
  ASSERT_EQ(loaded->bad_tensors().size(), 1u);
  EXPECT_NE(loaded->bad_tensors()[0].find(name + ": 1 NaN and 0 infinite values, the first at "
                                                 "element 130"),
            std::string::npos)
      << loaded->bad_tensors()[0];
}

// --- gpt-oss: banks of all experts ---------------------------------------------------------------

TEST_F(QuantizedLoading, BanksOfMxfp4AreCheckedToo) {
  const auto goldens = testing::GoldenDir();
  if (!goldens) GTEST_SKIP() << "the large golden set is absent";
  const std::filesystem::path checkpoint = *goldens / "quant/gpt_oss_mxfp4/checkpoint";
  const auto expect = [&](const std::function<void(ModelFolder&)>& change,
                          std::initializer_list<std::string> words) {
    ModelFolder folder(checkpoint);
    change(folder);
    const std::string message = Refusal(folder, {});
    EXPECT_FALSE(message.empty()) << "it was loaded";
    for (const std::string& word : words)
      EXPECT_NE(message.find(word), std::string::npos) << "\"" << word << "\" in: " << message;
  };
  for (const char* part : {"gate_up_proj", "down_proj"}) {
    const std::string bank = std::string("model.layers.1.mlp.experts.") + part;
    const std::string blocks = bank + "_blocks", scales = bank + "_scales";
    for (const std::string& name : {blocks, scales, bank + "_bias"})
      expect([&](ModelFolder& folder) { folder.tensors.erase(name); }, {name});
    expect([&](ModelFolder& folder) { folder.tensors.at(scales).bytes[40] = std::byte{255}; },
           {scales, "255"});
    expect(
        [&](ModelFolder& folder) {
          std::ranges::fill(folder.tensors.at(scales).bytes, std::byte{0});
        },
        {scales, "never"});
    expect(
        [&](ModelFolder& folder) {
          folder.tensors.at(blocks).shape[0] = 0;
          folder.tensors.at(blocks).bytes.clear();
        },
        {blocks, "expected"});
    expect([&](ModelFolder& folder) { folder.tensors.at(blocks).dtype = DType::kI8; },
           {blocks, "U8", "I8"});
    expect(
        [&](ModelFolder& folder) {
          std::swap(folder.tensors.at(blocks).shape[1], folder.tensors.at(blocks).shape[2]);
        },
        {blocks, "expected shape"});
  }
  expect([](ModelFolder& folder) { folder.config["intermediate_size"] = 40; },
         {"40", "32", "down_proj"});
}

}  // namespace
}  // namespace switchyard
