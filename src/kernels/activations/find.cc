#include <fmt/format.h>
#include <fmt/ranges.h>

#include <vector>

#include "kernels/activations/activations.h"
#include "switchyard/core/error.h"
#include "switchyard/core/settings.h"

namespace switchyard::kernels {

const ActivationEntry& FindActivation(std::string_view name) {
  std::vector<std::string_view> known;
  for (const ActivationEntry& activation : AllActivations()) {
    if (activation.name == name) return activation;
    known.push_back(activation.name);
  }
  const std::string_view close = ClosestName(name, known);
  throw Error(ErrorCode::kNotFound,
              fmt::format("there is no activation \"{}\"{}; known: {}", name,
                          close.empty() ? "" : fmt::format(", did you mean \"{}\"?", close),
                          fmt::join(known, ", ")));
}

}  // namespace switchyard::kernels
