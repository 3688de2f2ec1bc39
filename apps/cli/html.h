// What every page of HTML needs.
#pragma once

#include <string>
#include <string_view>

namespace switchyard::cli {

// `text` as the content of an element or of a quoted attribute. Control characters become spaces.
std::string EscapeHtml(std::string_view text);

}  // namespace switchyard::cli
