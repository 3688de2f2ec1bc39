// `inspect --routing`: which experts fire where.
#pragma once

#include <string>

#include "switchyard/core/settings.h"

namespace switchyard::cli {

// What was asked for.
struct RoutingOptions {
  std::string model;
  std::string text;  // file, "-" = standard input
  std::string html;  // file to write
  bool has_html = false, json = false;
};

// Runs the model over the text and prints how often each expert was chosen. Returns the exit
// status. Errors: those of loading; kInvalidArgument if the text has no tokens or `html` cannot be
// written.
int InspectRouting(const RoutingOptions& options, const Settings& settings);

}  // namespace switchyard::cli
