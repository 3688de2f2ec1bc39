#include "text/gguf_pre_tokenizers.h"

namespace switchyard::text {
namespace {

// The patterns are those of the models' own tokenizer.json, not the rewritten ones that programs
// without this regular-expression engine use.

constexpr std::string_view kGpt4 =
    R"~((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3})~"
    R"~(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)~";
constexpr std::string_view kGpt4Digit =
    R"~((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N})~"
    R"~(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)~";
constexpr std::string_view kGpt4Number =
    R"~((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+)~"
    R"~(| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)~";
constexpr std::string_view kGpt4o =
    R"~([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)~"
    R"~((?i:'s|'t|'re|'ve|'m|'ll|'d)?)~"
    R"~(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)~"
    R"~((?i:'s|'t|'re|'ve|'m|'ll|'d)?)~"
    R"~(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)~";
constexpr std::string_view kGpt4oDigit =
    R"~([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)~"
    R"~((?i:'s|'t|'re|'ve|'m|'ll|'d)?)~"
    R"~(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)~"
    R"~((?i:'s|'t|'re|'ve|'m|'ll|'d)?)~"
    R"~(|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)~";
constexpr std::string_view kTekkenWords =
    R"~([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)~"
    R"~(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*)~"
    R"~(|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)~";
constexpr std::string_view kKimiWords =
    R"~([\p{Han}]+)~"
    R"~(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*)~"
    R"~([\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?)~"
    R"~(|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+)~"
    R"~([\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?)~"
    R"~(|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)~";
constexpr std::string_view kQwen35Words =
    R"~((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N})~"
    R"~(| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)~";
constexpr std::string_view kBailingWords =
    R"~('(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N})~"
    R"~(| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+)~";
constexpr std::string_view kSeedWords =
    R"~((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1})~"
    R"~(| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+)~";
constexpr std::string_view kExaoneWords =
    R"~((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+)~"
    R"~(|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+)~";
constexpr std::string_view kDeepseekWords =
    R"~([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+)~"
    R"~(| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)~";
constexpr std::string_view kSparkWords =
    R"~([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+)~"
    R"~(| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+)~";
constexpr std::string_view kNewline = R"~([\r\n])~";
constexpr std::string_view kThreeDigits = R"~(\p{N}{1,3})~";
constexpr std::string_view kCjk = "[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+";
constexpr std::string_view kCjkHangul = "[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+";
constexpr std::string_view kDeepseekMarks =
    "\\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+";
constexpr std::string_view kYoutuScripts =
    "[\uAC00-\uD7A3\u3131-\u318E]+"
    "|[\uFF01\u2026\u201C\u201D\u2018\u2019\u2014\uFF1A\uFF1B\uFF0C\u3001-\u303F\uFE30-\uFE4F]+"
    "|[\u3105-\u312F]+|[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+";

// The letters of scripts that know upper and lower case, as DeepSeek lists them.
constexpr std::string_view kCasedLetters =
    "\\s?[A-Za-z\u00B5\u00C0-\u00D6\u00D8-\u00F6\u00F8-\u01BA\u01BC-\u01BF\u01C4-\u0293"
    "\u0295-\u02AF\u0370-\u0373\u0376\u0377\u037B-\u037D\u037F\u0386\u0388-\u038A\u038C"
    "\u038E-\u03A1\u03A3-\u03F5\u03F7-\u0481\u048A-\u052F\u0531-\u0556\u10A0-\u10C5"
    "\u13A0-\u13F5\u13F8-\u13FD\u1C90-\u1CBA\u1CBD-\u1CBF\u1D00-\u1D2B\u1D6B-\u1D77"
    "\u1D79-\u1D9A\u1E00-\u1F15\u1F18-\u1F1D\u1F20-\u1F45\u1F48-\u1F4D\u1F50-\u1F57\u1F59"
    "\u1F5B\u1F5D\u1F5F-\u1F7D\u1F80-\u1FB4\u1FB6-\u1FBC\u1FBE\u1FC2-\u1FC4\u1FC6-\u1FCC"
    "\u1FD0-\u1FD3\u1FD6-\u1FDB\u1FE0-\u1FEC\u1FF2-\u1FF4\u1FF6-\u1FFC\u2102\u2107"
    "\u210A-\u2113\u2115\u2119-\u211D\u2124\u2126\u2128\u212A-\u212D\u212F-\u2134\u2139"
    "\u213C-\u213F\u2145-\u2149\u214E\u2183\u2184\u2C00-\u2C7B\u2C7E-\u2CE4\u2CEB-\u2CEE"
    "\u2CF2\u2CF3\uA640-\uA66D\uA680-\uA69B\uA722-\uA76F\uA771-\uA787\uA78B-\uA78E"
    "\uAB70-\uABBF\uFB00-\uFB06\uFB13-\uFB17\uFF21-\uFF3A\uFF41-\uFF5A"
    "\U00010400-\U0001044F\U000104B0-\U000104D3\U000104D8-\U000104FB\U00010C80-\U00010CB2"
    "\U00010CC0-\U00010CF2\U000118A0-\U000118DF\U0001E900-\U0001E943]+";

constexpr PreTokenizer kGpt2 = {.gpt2_pattern = true};
constexpr PreTokenizer kNeoX = {.gpt2_pattern = true, .nfc = true};
constexpr PreTokenizer kStarcoder = {.digits = true, .gpt2_pattern = true};
constexpr PreTokenizer kCommandR = {.digits = true, .gpt2_pattern = true, .nfc = true};
constexpr PreTokenizer kLlama3 = {.splits = {{{kGpt4}}}, .ignore_merges = true, .add_bos = true};
constexpr PreTokenizer kDbrx = {.splits = {{{kGpt4}}}};
constexpr PreTokenizer kGlm4 = {.splits = {{{kGpt4}}}, .ignore_merges = true};
constexpr PreTokenizer kQwen2 = {.splits = {{{kGpt4Digit}}}, .nfc = true};
constexpr PreTokenizer kGrok2 = {.splits = {{{kGpt4Digit}}}};
constexpr PreTokenizer kQwen35 = {.splits = {{{kQwen35Words}}}, .nfc = true};
constexpr PreTokenizer kDeepseekLlm = {
    .splits = {{{kNewline}, {kCasedLetters}, {kDeepseekMarks}, {R"(\s+$)"}, {kCjkHangul}}},
    .digits = true};
constexpr PreTokenizer kDeepseekCoder = {
    .splits = {{{kNewline}, {R"(\s?\p{L}+)"}, {R"(\s?\p{P}+)"}, {kCjkHangul}}}, .digits = true};
constexpr PreTokenizer kDeepseekV3 = {.splits = {{{kThreeDigits}, {kCjk}, {kDeepseekWords}}}};
constexpr PreTokenizer kSpark = {.splits = {{{kThreeDigits}, {kCjk}, {kSparkWords}, {R"(\p{N})"}}}};
constexpr PreTokenizer kO200k = {.splits = {{{kGpt4o}}}};
constexpr PreTokenizer kTekken = {
    .splits = {{{kTekkenWords}}}, .ignore_merges = true, .add_bos = true};
constexpr PreTokenizer kKimiK2 = {.splits = {{{kKimiWords}}}, .ignore_merges = true};
constexpr PreTokenizer kBailing = {.splits = {{{kBailingWords}}}, .nfc = true};
constexpr PreTokenizer kSeedCoder = {.splits = {{{kSeedWords}}}};
constexpr PreTokenizer kSuperBpe = {.splits = {{{R"(\p{N}+)"}, {R"((?=(\d{3})+(?!\d)))"}}}};
constexpr PreTokenizer kExaoneMoe = {.splits = {{{kExaoneWords}}}, .nfc = true};
constexpr PreTokenizer kMiniCpm5 = {.splits = {{{kThreeDigits}, {kGpt4Number}}},
                                    .ignore_merges = true};
constexpr PreTokenizer kCohere2 = {.splits = {{{R"(\d{1,3}(?=(?:\d{3})*\b))"}, {kGpt4o}}},
                                   .nfc = true};
constexpr PreTokenizer kYoutu = {.splits = {{{kYoutuScripts}, {kGpt4oDigit}}},
                                 .ignore_merges = true};
constexpr PreTokenizer kLaguna = {
    .splits = {{{R"((?:\r?\n)+(?!\r?\n))", "MergedWithNext"}, {kGpt4Digit}}}};

struct Kind {
  std::string_view name;
  const PreTokenizer* pre_tokenizer;
};

constexpr Kind kKinds[] = {
    {"default", &kGpt2},
    {"gpt-2", &kGpt2},
    {"a.x-4.0", &kGpt2},
    {"exaone4", &kGpt2},
    {"gigachat", &kGpt2},
    {"granite-docling", &kGpt2},
    {"jais", &kGpt2},
    {"mellum", &kGpt2},
    {"phi-2", &kGpt2},
    {"trillion", &kGpt2},
    {"mpt", &kNeoX},
    {"olmo", &kNeoX},
    {"starcoder", &kStarcoder},
    {"codeshell", &kStarcoder},
    {"exaone", &kStarcoder},
    {"mellum2", &kStarcoder},
    {"minerva-7b", &kStarcoder},
    {"refact", &kStarcoder},
    {"smollm", &kStarcoder},
    {"command-r", &kCommandR},
    {"llama-bpe", &kLlama3},
    {"llama3", &kLlama3},
    {"llama-v3", &kLlama3},
    {"falcon3", &kLlama3},
    {"falcon-h1", &kLlama3},
    {"lfm2", &kLlama3},
    {"midm-2.0", &kLlama3},
    {"pixtral", &kLlama3},
    {"dbrx", &kDbrx},
    {"smaug-bpe", &kDbrx},
    {"glm4", &kGlm4},
    {"chatglm-bpe", &kGlm4},
    {"qwen2", &kQwen2},
    {"deepseek-r1-qwen", &kQwen2},
    {"f2llmv2", &kQwen2},
    {"hunyuan", &kQwen2},
    {"kormo", &kQwen2},
    {"megrez", &kQwen2},
    {"grok-2", &kGrok2},
    {"solar-open", &kGrok2},
    {"stablelm2", &kGrok2},
    {"qwen35", &kQwen35},
    {"deepseek-llm", &kDeepseekLlm},
    {"deepseek-coder", &kDeepseekCoder},
    {"deepseek-v3", &kDeepseekV3},
    {"hunyuan-dense", &kDeepseekV3},
    {"hy_v4", &kDeepseekV3},
    {"joyai-llm", &kDeepseekV3},
    {"spark2_5", &kSpark},
    {"gpt-4o", &kO200k},
    {"kanana2", &kO200k},
    {"llama4", &kO200k},
    {"minimax-m2", &kO200k},
    {"talkie", &kO200k},
    {"tekken", &kTekken},
    {"kimi-k2", &kKimiK2},
    {"bailingmoe", &kBailing},
    {"bailingmoe2", &kBailing},
    {"llada-moe", &kBailing},
    {"seed-coder", &kSeedCoder},
    {"superbpe", &kSuperBpe},
    {"exaone-moe", &kExaoneMoe},
    {"minicpm5", &kMiniCpm5},
    {"cohere2moe", &kCohere2},
    {"tiny_aya", &kCohere2},
    {"youtu", &kYoutu},
    {"laguna", &kLaguna},
};

}  // namespace

const PreTokenizer* FindPreTokenizer(std::string_view name) {
  for (const Kind& kind : kKinds) {
    if (kind.name == name) return kind.pre_tokenizer;
  }
  return nullptr;
}

std::string_view PreTokenizerNameOf(const PreTokenizer& wanted) {
  for (const Kind& kind : kKinds) {
    const PreTokenizer& known = *kind.pre_tokenizer;
    // The first of a way is its best known, but "default" warns in other programs.
    if (kind.name != "default" && known.splits == wanted.splits && known.digits == wanted.digits &&
        known.gpt2_pattern == wanted.gpt2_pattern && known.nfc == wanted.nfc &&
        known.ignore_merges == wanted.ignore_merges)
      return kind.name;
  }
  return {};
}

std::string PreTokenizerNames() {
  std::string names;
  for (const Kind& kind : kKinds) {
    if (!names.empty()) names += ", ";
    names += kind.name;
  }
  return names;
}

}  // namespace switchyard::text
