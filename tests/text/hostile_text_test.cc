// Long runs of one kind of character, which crash tokenizers whose pre-tokenizer recurses: on a small stack, for every
// recorded tokenizer. The time of each is printed, not asserted.
#include <pthread.h>

#include <chrono>
#include <cstdio>
#include <functional>

#include "switchyard/core/error.h"
#include "text/text_cases.h"

namespace switchyard {
namespace {

using Ids = std::vector<int32_t>;

struct Run {
  const char* name;
  const char* unit;
};

constexpr Run kRuns[] = {
    {"letters", "Z"},   {"han", "\xe4\xb8\xad"},          {"spaces", " "},
    {"digits", "7"},    {"emoji", "\xf0\x9f\x98\x80"},    {"marks", "\xcc\x81"},
    {"newlines", "\n"}, {"punctuation", "!"},             {"apostrophes", "'"},
};
constexpr size_t kLength = 1'000'000;

std::string Repeat(const std::string& unit, size_t count) {
  std::string text;
  text.reserve(unit.size() * count);
  for (size_t i = 0; i < count; ++i) text += unit;
  return text;
}

double Seconds(const std::function<void()>& call) {
  const auto start = std::chrono::steady_clock::now();
  call();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void EncodeAll(const testing::TextCase& test) {
  const auto tokenizer = test.Load();
  for (const Run& run : kRuns) {
    const std::string text = Repeat(run.unit, kLength);
    Ids ids;
    const double half =
        Seconds([&] { tokenizer->Encode(std::string_view(text).substr(0, text.size() / 2)); });
    const double full = Seconds([&] { ids = tokenizer->Encode(text, {.add_special_tokens = false}); });
    std::printf("  %-28s %-12s %.2f s, half %.2f s, %zu ids\n", test.name.c_str(), run.name, full, half, ids.size());
    // A short run of the same character tells whether this tokenizer keeps it; then the long run comes back whole.
    const std::string sample = Repeat(run.unit, 64);
    if (tokenizer->Decode(tokenizer->Encode(sample, {.add_special_tokens = false})) == sample) {
      EXPECT_TRUE(tokenizer->Decode(ids) == text) << run.name;
    }
    EXPECT_FALSE(ids.empty()) << run.name;
  }
}

class HostileText : public testing::TextCaseTest {};

TEST_P(HostileText, LongRunsOnASmallStack) {
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, 512 * 1024), 0);
  const testing::TextCase test = GetParam();
  pthread_t thread;
  ASSERT_EQ(pthread_create(
                &thread, &attributes,
                [](void* argument) -> void* {
                  EncodeAll(*static_cast<const testing::TextCase*>(argument));
                  return nullptr;
                },
                const_cast<testing::TextCase*>(&test)),
            0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

SY_FOR_EACH_TEXT_CASE(HostileText);

}  // namespace
}  // namespace switchyard
