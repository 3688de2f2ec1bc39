// What every group must do for an ExpertMover, whatever carries it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <random>
#include <span>
#include <vector>

#include "moe/eplb/test_experts.h"
#include "switchyard/moe/eplb/expert_mover.h"
#include "switchyard/parallel/process_group.h"
#include "testing/random.h"

namespace switchyard::moe {

using testing::AllExpertKinds;
using testing::DigestOf;
using testing::ExpertKind;
using testing::TestExperts;
using Map = std::vector<int32_t>;

inline constexpr size_t kLayer = 7;

inline Deadline Soon() { return Deadline::After(std::chrono::seconds(20), "mover test"); }

inline std::span<const int32_t> SlotsOf(const Map& map, size_t rank, size_t num_ranks) {
  const size_t per_rank = map.size() / num_ranks;
  return std::span(map).subspan(rank * per_rank, per_rank);
}

// What the values of an expert must be.
inline uint64_t DigestOfExpert(const ExpertKind& kind, int32_t logical) {
  TestExperts experts(kind, kLayer);
  return DigestOf(experts.Make(std::span(&logical, 1)), 0);
}

inline void ExpectExperts(const ExpertKind& kind, const ExpertWeights& weights,
                          std::span<const int32_t> logical) {
  for (size_t slot = 0; slot < logical.size(); ++slot) {
    EXPECT_EQ(DigestOf(weights, slot), DigestOfExpert(kind, logical[slot]))
        << kind.name << ", slot " << slot << ", expert " << logical[slot];
  }
}

// Every expert at least once, the rest by chance.
inline Map RandomMap(std::mt19937_64& random, size_t num_slots, size_t num_experts) {
  Map map;
  for (size_t i = 0; i < num_slots; ++i)
    map.push_back(static_cast<int32_t>(i < num_experts ? i : random() % num_experts));
  std::shuffle(map.begin(), map.end(), random);
  return map;
}

// Three migrations of a layer in every format, between random placements.
inline void MoveEveryKindAndCompare(ProcessGroup& group) {
  const size_t num_ranks = group.size(), per_rank = 5;
  const size_t num_slots = num_ranks * per_rank, num_experts = num_slots - num_ranks;
  std::vector<size_t> nodes;
  for (size_t rank = 0; rank < num_ranks; ++rank) nodes.push_back(group.NodeOf(rank));
  auto random = testing::MakeRandom(80 + num_ranks);  // the same on all ranks
  for (const ExpertKind& kind : AllExpertKinds()) {
    Map before = RandomMap(random, num_slots, num_experts);
    TestExperts experts(kind, kLayer);
    ExpertWeights weights = experts.Make(SlotsOf(before, group.rank(), num_ranks));
    const ExpertMatrices view = weights.w1.View();
    ExpertMover mover(weights, per_rank, kLayer, {.experts_per_batch = 2});
    for (int round = 0; round < 3; ++round) {
      const Map after = RandomMap(random, num_slots, num_experts);
      mover.Prepare(PlanMigration(before, after, nodes), group, {}, {}, Soon());
      ExpectExperts(kind, weights, SlotsOf(before, group.rank(), num_ranks));
      mover.Switch();
      ExpectExperts(kind, weights, SlotsOf(after, group.rank(), num_ranks));
      EXPECT_EQ(view.data.data(), weights.w1.data.data()) << "views of the lists stay valid";
      before = after;
    }
  }
}

}  // namespace switchyard::moe
