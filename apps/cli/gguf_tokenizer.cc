#include "gguf_tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "common.h"
#include "switchyard/core/error.h"
#include "switchyard/model/generation_config.h"
#include "switchyard/model/model.h"
#include "switchyard/text/hub_vocabulary.h"

namespace switchyard::cli {
namespace {

constexpr int32_t kUnused = 5;

// Ids at which generation stops: those of config.json, then those of generation_config.json.
std::vector<size_t> StopIds(const std::shared_ptr<const ModelFiles>& files) {
  std::vector<size_t> ids = Model::ReadConfig(files).eos_ids;
  for (size_t id : ReadGenerationConfig(*files).eos_ids) {
    if (std::ranges::find(ids, id) == ids.end()) ids.push_back(id);
  }
  return ids;
}

void SetVocabulary(const GgufVocabulary& vocabulary, size_t vocab_size, GgufWriter& writer) {
  const std::string prefix = "tokenizer.ggml.";
  if (vocabulary.tokens.size() > vocab_size) {
    throw Error(ErrorCode::kCorruptData,
                fmt::format("tokenizer.json: has {} tokens, the embedding has {} rows",
                            vocabulary.tokens.size(), vocab_size));
  }
  std::vector<std::string> tokens(vocabulary.tokens.begin(), vocabulary.tokens.end());
  std::vector<int32_t> types = vocabulary.token_type;
  std::vector<float> scores = vocabulary.scores;
  for (size_t id = tokens.size(); id < vocab_size; ++id) {
    tokens.push_back(fmt::format("[PAD{}]", id));
    types.push_back(kUnused);
    if (!scores.empty()) scores.push_back(-1000.0f);
  }
  writer.SetText(prefix + "model", vocabulary.model);
  writer.SetText(prefix + "pre", vocabulary.pre);
  writer.SetTexts(prefix + "tokens", tokens);
  writer.SetI32s(prefix + "token_type", types);
  if (!scores.empty()) writer.SetF32s(prefix + "scores", scores);
  if (!vocabulary.merges.empty()) {
    writer.SetTexts(prefix + "merges",
                    std::vector<std::string>(vocabulary.merges.begin(), vocabulary.merges.end()));
  }
  const auto id = [&](const std::string& name, std::optional<uint32_t> value) {
    if (value) writer.SetU32(prefix + name + "_token_id", *value);
  };
  id("bos", vocabulary.bos_token_id);
  id("eos", vocabulary.eos_token_id);
  id("eot", vocabulary.eot_token_id);
  id("unknown", vocabulary.unknown_token_id);
  id("padding", vocabulary.padding_token_id);
  const auto flag = [&](const std::string& name, std::optional<bool> value) {
    if (value) writer.SetFlag(prefix + name, *value);
  };
  flag("add_bos_token", vocabulary.add_bos_token);
  flag("add_eos_token", vocabulary.add_eos_token);
  flag("add_space_prefix", vocabulary.add_space_prefix);
  if (!vocabulary.chat_template.empty())
    writer.SetText("tokenizer.chat_template", vocabulary.chat_template);
  for (const auto& [name, text] : vocabulary.named_chat_templates)
    writer.SetText("tokenizer.chat_template." + name, text);
}

}  // namespace

bool HasGgufTokenizer(const std::shared_ptr<const ModelFiles>& files) {
  return GgufModel::Open(files).metadata().FindEntry("tokenizer.ggml.tokens") != nullptr;
}

std::vector<TextFile> TokenizerTexts(const TokenizerFiles& files) {
  std::vector<TextFile> texts = {{"tokenizer.json", files.tokenizer_json}};
  if (files.tokenizer_config_json)
    texts.push_back({"tokenizer_config.json", *files.tokenizer_config_json});
  if (files.chat_template_jinja)
    texts.push_back({"chat_template.jinja", *files.chat_template_jinja});
  return texts;
}

std::function<void(GgufWriter&, size_t)> GgufTokenizerSetter(
    const std::shared_ptr<const ModelFiles>& files) {
  return [files](GgufWriter& writer, size_t vocab_size) {
    HubVocabulary hub = ReadHubVocabulary(ReadTokenizerFiles(files));
    GgufVocabulary& vocabulary = hub.vocabulary;
    const std::vector<size_t> stops = StopIds(files);
    if (!stops.empty()) vocabulary.eos_token_id = static_cast<uint32_t>(stops[0]);
    if (stops.size() > 1) vocabulary.eot_token_id = static_cast<uint32_t>(stops[1]);
    SetVocabulary(vocabulary, vocab_size, writer);
  };
}

}  // namespace switchyard::cli
