// FuseEP with ranks as processes: another window, the same bits.
#include <gtest/gtest.h>

#include "moe/fuseep/fuse_ranks.h"
#include "testing/errors.h"
#include "testing/mpi_main.h"
#include "testing/random.h"

namespace switchyard::moe {
namespace {

using testing::Spread;
using namespace fuse_ranks;

MpiSession* session = nullptr;

TEST(FusedMoeOverMpi, HasTheBitsOfOneRank) {
  std::mt19937_64 random = testing::MakeRandom(91);  // the same on all ranks
  Rank rank(session->world());
  for (const char* scheme : {"unquant", "w8a8_int8"}) {
    const TestLayer layer(CaseOptions(scheme), 8, DType::kF32, random);
    std::vector<size_t> counts;
    for (size_t i = 0; i < rank.group->size(); ++i) counts.push_back(i * 31 % kLimit);
    const Batch batch = MakeBatch(layer, counts, Spread::kSomeSkipped, random);
    for (int mode : {kDispatchGmmCombineDecode, kDispatchFfnCombine}) {
      FusedMoe moe(*rank.group, layer.ConfigOf(rank.group->size()), Options(mode));
      rank.ExpectBits(moe, layer, batch, scheme);
    }
  }
}

TEST(FusedMoeOverMpi, ManyRandomSteps) { RunRandomSteps(session->world(), 300); }

}  // namespace
}  // namespace switchyard::moe

int main(int argc, char** argv) {
  return switchyard::testing::RunMpiTests(argc, argv, switchyard::moe::session);
}
