// A million of the same character, on a small stack: no recursion, no quadratic time.
#include <gtest/gtest.h>
#include <pthread.h>

#include <functional>

#include "text/text_testing.h"

namespace switchyard {
namespace {

using testing::GoldenTokenizer;
using testing::GoldenTokenizers;

// 512 KiB is what a caller's thread may have; musl's default is less than glibc's.
void OnSmallStack(const std::function<void()>& work) {
  pthread_attr_t attributes;
  ASSERT_EQ(pthread_attr_init(&attributes), 0);
  ASSERT_EQ(pthread_attr_setstacksize(&attributes, 512 << 10), 0);
  pthread_t thread;
  auto run = [](void* work_pointer) -> void* {
    (*static_cast<const std::function<void()>*>(work_pointer))();
    return nullptr;
  };
  ASSERT_EQ(pthread_create(&thread, &attributes, run, const_cast<std::function<void()>*>(&work)),
            0);
  pthread_join(thread, nullptr);
  pthread_attr_destroy(&attributes);
}

TEST(HostileTextTest, MillionsOfTheSameCharacter) {
  const std::string pieces[] = {"Z", "中", " ", "7", "😀", "\xCC\x81", "\n"};
  for (const GoldenTokenizer& golden : GoldenTokenizers()) {
    SCOPED_TRACE(golden.name);
    for (const std::string& piece : pieces) {
      std::string text;
      for (int i = 0; i < 1000000; ++i) text += piece;
      size_t count = 0;
      OnSmallStack([&] { count = golden.tokenizer->Encode(text).size(); });
      EXPECT_GT(count, 0u) << piece;
    }
  }
}

}  // namespace
}  // namespace switchyard
