// Values of several ranks in one place.
#pragma once

#include <numeric>
#include <span>
#include <vector>

#include "switchyard/parallel/process_group.h"

namespace switchyard::replay {

// The values of every rank, in rank order, on every rank. Collective.
template <typename T>
std::vector<std::vector<T>> GatherVectors(ProcessGroup& ranks, const std::vector<T>& mine,
                                          const Deadline& deadline) {
  const std::vector<size_t> sizes = AllGatherValue(ranks, mine.size(), deadline);
  std::vector<T> flat(std::accumulate(sizes.begin(), sizes.end(), size_t{0}));
  ranks.AllGatherV(sizeof(T), std::as_bytes(std::span(mine)), sizes,
                   std::as_writable_bytes(std::span(flat)), deadline);
  std::vector<std::vector<T>> all;
  auto next = flat.begin();
  for (const size_t size : sizes) {
    const auto end = next + static_cast<std::ptrdiff_t>(size);
    all.emplace_back(next, end);
    next = end;
  }
  return all;
}

}  // namespace switchyard::replay
