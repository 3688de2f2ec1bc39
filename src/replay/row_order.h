// Rows of dispatch results that a protocol may deliver in any order, put into one order so that
// they can be compared.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "replay/case.h"

namespace switchyard::replay {

// Tensors whose rows move together: segments of rows, in each of which the order is free.
enum class RowFamily {
  kReceived,  // out.recv_*, out.partial: segments by receiving rank (out.recv_offsets)
  kPacked,    // out.packed_*: by receiving rank and local expert (out.masked_m)
  kSorted     // out.sorted_*, out.route_to_row: by expert (out.counts)
};

// From the text of "order" of a check; nullopt if it is another one.
std::optional<RowFamily> FamilyOf(std::string_view order);

// Permutes the rows of `values`, tensor `tensor`, so that the keys ascend within each segment. (Of
// out.route_to_row, which holds row numbers, the numbers change.) Segments and keys are taken from
// `outputs`, or from the expected tensors of the file if `outputs` is empty. Returns why it cannot:
// a tensor is missing, the segments do not fit the rows, rows of one source rank are not together
// (kPacked).
// Errors: kCorruptData if that happens with the expected tensors.
std::string PutInOrder(RowFamily family, const CaseFile& file, const Outputs& outputs,
                       const std::string& tensor, std::vector<double>& values);

}  // namespace switchyard::replay
