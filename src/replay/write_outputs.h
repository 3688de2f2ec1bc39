// The computed tensors of a case, written to a file.
#pragma once

#include <filesystem>

#include "replay/case.h"

namespace switchyard::replay {

// Writes every computed tensor under its name: integers and codes with the dtype that the case
// expects of them (F64 if a value does not fit), everything else as F32.
// Errors: those of WriteSafetensors.
void WriteOutputs(const std::filesystem::path& path, const CaseFile& file, const Outputs& outputs);

}  // namespace switchyard::replay
