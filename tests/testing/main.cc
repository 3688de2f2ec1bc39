// main() of every test program: prints the seed of random tests, so that a failure can be replayed.
#include <gtest/gtest.h>

#include <cstdio>

#include "testing/random.h"

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  std::printf("SWITCHYARD_TEST_SEED=%llu\n",
              static_cast<unsigned long long>(switchyard::testing::TestSeed()));
  return RUN_ALL_TESTS();
}
