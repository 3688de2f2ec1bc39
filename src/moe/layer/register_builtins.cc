#include "switchyard/moe/layer/register_builtins.h"

#include "kernels/activations/activations.h"
#include "moe/dispatchers/builtin.h"
#include "moe/runners/builtin.h"
#include "moe/schemes/builtin.h"

namespace switchyard::moe {

void RegisterBuiltins(Registry& registry) {
  for (const DispatcherEntry* entry : dispatchers::kBuiltin) registry.Add(*entry);
  for (const RunnerEntry* entry : runners::kBuiltin) registry.Add(*entry);
  for (const PermuteEntry* entry : runners::kBuiltinPermutes) {
    registry.Add(entry->pre);
    registry.Add(entry->post);
  }
  for (const SchemeEntry* entry : schemes::kBuiltin) registry.Add(*entry);
  for (const ActivationEntry& entry : kernels::AllActivations()) registry.Add(entry);
}

const Registry& BuiltinRegistry() {
  static const Registry registry = [] {
    Registry builtins;
    RegisterBuiltins(builtins);
    return builtins;
  }();
  return registry;
}

}  // namespace switchyard::moe
