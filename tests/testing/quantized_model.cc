#include "testing/quantized_model.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <stdexcept>

#include "switchyard/core/dtype.h"

namespace switchyard::testing {
namespace {

using Json = nlohmann::ordered_json;
using Tensor = ModelFolder::Tensor;

template <typename T>
Tensor TensorOf(DType dtype, std::vector<size_t> shape, const std::vector<T>& elements) {
  Tensor tensor{dtype, std::move(shape), std::vector<std::byte>(elements.size() * sizeof(T))};
  if (!elements.empty()) std::memcpy(tensor.bytes.data(), elements.data(), tensor.bytes.size());
  return tensor;
}

// Of scales that the type holds exactly.
Tensor ScalesAs(DType dtype, std::vector<size_t> shape, const std::vector<float>& values) {
  if (dtype == DType::kF32) return TensorOf(dtype, std::move(shape), values);
  std::vector<uint16_t> halves;
  std::vector<uint8_t> bytes;
  for (float value : values) {
    if (dtype == DType::kBF16) {
      halves.push_back(static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16));
    } else if (dtype == DType::kF16) {
      halves.push_back(std::bit_cast<uint16_t>(ToF16(value)));
    } else {  // powers of two
      bytes.push_back(static_cast<uint8_t>(127 + std::ilogb(value)));
    }
  }
  return halves.empty() ? TensorOf(dtype, std::move(shape), bytes)
                        : TensorOf(dtype, std::move(shape), halves);
}

double E4m3(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const int mantissa = code & 7;
  const double size = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (code & 128) != 0 ? -size : size;
}

double E2m1(uint8_t code) {
  constexpr double kSizes[] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return (code & 8) != 0 ? -kSizes[code & 7] : kSizes[code & 7];
}

// Random codes and their values before scales.
struct Codes {
  std::vector<uint8_t> bits;
  std::vector<double> values;
};

enum class Code { kE4m3, kI8, kU8, kI4, kU4, kE2m1 };

Codes RandomCodes(Random& random, Code code, size_t count) {
  Codes codes;
  std::uniform_int_distribution<int> any(0, 255);
  while (codes.bits.size() < count) {
    const auto byte = static_cast<uint8_t>(any(random));
    const auto nibble = static_cast<uint8_t>(byte & 15);
    switch (code) {
      case Code::kE4m3:
        if (std::fabs(E4m3(byte)) > 8) continue;  // NaN too
        codes.values.push_back(E4m3(byte));
        break;
      case Code::kI8: codes.values.push_back(static_cast<int8_t>(byte)); break;
      case Code::kU8: codes.values.push_back(byte); break;
      case Code::kI4: codes.values.push_back((nibble ^ 8) - 8); break;
      case Code::kU4: codes.values.push_back(nibble); break;
      case Code::kE2m1: codes.values.push_back(E2m1(nibble)); break;
    }
    const bool is_wide = code == Code::kE4m3 || code == Code::kI8 || code == Code::kU8;
    codes.bits.push_back(is_wide ? byte : nibble);
  }
  return codes;
}

// Largest value of most codes: weights are near 0.2 at most.
double SizeOf(Code code) {
  switch (code) {
    case Code::kE4m3: return 8;
    case Code::kI8: return 128;
    case Code::kU8: return 128;
    case Code::kI4: return 8;
    case Code::kU4: return 8;
    case Code::kE2m1: return 6;
  }
  return 1;
}

// Scales that F32, F16, BF16 and E4M3 hold exactly, or powers of two.
std::vector<float> RandomScales(Random& random, size_t count, double size, bool powers) {
  std::uniform_int_distribution<int> mantissa(8, 15);
  std::uniform_int_distribution<int> shift(0, 2);
  const int exponent = std::ilogb(0.2 / size);
  std::vector<float> scales(count);
  for (float& scale : scales) {
    const int m = powers ? 8 : mantissa(random);
    scale = static_cast<float>(std::ldexp(m, exponent - 3 - shift(random)));
  }
  return scales;
}

size_t Up(size_t a, size_t b) { return (a + b - 1) / b; }

// Neighbours along a row in one byte, the first in the low nibble.
std::vector<uint8_t> Pairs(const std::vector<uint8_t>& bits) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i < bits.size(); i += 2)
    bytes.push_back(static_cast<uint8_t>(bits[i] | bits[i + 1] << 4));
  return bytes;
}

// 32 / width codes in a word: codes at(0), at(1), … of word w, by `order`.
std::vector<uint32_t> Words(size_t words, size_t width,
                            const std::function<uint32_t(size_t word, size_t i)>& at) {
  std::vector<uint32_t> packed(words);
  for (size_t w = 0; w < words; ++w) {
    for (size_t i = 0; i < 32 / width; ++i) packed[w] |= at(w, i) << (width * i);
  }
  return packed;
}

// --- Codes that lie as they are, with a grid of scales ------------------------------------------

struct Stored {
  Code code = Code::kE4m3;
  DType dtype = DType::kF8E4M3;
  std::string codes = "weight";
  std::string scale = "weight_scale";
  DType scale_dtype = DType::kF32;
  size_t rows = 1, cols = 0;       // of a cell; 0 = all
  std::string tensor_scale = {};   // of NVFP4
  bool is_reciprocal = false;
  std::vector<std::string> positive = {};  // further scalars: "input_scale"
  std::string offset = {};                 // zeros [N, 1]
};

StoredWeights EncodeStored(const Stored& how, Random& random, size_t rows, size_t cols) {
  StoredWeights stored;
  const Codes codes = RandomCodes(random, how.code, rows * cols);
  const bool packed = how.code == Code::kI4 || how.code == Code::kE2m1;
  stored.tensors[how.codes] = packed ? TensorOf(how.dtype, {rows, cols / 2}, Pairs(codes.bits))
                                     : TensorOf(how.dtype, {rows, cols}, codes.bits);
  const size_t cell_rows = how.rows == 0 ? rows : how.rows;
  const size_t cell_cols = how.cols == 0 ? cols : how.cols;
  const size_t grid_rows = Up(rows, cell_rows), grid_cols = Up(cols, cell_cols);
  const bool powers = how.scale_dtype == DType::kU8 || how.scale_dtype == DType::kF8E8M0;
  // E4M3 scales are near 1, the scale of all does the rest.
  const bool is_nvfp4 = how.scale_dtype == DType::kF8E4M3;
  std::vector<float> scales = RandomScales(random, grid_rows * grid_cols,
                                           is_nvfp4 ? 0.2 : SizeOf(how.code), powers);
  std::vector<size_t> shape = {grid_rows, grid_cols};
  if (how.rows == 0 && how.cols == 0) shape = {1};
  float all = 1;
  if (is_nvfp4) {
    std::vector<uint8_t> bytes;
    for (float& scale : scales) {
      std::uniform_int_distribution<int> code(0x20, 0x48);
      bytes.push_back(static_cast<uint8_t>(code(random)));
      scale = static_cast<float>(E4m3(bytes.back()));
    }
    stored.tensors[how.scale] = TensorOf(how.scale_dtype, shape, bytes);
    all = 0.015625f;
    const std::vector<float> value = {how.is_reciprocal ? 1 / all : all};
    stored.tensors[how.tensor_scale] = TensorOf(DType::kF32, {1}, value);
  } else {
    stored.tensors[how.scale] = ScalesAs(how.scale_dtype, shape, scales);
  }
  for (const std::string& name : how.positive) {
    std::uniform_real_distribution<float> any(0.01f, 0.05f);
    stored.tensors[name] = TensorOf(DType::kF32, {1}, std::vector<float>{any(random)});
  }
  if (!how.offset.empty())
    stored.tensors[how.offset] = TensorOf(DType::kF32, {rows, 1}, std::vector<float>(rows));
  for (size_t n = 0; n < rows; ++n) {
    for (size_t k = 0; k < cols; ++k) {
      const double scale = double{scales[n / cell_rows * grid_cols + k / cell_cols]} * double{all};
      stored.values.push_back(static_cast<float>(codes.values[n * cols + k] * scale));
    }
  }
  return stored;
}

Encoder AsStored(Stored how) {
  return [how](Random& random, const std::string&, size_t rows, size_t cols) {
    return EncodeStored(how, random, rows, cols);
  };
}

// --- Codes in words ------------------------------------------------------------------------------

// Group of each column: in order, or shuffled.
std::vector<int32_t> Groups(Random& random, size_t cols, size_t group, bool shuffled) {
  std::vector<int32_t> groups(cols);
  for (size_t k = 0; k < cols; ++k) groups[k] = static_cast<int32_t>(k / group);
  if (shuffled) std::shuffle(groups.begin(), groups.end(), random);
  return groups;
}

StoredWeights EncodeAwq(Random& random, size_t rows, size_t cols, size_t group) {
  constexpr size_t kOrder[] = {0, 2, 4, 6, 1, 3, 5, 7};  // element of nibble i
  StoredWeights stored;
  const size_t groups = cols / group;
  const Codes codes = RandomCodes(random, Code::kU4, rows * cols);
  const Codes zeros = RandomCodes(random, Code::kU4, rows * groups);
  const std::vector<float> scales = RandomScales(random, rows * groups, 8, false);
  const auto words = rows / 8;
  const auto pack = [&](const Codes& from, size_t lines) {
    return Words(lines * words, 4, [&](size_t w, size_t i) {
      return uint32_t{from.bits[(w % words * 8 + kOrder[i]) * lines + w / words]};
    });
  };
  stored.tensors["qweight"] = TensorOf(DType::kI32, {cols, words}, pack(codes, cols));
  stored.tensors["qzeros"] = TensorOf(DType::kI32, {groups, words}, pack(zeros, groups));
  std::vector<float> turned;
  for (size_t j = 0; j < groups; ++j) {
    for (size_t n = 0; n < rows; ++n) turned.push_back(scales[n * groups + j]);
  }
  stored.tensors["scales"] = ScalesAs(DType::kF16, {groups, rows}, turned);
  for (size_t n = 0; n < rows; ++n) {
    for (size_t k = 0; k < cols; ++k) {
      const size_t at = n * groups + k / group;
      stored.values.push_back(
          static_cast<float>((codes.values[n * cols + k] - zeros.values[at]) * double{scales[at]}));
    }
  }
  return stored;
}

struct Gptq {
  size_t bits = 4;
  size_t group = 32;  // 0 = all
  bool is_v2 = false;
  bool shuffled = false;
  bool has_order = true;
};

StoredWeights EncodeGptq(const Gptq& how, Random& random, size_t rows, size_t cols) {
  StoredWeights stored;
  const size_t group = how.group == 0 ? cols : how.group;
  const size_t groups = cols / group, per_word = 32 / how.bits;
  const Code code = how.bits == 4 ? Code::kU4 : Code::kU8;
  const Codes codes = RandomCodes(random, code, rows * cols);
  Codes zeros = RandomCodes(random, code, rows * groups);  // as stored
  for (uint8_t& zero : zeros.bits) zero = how.bits == 8 ? std::min<uint8_t>(zero, 254) : zero;
  const std::vector<float> scales = RandomScales(random, rows * groups, SizeOf(code), false);
  const std::vector<int32_t> order = Groups(random, cols, group, how.shuffled);
  stored.tensors["qweight"] =
      TensorOf(DType::kI32, {cols / per_word, rows},
               Words(cols / per_word * rows, how.bits, [&](size_t w, size_t i) {
                 return uint32_t{codes.bits[w % rows * cols + w / rows * per_word + i]};
               }));
  const size_t zero_words = rows / per_word;
  stored.tensors["qzeros"] =
      TensorOf(DType::kI32, {groups, zero_words},
               Words(groups * zero_words, how.bits, [&](size_t w, size_t i) {
                 return uint32_t{zeros.bits[(w % zero_words * per_word + i) * groups + w / zero_words]};
               }));
  std::vector<float> turned;
  for (size_t j = 0; j < groups; ++j) {
    for (size_t n = 0; n < rows; ++n) turned.push_back(scales[n * groups + j]);
  }
  stored.tensors["scales"] = ScalesAs(DType::kF16, {groups, rows}, turned);
  if (how.has_order) stored.tensors["g_idx"] = TensorOf(DType::kI32, {cols}, order);
  for (size_t n = 0; n < rows; ++n) {
    for (size_t k = 0; k < cols; ++k) {
      const size_t at = n * groups + static_cast<size_t>(order[k]);
      const double zero = zeros.bits[at] + (how.is_v2 ? 0 : 1);
      stored.values.push_back(
          static_cast<float>((codes.values[n * cols + k] - zero) * double{scales[at]}));
    }
  }
  return stored;
}

Encoder AsGptq(Gptq how) {
  return [how](Random& random, const std::string&, size_t rows, size_t cols) {
    return EncodeGptq(how, random, rows, cols);
  };
}

struct PackQuantized {
  size_t bits = 4;
  size_t group = 32;  // 0 = all
  bool symmetric = true;
  bool shuffled = false;
};

StoredWeights EncodePacked(const PackQuantized& how, Random& random, size_t rows, size_t cols) {
  StoredWeights stored;
  const size_t group = how.group == 0 ? cols : how.group;
  const size_t groups = Up(cols, group), per_word = 32 / how.bits, words = Up(cols, per_word);
  const Code code = how.bits == 4 ? Code::kU4 : Code::kU8;
  const Codes codes = RandomCodes(random, code, rows * cols);
  const Codes zeros = RandomCodes(random, code, rows * groups);
  const std::vector<float> scales = RandomScales(random, rows * groups, SizeOf(code), false);
  const std::vector<int32_t> order = Groups(random, cols, group, how.shuffled);
  stored.tensors["weight_packed"] =
      TensorOf(DType::kI32, {rows, words}, Words(rows * words, how.bits, [&](size_t w, size_t i) {
                 const size_t k = w % words * per_word + i;
                 return k < cols ? uint32_t{codes.bits[w / words * cols + k]} : 0u;
               }));
  stored.tensors["weight_scale"] = ScalesAs(DType::kBF16, {rows, groups}, scales);
  stored.tensors["weight_shape"] =
      TensorOf(DType::kI64, {2}, std::vector<int64_t>{int64_t(rows), int64_t(cols)});
  if (!how.symmetric) {
    const size_t lines = Up(rows, per_word);
    stored.tensors["weight_zero_point"] =
        TensorOf(DType::kI32, {lines, groups}, Words(lines * groups, how.bits, [&](size_t w, size_t i) {
                   const size_t n = w / groups * per_word + i;
                   return n < rows ? uint32_t{zeros.bits[n * groups + w % groups]} : 0u;
                 }));
  }
  if (how.shuffled) stored.tensors["weight_g_idx"] = TensorOf(DType::kI32, {cols}, order);
  for (size_t n = 0; n < rows; ++n) {
    for (size_t k = 0; k < cols; ++k) {
      const size_t at = n * groups + static_cast<size_t>(order[k]);
      const double zero = how.symmetric ? (how.bits == 4 ? 8 : 128) : zeros.values[at];
      stored.values.push_back(
          static_cast<float>((codes.values[n * cols + k] - zero) * double{scales[at]}));
    }
  }
  return stored;
}

Encoder AsPacked(PackQuantized how) {
  return [how](Random& random, const std::string&, size_t rows, size_t cols) {
    return EncodePacked(how, random, rows, cols);
  };
}

// --- ModelSlim -----------------------------------------------------------------------------------

struct SlimInt4 {
  bool paired = true;
  size_t group = 0;       // of the second scale
  bool scale_bias = true;
};

StoredWeights EncodeSlimInt4(const SlimInt4& how, Random& random, const std::string& module,
                             size_t rows, size_t cols) {
  StoredWeights stored;
  const Codes codes = RandomCodes(random, Code::kI4, rows * cols);
  const std::vector<float> scales = RandomScales(random, rows, 8, false);
  const size_t group = how.group == 0 ? cols : how.group, groups = cols / group;
  std::vector<float> second(rows * groups, 1.0f);
  if (how.group != 0) {
    for (float& scale : second) scale = random() % 2 == 0 ? 0.5f : 2.0f;
  }
  std::vector<uint8_t> bytes;
  if (how.paired) {
    for (size_t n = 0; n < rows; n += 2) {
      for (size_t k = 0; k < cols; ++k) {
        bytes.push_back(static_cast<uint8_t>(codes.bits[n * cols + k] |
                                             codes.bits[(n + 1) * cols + k] << 4));
      }
    }
  } else {
    for (double value : codes.values)
      bytes.push_back(static_cast<uint8_t>(static_cast<int8_t>(value)));
  }
  stored.tensors["weight"] = TensorOf(DType::kI8, {how.paired ? rows / 2 : rows, cols}, bytes);
  stored.tensors["weight_scale"] = TensorOf(DType::kF32, {rows, 1}, scales);
  stored.tensors["weight_offset"] = TensorOf(DType::kF32, {rows, 1}, std::vector<float>(rows));
  if (how.group != 0) {
    stored.tensors["weight_scale_second"] = TensorOf(DType::kF32, {rows, groups}, second);
    stored.tensors["weight_offset_second"] =
        TensorOf(DType::kF32, {rows, groups}, std::vector<float>(rows * groups));
  }
  for (size_t n = 0; n < rows; ++n) {
    for (size_t k = 0; k < cols; ++k) {
      const double scale = double{scales[n]} * double{second[n * groups + k / group]};
      stored.values.push_back(static_cast<float>(codes.values[n * cols + k] * scale));
    }
  }
  if (how.scale_bias) {
    const bool is_down = module.ends_with("down_proj");
    const size_t parts = is_down ? 16 : 1;
    std::vector<float> bias(rows * parts);
    for (size_t n = 0; n < rows; ++n) {
      for (size_t k = 0; k < cols; ++k)
        bias[n * parts + k % parts] += 8 * stored.values[n * cols + k];
    }
    stored.tensors["scale_bias"] = TensorOf(DType::kF32, {rows, parts}, bias);
  }
  return stored;
}

Encoder AsSlimInt4(SlimInt4 how) {
  return [how](Random& random, const std::string& module, size_t rows, size_t cols) {
    return EncodeSlimInt4(how, random, module, rows, cols);
  };
}

StoredWeights EncodeStaticInt8(Random& random, size_t rows, size_t cols) {
  StoredWeights stored =
      EncodeStored({.code = Code::kI8, .dtype = DType::kI8, .offset = "weight_offset"}, random,
                   rows, cols);
  const float input_scale = 0.03125f;
  const int offset = -3;
  std::vector<float> deq(rows);
  std::vector<int32_t> bias(rows);
  const auto* scales = reinterpret_cast<const float*>(stored.tensors["weight_scale"].bytes.data());
  const auto* codes = reinterpret_cast<const int8_t*>(stored.tensors["weight"].bytes.data());
  for (size_t n = 0; n < rows; ++n) {
    deq[n] = scales[n] * input_scale;
    for (size_t k = 0; k < cols; ++k) bias[n] -= offset * codes[n * cols + k];
  }
  stored.tensors["deq_scale"] = TensorOf(DType::kF32, {rows}, deq);
  stored.tensors["quant_bias"] = TensorOf(DType::kI32, {rows}, bias);
  stored.tensors["input_scale"] = TensorOf(DType::kF32, {1}, std::vector<float>{input_scale});
  stored.tensors["input_offset"] = TensorOf(DType::kI8, {1}, std::vector<int8_t>{offset});
  return stored;
}

// --- The table -----------------------------------------------------------------------------------

bool IsExpert(const std::string& module) {
  return module.find(".experts.") != std::string::npos;
}
bool IsDown(const std::string& module) { return module.ends_with("down_proj"); }

// A group of compressed-tensors.
Json CtGroup(const Json& targets, const Json& weights, const Json& activations = nullptr) {
  return {{"targets", targets}, {"weights", weights}, {"input_activations", activations}};
}
Json CtArguments(int bits, const char* type, const char* strategy, bool dynamic = false,
                 const Json& more = Json::object()) {
  Json arguments = {{"num_bits", bits}, {"type", type}, {"strategy", strategy},
                    {"symmetric", true}, {"dynamic", dynamic}};
  arguments.update(more);
  return arguments;
}
Json CtConfig(const char* format, const Json& groups) {
  return {{"quant_method", "compressed-tensors"},
          {"format", format},
          {"config_groups", groups},
          {"ignore", {"lm_head", "re:.*mlp.gate$"}},
          {"quantization_status", "compressed"}};
}
Json CtOne(const char* format, const Json& weights, const Json& activations = nullptr) {
  return CtConfig(format, {{"group_0", CtGroup({"Linear"}, weights, activations)}});
}

const Json kLeftOut = {"lm_head", "gate"};

Stored Fp8Blocks(DType scale_dtype, size_t rows, size_t cols) {
  return {.scale = "weight_scale_inv", .scale_dtype = scale_dtype, .rows = rows, .cols = cols};
}

void AddFp8(std::vector<QuantizedFormat>& all) {
  const auto config = [](size_t rows, size_t cols) {
    return Json{{"quant_method", "fp8"},
                {"activation_scheme", "dynamic"},
                {"weight_block_size", {rows, cols}},
                {"modules_to_not_convert", kLeftOut}};
  };
  all.push_back({"fp8_block", config(128, 128), AsStored(Fp8Blocks(DType::kF32, 128, 128))});
  // Bug-log 30: sizes that blocks do not divide, and every type of scales.
  const std::pair<const char*, DType> types[] = {
      {"f32", DType::kF32}, {"bf16", DType::kBF16}, {"e8m0", DType::kF8E8M0}};
  for (const auto& [name, type] : types) {
    all.push_back({std::string("fp8_block_ragged_") + name, config(128, 128),
                   AsStored(Fp8Blocks(type, 128, 128))});
    all.back().hidden = 72;
    all.back().inner = 40;
    all.push_back({std::string("fp8_block_small_") + name, config(32, 16),
                   AsStored(Fp8Blocks(type, 32, 16))});
    all.back().hidden = 72;
    all.back().inner = 40;
  }
  const Stored tensor = {.rows = 0};
  Stored with_input = tensor;
  with_input.positive = {"input_scale"};
  all.push_back({"fp8_tensor_dynamic",
                 {{"quant_method", "fp8"}, {"activation_scheme", "dynamic"},
                  {"ignored_layers", kLeftOut}},
                 AsStored(tensor)});
  all.push_back({"fp8_tensor_static",
                 {{"quant_method", "fp8"}, {"activation_scheme", "static"},
                  {"ignored_layers", kLeftOut}},
                 AsStored(with_input)});
  all.push_back({"w8a8_fp8", {{"quant_method", "w8a8_fp8"}}, AsStored({})});
  all.push_back({"mxfp8",
                 {{"quant_method", "mxfp8"}, {"ignored_layers", kLeftOut}},
                 AsStored({.scale = "weight_scale_inv", .scale_dtype = DType::kU8, .cols = 32})});
  const Stored expert = {.code = Code::kI4, .dtype = DType::kI8, .scale = "weight_scale_inv",
                         .cols = 32, .positive = {"input_scale"}};
  all.push_back({"w4afp8",
                 {{"quant_method", "w4afp8"}, {"group_size", 32}, {"ignored_layers", kLeftOut}},
                 [=](Random& random, const std::string& module, size_t rows, size_t cols) {
                   return EncodeStored(
                       IsExpert(module) ? expert : Fp8Blocks(DType::kF32, 128, 128), random, rows,
                       cols);
                 }});
}

void AddWords(std::vector<QuantizedFormat>& all) {
  all.push_back({"awq",
                 {{"quant_method", "awq"}, {"bits", 4}, {"group_size", 32}, {"zero_point", true},
                  {"version", "gemm"}, {"modules_to_not_convert", kLeftOut}},
                 [](Random& random, const std::string&, size_t rows, size_t cols) {
                   return EncodeAwq(random, rows, cols, 32);
                 }});
  const auto gptq = [](int bits, int group, const char* format, bool desc_act) {
    return Json{{"quant_method", "gptq"},        {"bits", bits},
                {"group_size", group},           {"desc_act", desc_act},
                {"sym", false},                  {"checkpoint_format", format},
                {"dynamic", {{"-:.*mlp.gate$", Json::object()}}}};
  };
  all.push_back({"gptq", gptq(4, 32, "gptq", false), AsGptq({})});
  all.push_back({"gptq_no_g_idx", gptq(4, 32, "gptq", false), AsGptq({.has_order = false})});
  all.push_back({"gptq_channel", gptq(4, -1, "gptq", false), AsGptq({.group = 0})});
  all.push_back({"gptq_v2", gptq(4, 32, "gptq_v2", false), AsGptq({.is_v2 = true})});
  all.push_back({"gptq_8bit", gptq(8, 32, "gptq", false), AsGptq({.bits = 8})});
  all.push_back({"gptq_8bit_v2", gptq(8, 32, "gptq_v2", false), AsGptq({.bits = 8, .is_v2 = true})});
  all.push_back({"gptq_desc_act", gptq(4, 32, "gptq", true), AsGptq({.shuffled = true})});
  // Experts that no token reached keep the order of their columns.
  all.push_back({"gptq_desc_act_of_some", gptq(4, 32, "gptq", true),
                 [](Random& random, const std::string& module, size_t rows, size_t cols) {
                   const bool kept = module.find("experts.0.") != std::string::npos ||
                                     module.find("experts.3.") != std::string::npos;
                   return EncodeGptq({.shuffled = !kept}, random, rows, cols);
                 }});
  // The first line that matches counts, in the order of the file; not that of the alphabet.
  Json mixed = gptq(4, 32, "gptq", false);
  mixed["dynamic"] = {{"-:.*mlp.gate$", Json::object()},
                      {"-:.*k_proj", Json::object()},
                      {"+:.*self_attn", {{"bits", 8}, {"group_size", -1}}},
                      {".*down_proj", {{"bits", 8}}}};
  all.push_back({"gptq_dynamic", mixed,
                 [](Random& random, const std::string& module, size_t rows, size_t cols) {
                   if (module.ends_with("k_proj")) return StoredWeights{};
                   if (module.find("self_attn") != std::string::npos)
                     return EncodeGptq({.bits = 8, .group = 0}, random, rows, cols);
                   if (IsDown(module)) return EncodeGptq({.bits = 8}, random, rows, cols);
                   return EncodeGptq({}, random, rows, cols);
                 }});
}

void AddCompressedTensors(std::vector<QuantizedFormat>& all) {
  const Json fp8_channel = CtArguments(8, "float", "channel");
  const Json token = CtArguments(8, "float", "token", true);
  all.push_back({"ct_fp8_channel", CtOne("float-quantized", fp8_channel, token),
                 AsStored({.scale_dtype = DType::kBF16})});
  all.push_back({"ct_fp8_weights", CtOne("float-quantized", fp8_channel),
                 AsStored({.scale_dtype = DType::kBF16})});
  all.push_back({"ct_fp8_static",
                 CtOne("float-quantized", CtArguments(8, "float", "tensor"),
                       CtArguments(8, "float", "tensor")),
                 AsStored({.rows = 0, .positive = {"input_scale"}})});
  all.push_back({"ct_fp8_block",
                 CtOne("float-quantized",
                       CtArguments(8, "float", "block", false, {{"block_structure", {128, 128}}}),
                       CtArguments(8, "float", "group", true, {{"group_size", 128}})),
                 AsStored({.rows = 128, .cols = 128})});
  all.push_back({"ct_mxfp8",
                 CtOne("float-quantized",
                       CtArguments(8, "float", "group", false, {{"group_size", 32}}),
                       CtArguments(8, "float", "group", true, {{"group_size", 32}})),
                 AsStored({.scale_dtype = DType::kU8, .cols = 32})});
  const Stored int8 = {.code = Code::kI8, .dtype = DType::kI8};
  all.push_back({"ct_int8",
                 CtOne("int-quantized", CtArguments(8, "int", "channel"),
                       CtArguments(8, "int", "token", true)),
                 AsStored(int8)});
  Stored int8_static = int8;
  int8_static.positive = {"input_scale"};
  all.push_back({"ct_int8_static",
                 CtOne("int-quantized", CtArguments(8, "int", "channel"),
                       CtArguments(8, "int", "tensor", false, {{"symmetric", false}})),
                 [=](Random& random, const std::string&, size_t rows, size_t cols) {
                   StoredWeights stored = EncodeStored(int8_static, random, rows, cols);
                   stored.tensors["input_zero_point"] =
                       TensorOf(DType::kI8, {1}, std::vector<int8_t>{5});
                   return stored;
                 }});
  const auto packed = [](int bits, int group, bool symmetric, bool ordered) {
    Json more = {{"symmetric", symmetric}};
    if (group != 0) more["group_size"] = group;
    if (ordered) more["actorder"] = "group";
    return CtOne("pack-quantized",
                 CtArguments(bits, "int", group == 0 ? "channel" : "group", false, more));
  };
  all.push_back({"ct_w4a16", packed(4, 32, true, false), AsPacked({})});
  all.push_back({"ct_w4a16_asym", packed(4, 32, false, false), AsPacked({.symmetric = false})});
  all.push_back({"ct_w4a16_actorder", packed(4, 32, true, true), AsPacked({.shuffled = true})});
  all.push_back({"ct_w4a16_channel", packed(4, 0, true, false), AsPacked({.group = 0})});
  all.push_back({"ct_w4a16_channel_ragged", packed(4, 0, false, false),
                 AsPacked({.group = 0, .symmetric = false})});
  all.back().hidden = 44;  // no multiple of the eight codes of a word
  all.back().inner = 20;
  all.push_back({"ct_w8a16", packed(8, 32, true, false), AsPacked({.bits = 8})});
  all.push_back({"ct_w8a16_asym", packed(8, 32, false, false),
                 AsPacked({.bits = 8, .symmetric = false})});
  all.push_back({"ct_w8a16_channel", packed(8, 0, true, false), AsPacked({.bits = 8, .group = 0})});
  all.push_back({"ct_nvfp4",
                 CtOne("nvfp4-pack-quantized",
                       CtArguments(4, "float", "tensor_group", false, {{"group_size", 16}}),
                       CtArguments(4, "float", "tensor_group", false,
                                   {{"group_size", 16}, {"dynamic", "local"}})),
                 AsStored({.code = Code::kE2m1, .dtype = DType::kU8, .codes = "weight_packed",
                           .scale_dtype = DType::kF8E4M3, .cols = 16,
                           .tensor_scale = "weight_global_scale", .is_reciprocal = true,
                           .positive = {"input_global_scale"}})});
  all.push_back({"ct_mxfp4",
                 CtOne("mxfp4-pack-quantized",
                       CtArguments(4, "float", "group", false, {{"group_size", 32}})),
                 AsStored({.code = Code::kE2m1, .dtype = DType::kU8, .codes = "weight_packed",
                           .scale_dtype = DType::kU8, .cols = 32})});
  // Attention, w13 and w2 each their own way; the group that says least comes first.
  Json groups = {
      {"group_0", CtGroup({"Linear"}, fp8_channel, token)},
      {"group_1", CtGroup({"re:.*experts.*(gate|up)_proj$"},
                          CtArguments(4, "int", "group", false, {{"group_size", 32}}))},
      {"group_2", CtGroup({"re:.*experts.*down_proj$"},
                          CtArguments(8, "int", "group", false, {{"group_size", 32}}))}};
  groups["group_1"]["format"] = groups["group_2"]["format"] = "pack-quantized";
  all.push_back({"ct_mixed", CtConfig("mixed-precision", groups),
                 [](Random& random, const std::string& module, size_t rows, size_t cols) {
                   if (!IsExpert(module)) return EncodeStored({}, random, rows, cols);
                   return EncodePacked({.bits = IsDown(module) ? size_t{8} : size_t{4}}, random,
                                       rows, cols);
                 }});
}

void AddInt8AndNvFp4(std::vector<QuantizedFormat>& all) {
  all.push_back({"w8a8_int8", {{"quant_method", "w8a8_int8"}},
                 AsStored({.code = Code::kI8, .dtype = DType::kI8})});
  const Stored nvfp4 = {.code = Code::kE2m1, .dtype = DType::kU8, .scale_dtype = DType::kF8E4M3,
                        .cols = 16, .tensor_scale = "weight_scale_2",
                        .positive = {"input_scale"}};
  all.push_back({"modelopt_nvfp4",
                 {{"quant_method", "modelopt"}, {"quant_algo", "NVFP4"}, {"ignore", kLeftOut}},
                 AsStored(nvfp4)});
  all.push_back({"modelopt_nvfp4_file",
                 {{"producer", {{"name", "modelopt"}, {"version", "0.29"}}},
                  {"quantization",
                   {{"quant_algo", "NVFP4"}, {"group_size", 16}, {"exclude_modules", kLeftOut}}}},
                 AsStored(nvfp4)});
  all.back().file_of_config = "hf_quant_config.json";
  all.push_back({"modelopt_fp8",
                 {{"quant_method", "modelopt"}, {"quant_algo", "FP8"}, {"ignore", kLeftOut}},
                 AsStored({.rows = 0, .positive = {"input_scale"}})});
  all.push_back({"modelopt_fp8_channel",
                 {{"quant_method", "modelopt"}, {"quant_algo", "FP8_PER_CHANNEL_PER_TOKEN"},
                  {"ignore", kLeftOut}},
                 AsStored({})});
}

void AddQuark(std::vector<QuantizedFormat>& all) {
  const auto config = [](const Json& weight, const Json& input) {
    return Json{{"quant_method", "quark"},
                {"global_quant_config", {{"weight", weight}, {"input_tensors", input}}},
                {"layer_quant_config", Json::object()},
                {"exclude", {"lm_head", "re:.*mlp.gate$"}}};
  };
  const auto mx = [](const char* dtype, bool dynamic) {
    return Json{{"dtype", dtype}, {"qscheme", "per_group"}, {"group_size", 32},
                {"is_dynamic", dynamic}};
  };
  const auto plain = [](const char* dtype, const char* qscheme, bool dynamic) {
    return Json{{"dtype", dtype}, {"qscheme", qscheme}, {"is_dynamic", dynamic}};
  };
  const Stored mxfp4 = {.code = Code::kE2m1, .dtype = DType::kU8, .scale_dtype = DType::kU8,
                        .cols = 32};
  Stored with_input = mxfp4;
  with_input.positive = {"input_scale"};
  all.push_back({"quark_w4a4", config(mx("fp4", false), mx("fp4", true)), AsStored(mxfp4)});
  all.push_back({"quark_w4a8", config(mx("fp4", false), mx("fp8_e4m3", true)), AsStored(mxfp4)});
  all.push_back({"quark_w4a16", config(mx("fp4", false), nullptr), AsStored(mxfp4)});
  all.push_back({"quark_mxfp4_fp8_static",
                 config(mx("fp4", false), plain("fp8_e4m3", "per_tensor", false)),
                 AsStored(with_input)});
  all.push_back({"quark_fp8_static",
                 config(plain("fp8_e4m3", "per_tensor", false),
                        plain("fp8_e4m3", "per_tensor", false)),
                 AsStored({.rows = 0, .positive = {"input_scale"}})});
  all.push_back({"quark_fp8_channel",
                 config(plain("fp8_e4m3", "per_channel", false),
                        plain("fp8_e4m3", "per_channel", true)),
                 AsStored({})});
  const Stored int8 = {.code = Code::kI8, .dtype = DType::kI8};
  all.push_back({"quark_int8",
                 config(plain("int8", "per_channel", false), plain("int8", "per_channel", true)),
                 AsStored(int8)});
  // The first glob that matches counts, in the order of the file.
  Json mixed = config(mx("fp4", false), mx("fp4", true));
  mixed["layer_quant_config"] = {
      {"*k_proj", {{"weight", plain("int8", "per_channel", false)},
                   {"input_tensors", plain("int8", "per_channel", true)}}},
      {"*_proj", {{"weight", plain("fp8_e4m3", "per_channel", false)},
                  {"input_tensors", plain("fp8_e4m3", "per_channel", true)}}}};
  mixed["layer_quant_config"] = {
      {"*self_attn.k_proj", mixed["layer_quant_config"]["*k_proj"]},
      {"*self_attn*", mixed["layer_quant_config"]["*_proj"]}};
  all.push_back({"quark_mixed", mixed,
                 [=](Random& random, const std::string& module, size_t rows, size_t cols) {
                   if (module.ends_with("k_proj")) return EncodeStored(int8, random, rows, cols);
                   return EncodeStored(IsExpert(module) ? mxfp4 : Stored{}, random, rows, cols);
                 }});
}

void AddModelSlim(std::vector<QuantizedFormat>& all) {
  const Encoder dynamic =
      AsStored({.code = Code::kI8, .dtype = DType::kI8, .offset = "weight_offset"});
  const Stored mx8 = {.scale_dtype = DType::kU8, .cols = 32};
  const Stored mx4 = {.code = Code::kE2m1, .dtype = DType::kU8, .scale_dtype = DType::kU8,
                      .cols = 32};
  // Experts one way, the rest W8A8_DYNAMIC.
  const auto add = [&](std::string name, std::string scheme, const Encoder& experts) {
    all.push_back({std::move(name), nullptr,
                   [=](Random& random, const std::string& module, size_t rows, size_t cols) {
                     return (IsExpert(module) ? experts : dynamic)(random, module, rows, cols);
                   },
                   [=](const std::string& module) {
                     return IsExpert(module) ? scheme : std::string("W8A8_DYNAMIC");
                   }});
  };
  add("modelslim_w8a8_dynamic", "W8A8_DYNAMIC", dynamic);
  add("modelslim_w8a16", "W8A16", dynamic);
  add("modelslim_w4a8", "W4A8_DYNAMIC", AsSlimInt4({}));
  add("modelslim_w4a8_group", "W4A8_DYNAMIC", AsSlimInt4({.group = 32}));
  all.back().description_extra["group_size"] = 32;
  add("modelslim_w4a4", "W4A4_DYNAMIC", AsSlimInt4({.paired = false, .scale_bias = false}));
  add("modelslim_w4a4_new", "W4A4_DYNAMIC", AsSlimInt4({.scale_bias = false}));
  all.back().w4a4_new_packing = true;
  add("modelslim_w8a8_mxfp8", "W8A8_MXFP8", AsStored(mx8));
  add("modelslim_w4a8_mxfp", "W4A8_MXFP", AsStored(mx4));
  add("modelslim_w4a4_mxfp4", "W4A4_MXFP4", AsStored(mx4));
  // Static attention, w13 and w2 in different schemes.
  all.push_back({"modelslim_mixed", nullptr,
                 [=](Random& random, const std::string& module, size_t rows, size_t cols) {
                   if (!IsExpert(module)) return EncodeStaticInt8(random, rows, cols);
                   return IsDown(module) ? dynamic(random, module, rows, cols)
                                         : EncodeSlimInt4({}, random, module, rows, cols);
                 },
                 [](const std::string& module) {
                   if (!IsExpert(module)) return std::string("W8A8");
                   return std::string(IsDown(module) ? "W8A8_DYNAMIC" : "W4A8_DYNAMIC");
                 }});
}

constexpr size_t kHeads = 2, kHeadDim = 32, kExperts = 4;

Json TinyConfig(const QuantizedFormat& format) {
  return {{"architectures", {"Qwen3MoeForCausalLM"}},
          {"model_type", "qwen3_moe"},
          {"vocab_size", format.vocab},
          {"hidden_size", format.hidden},
          {"num_hidden_layers", 1},
          {"num_attention_heads", kHeads},
          {"num_key_value_heads", 1},
          {"head_dim", kHeadDim},
          {"hidden_act", "silu"},
          {"max_position_embeddings", 64},
          {"rms_norm_eps", 1e-6},
          {"rope_theta", 10000.0},
          {"tie_word_embeddings", false},
          {"eos_token_id", 1},
          {"torch_dtype", "float32"},
          {"intermediate_size", 48},
          {"moe_intermediate_size", format.inner},
          {"num_experts", kExperts},
          {"num_experts_per_tok", 2},
          {"norm_topk_prob", true},
          {"decoder_sparse_step", 1},
          {"mlp_only_layers", Json::array()},
          {"attention_bias", false}};
}

Tensor RandomFloats(Random& random, std::vector<size_t> shape, float size, float around = 0) {
  std::normal_distribution<float> normal(0, size);
  std::vector<float> values(
      std::accumulate(shape.begin(), shape.end(), size_t{1}, std::multiplies<>()));
  for (float& value : values) value = around + normal(random);
  return TensorOf(DType::kF32, std::move(shape), values);
}

}  // namespace

std::vector<QuantizedFormat> QuantizedFormats() {
  std::vector<QuantizedFormat> all;
  AddFp8(all);
  AddWords(all);
  AddCompressedTensors(all);
  AddInt8AndNvFp4(all);
  AddQuark(all);
  AddModelSlim(all);
  return all;
}

QuantizedFormat QuantizedFormatOf(std::string_view name) {
  for (QuantizedFormat& format : QuantizedFormats()) {
    if (format.name == name) return format;
  }
  throw std::out_of_range(std::string(name));
}

QuantizedModel::QuantizedModel(const QuantizedFormat& format, uint32_t seed) {
  Random random(seed);
  Json description = format.description_extra;
  quantized.config = plain.config = TinyConfig(format);
  const auto floats = [&](const std::string& name, std::vector<size_t> shape, float size,
                          float around = 0) {
    quantized.tensors[name] = plain.tensors[name] =
        RandomFloats(random, std::move(shape), size, around);
    if (name.ends_with(".weight")) description[name] = "FLOAT";
  };
  const auto linear = [&](const std::string& module, size_t rows, size_t cols) {
    StoredWeights stored = format.encode(random, module, rows, cols);
    if (stored.tensors.empty()) return floats(module + ".weight", {rows, cols}, 0.1f);
    plain.tensors[module + ".weight"] = TensorOf(DType::kF32, {rows, cols}, stored.values);
    for (auto& [suffix, tensor] : stored.tensors) {
      quantized.tensors[module + "." + suffix] = std::move(tensor);
      if (format.described) description[module + "." + suffix] = format.described(module);
    }
  };
  const size_t hidden = format.hidden, inner = format.inner;
  const std::string layer = "model.layers.0.";
  floats("model.embed_tokens.weight", {format.vocab, hidden}, 1);
  floats("lm_head.weight", {format.vocab, hidden}, 0.1f);
  floats("model.norm.weight", {hidden}, 0.1f, 1);
  floats(layer + "input_layernorm.weight", {hidden}, 0.1f, 1);
  floats(layer + "post_attention_layernorm.weight", {hidden}, 0.1f, 1);
  floats(layer + "self_attn.q_norm.weight", {kHeadDim}, 0.1f, 1);
  floats(layer + "self_attn.k_norm.weight", {kHeadDim}, 0.1f, 1);
  floats(layer + "mlp.gate.weight", {kExperts, hidden}, 1);
  linear(layer + "self_attn.q_proj", kHeads * kHeadDim, hidden);
  linear(layer + "self_attn.k_proj", kHeadDim, hidden);
  linear(layer + "self_attn.v_proj", kHeadDim, hidden);
  linear(layer + "self_attn.o_proj", hidden, kHeads * kHeadDim);
  for (size_t e = 0; e < kExperts; ++e) {
    const std::string expert = layer + "mlp.experts." + std::to_string(e) + ".";
    linear(expert + "gate_proj", inner, hidden);
    linear(expert + "up_proj", inner, hidden);
    linear(expert + "down_proj", hidden, inner);
  }
  if (!format.file_of_config.empty()) {
    quantized.texts[format.file_of_config] = format.config.dump();
  } else if (format.described) {
    quantized.texts["quant_model_description.json"] = description.dump();
  } else {
    quantized.config["quantization_config"] = format.config;
  }
}

}  // namespace switchyard::testing
