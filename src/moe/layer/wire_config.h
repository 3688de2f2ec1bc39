// How a layer's rows travel. Contract 3.1.
#pragma once

#include "switchyard/moe/contract/dispatcher.h"
#include "switchyard/moe/layer/moe_layer.h"

namespace switchyard::moe {

// What `options` and the scheme make of the wire. auto is lossless: the codes that the products
// take, where the dispatcher can send them; rounded to bf16 where they are rounded before the
// product; else f32.
// Errors: kInvalidArgument naming the setting and its values.
DispatcherQuantConfig ResolveWire(const MoeLayerOptions& options, const SchemeEntry& w13,
                                  const MoeQuantInfo& quant_info, const MoeRunnerConfig& config,
                                  const Dispatcher& dispatcher);

}  // namespace switchyard::moe
