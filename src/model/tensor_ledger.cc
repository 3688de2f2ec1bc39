#include "model/tensor_ledger.h"

#include <fmt/format.h>

#include <algorithm>

#include "model/config_reader.h"
#include "switchyard/core/error.h"
#include "switchyard/core/log.h"

namespace switchyard {

std::string ListSome(const std::vector<std::string>& items, std::string_view separator) {
  std::string list;
  const size_t num_listed = std::min(items.size(), TensorLedger::kMaxListed);
  for (size_t i = 0; i < num_listed; ++i) {
    if (i > 0) list += separator;
    list += items[i];
  }
  if (items.size() > num_listed)
    list += fmt::format("{}and {} more", separator, items.size() - num_listed);
  return list;
}

std::string DescribeDTypes(std::span<const DType> dtypes) {
  std::string text;
  for (size_t i = 0; i < dtypes.size(); ++i) {
    if (i > 0) text += i + 1 == dtypes.size() ? " or " : ", ";
    text += DTypeName(dtypes[i]);
  }
  return text;
}

bool TensorLedger::Add(std::string_view name, DType dtype, const Shape& shape,
                       std::string_view file) {
  return entries_.emplace(name, Entry{dtype, shape, file}).second;
}

bool TensorLedger::Take(std::string_view name, const Shape& expected,
                        std::span<const DType> allowed) {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    missing_.push_back(fmt::format("{}: expected shape {} of {}", QuoteForMessage(name),
                                   expected.ToString(), DescribeDTypes(allowed)));
    return false;
  }
  Entry& entry = found->second;
  if (entry.state != State::kUnused) {
    throw Error(ErrorCode::kInternal,
                fmt::format("tensor {} is taken after it was {}", QuoteForMessage(name),
                            entry.state == State::kTaken ? "taken" : "ignored"));
  }
  entry.state = State::kTaken;
  const bool is_allowed = std::ranges::find(allowed, entry.dtype) != allowed.end();
  if (entry.shape == expected && is_allowed) return true;

  std::string problem = fmt::format("{}: tensor {}:", entry.file, QuoteForMessage(name));
  if (entry.shape != expected) {
    problem +=
        fmt::format(" expected shape {}, found {}", expected.ToString(), entry.shape.ToString());
  }
  if (!is_allowed) {
    problem += fmt::format("{} expected dtype {}, found {}", entry.shape != expected ? ";" : "",
                           DescribeDTypes(allowed), DTypeName(entry.dtype));
  }
  misfits_.push_back(std::move(problem));
  return false;
}

void TensorLedger::Ignore(std::string_view name, std::string_view reason) {
  const auto found = entries_.find(name);
  if (found == entries_.end()) return;
  if (found->second.state == State::kTaken) {
    throw Error(ErrorCode::kInternal,
                fmt::format("tensor {} is ignored after it was taken", QuoteForMessage(name)));
  }
  found->second.state = State::kIgnored;
  found->second.reason = reason;
  Log(LogLevel::kDebug, "a tensor is not used",
      {{"tensor", std::string(name)}, {"reason", std::string(reason)}});
}

std::string_view TensorLedger::IgnoredReason(std::string_view name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? std::string_view{} : found->second.reason;
}

const std::string_view* TensorLedger::FileOf(std::string_view name) const {
  const auto found = entries_.find(name);
  return found == entries_.end() ? nullptr : &found->second.file;
}

std::vector<std::string_view> TensorLedger::Names() const {
  std::vector<std::string_view> names;
  names.reserve(entries_.size());
  for (const auto& [name, entry] : entries_) names.push_back(name);
  return names;
}

void TensorLedger::Finish(std::string_view checkpoint, std::string_view config) const {
  std::vector<std::string> unused;
  for (const auto& [name, entry] : entries_) {
    if (entry.state != State::kUnused) continue;
    unused.push_back(fmt::format("{}: tensor {}: shape {} of {}", entry.file, QuoteForMessage(name),
                                 entry.shape.ToString(), DTypeName(entry.dtype)));
  }
  if (missing_.empty() && misfits_.empty() && unused.empty()) return;

  std::string message =
      fmt::format("{}: the weights do not fit the model that {} describes", checkpoint, config);
  const auto add = [&](std::string_view heading, const std::vector<std::string>& lines) {
    if (lines.empty()) return;
    message +=
        fmt::format("\n{} {} {}:\n  {}", lines.size(), lines.size() == 1 ? "tensor" : "tensors",
                    heading, ListSome(lines, "\n  "));
  };
  add("missing", missing_);
  add("with the wrong shape or dtype", misfits_);
  add("not known to the model", unused);
  throw Error(ErrorCode::kCorruptData, message);
}

}  // namespace switchyard
