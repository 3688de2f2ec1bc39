// Every value is scanned once, whether it is packed or not.
#include "model/load_scan.h"

#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "switchyard/core/thread_pool.h"

namespace switchyard {
namespace {

constexpr size_t kCount = 100'000;  // no whole number of units
constexpr float kInf = std::numeric_limits<float>::infinity();

TensorView ViewOf(const std::vector<float>& values) {
  return {reinterpret_cast<const std::byte*>(values.data()), DType::kF32, Shape{values.size()}};
}

const std::byte* AddressOf(const float& value) {
  return reinterpret_cast<const std::byte*>(&value);
}

class LoadScanTest : public ::testing::Test {
 protected:
  LoadScanTest() : first_(kCount, 1.0f), second_(kCount, 1.0f), pool_(2) {
    for (size_t i : {70'000u, 99'999u}) second_[i] = kInf;
    first_[65'536] = std::numeric_limits<float>::quiet_NaN();
  }
  LoadScan Scan() const { return {{ViewOf(second_), ViewOf(first_)}, {"second", "first"}}; }

  std::vector<float> first_, second_;
  ThreadPool pool_;
  const std::vector<std::string> expected_ = {
      "second: 0 NaN and 2 infinite values, the first at element 70000 of shape [100000]",
      "first: 1 NaN and 0 infinite values, the first at element 65536 of shape [100000]"};
};

TEST_F(LoadScanTest, LinesAreInTheOrderOfTheViews) {
  LoadScan scan = Scan();
  EXPECT_EQ(scan.Finish(pool_), expected_);
}

TEST_F(LoadScanTest, PartsThatWereScannedBeforeCountOnce) {
  for (size_t step : {1'000u, 32'768u, 50'000u, 100'000u}) {
    LoadScan scan = Scan();
    for (const std::vector<float>* values : {&first_, &second_}) {
      pool_.Run((kCount + step - 1) / step, [&](size_t task, size_t) {
        const size_t begin = task * step, count = std::min(step, kCount - begin);
        scan.ScanBefore(AddressOf((*values)[begin]), count * sizeof(float));
      });
    }
    scan.ScanBefore(AddressOf(second_[0]), kCount * sizeof(float));
    EXPECT_EQ(scan.Finish(pool_), expected_) << step;
  }
}

// What the end finds no more was scanned before, and nothing else was.
TEST_F(LoadScanTest, OnlyTheGivenBytesAreScannedBefore) {
  LoadScan scan = Scan();
  scan.ScanBefore(AddressOf(second_[0]), 80'000 * sizeof(float));
  second_[70'000] = second_[99'999] = 1.0f;
  const std::vector<std::string> messages = scan.Finish(pool_);
  ASSERT_EQ(messages.size(), 2u);
  // The unit from 65536 on is whole.
  EXPECT_TRUE(messages[0].starts_with("second: 0 NaN and 1 infinite")) << messages[0];
}

TEST_F(LoadScanTest, BytesOfNoViewAreLeftAlone) {
  const std::vector<float> other(10, kInf);
  LoadScan scan = Scan();
  scan.ScanBefore(AddressOf(other[0]), other.size() * sizeof(float));
  EXPECT_EQ(scan.Finish(pool_), expected_);
}

}  // namespace
}  // namespace switchyard
