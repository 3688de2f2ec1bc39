#include "inspect_gguf.h"

#include <fmt/format.h>

#include <array>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "common.h"

namespace switchyard::cli {
namespace {

using nlohmann::ordered_json;

// Names of general.file_type. Source: enum llama_ftype of ggml-org/llama.cpp.
constexpr std::array<std::pair<size_t, std::string_view>, 35> kFileTypes = {{
    {0, "F32"},      {1, "F16"},      {2, "Q4_0"},       {3, "Q4_1"},    {7, "Q8_0"},
    {8, "Q5_0"},     {9, "Q5_1"},     {10, "Q2_K"},      {11, "Q3_K_S"}, {12, "Q3_K_M"},
    {13, "Q3_K_L"},  {14, "Q4_K_S"},  {15, "Q4_K_M"},    {16, "Q5_K_S"}, {17, "Q5_K_M"},
    {18, "Q6_K"},    {19, "IQ2_XXS"}, {20, "IQ2_XS"},    {21, "Q2_K_S"}, {22, "IQ3_XS"},
    {23, "IQ3_XXS"}, {24, "IQ1_S"},   {25, "IQ4_NL"},    {26, "IQ3_S"},  {27, "IQ3_M"},
    {28, "IQ2_S"},   {29, "IQ2_M"},   {30, "IQ4_XS"},    {31, "IQ1_M"},  {32, "BF16"},
    {36, "TQ1_0"},   {37, "TQ2_0"},   {38, "MXFP4_MOE"}, {39, "NVFP4"},  {1024, "guessed"},
}};

std::string FileTypeName(size_t number) {
  for (const auto& [known, name] : kFileTypes) {
    if (known == number) return fmt::format("{} ({})", name, number);
  }
  return fmt::format("{}", number);
}

ordered_json TextOrNull(const std::optional<std::string_view>& text) {
  return text ? ordered_json(Printable(*text)) : ordered_json(nullptr);
}

}  // namespace

ordered_json DescribeGguf(const GgufModel& gguf) {
  const GgufFile& file = gguf.metadata();
  std::map<std::string, size_t> types;
  for (const GgufModel::Tensor& tensor : gguf.tensors())
    ++types[std::string(DTypeName(tensor.info->dtype))];
  const auto file_type = file.OptionalCount("general.file_type", 0, UINT32_MAX);
  const GgufEntry* tokens = file.FindEntry("tokenizer.ggml.tokens");
  return {{"version", file.version()},
          {"alignment", file.alignment()},
          {"parts", gguf.parts().size()},
          {"metadata_entries", file.entries().size()},
          {"name", TextOrNull(file.OptionalText("general.name"))},
          {"file_type", file_type ? ordered_json(FileTypeName(*file_type)) : ordered_json(nullptr)},
          {"tensor_types", types},
          {"tokenizer", TextOrNull(file.OptionalText("tokenizer.ggml.model"))},
          {"pre_tokenizer", TextOrNull(file.OptionalText("tokenizer.ggml.pre"))},
          {"vocabulary", tokens != nullptr ? ordered_json(tokens->count) : ordered_json(nullptr)}};
}

}  // namespace switchyard::cli
