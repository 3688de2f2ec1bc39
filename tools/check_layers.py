#!/usr/bin/env python3
"""tools/check_layers.py [ROOT]

Checks the include graph of include/switchyard and src against the layers below: a file may include its own layer and
those that its layer names, directly or through them. Also refused: a public header that includes another project's,
mpi.h outside parallel_mpi, layer code that includes tests or programs, an include cycle, and a folder called "utils".
"""
import os
import sys

import sources

# Layer -> the layers that it may use; docs/architecture.md says what each is for. Order is bottom to top.
LAYERS = {
    "core": [],
    "kernels": ["core"],
    "quant": ["kernels"],
    "parallel": ["core"],
    "moe/contract": ["core"],
    "moe/registry": ["moe/contract"],
    "moe/routing": ["moe/contract", "kernels"],
    "moe/ascend": ["moe/contract", "quant"],
    "moe/ep": ["moe/contract", "parallel", "quant"],
    "moe/dispatchers": ["moe/ep", "moe/ascend"],
    "moe/runners": ["moe/registry", "moe/ascend", "moe/oracle", "quant"],
    "moe/schemes": ["moe/registry", "quant"],
    "moe/eplb": ["moe/registry", "parallel", "quant"],
    "moe/fuseep": ["moe/registry", "parallel", "quant"],
    "moe/oracle": ["moe/contract", "quant"],
    "moe/layer": ["core", "kernels", "quant", "parallel", "moe/contract", "moe/registry", "moe/routing", "moe/ep",
                  "moe/dispatchers", "moe/runners", "moe/schemes", "moe/eplb", "moe/fuseep"],
    "moe/capi": ["moe/layer"],
    "model": ["moe/layer"],
    "engine": ["model"],
    "replay": ["model", "moe/oracle", "moe/eplb"],
    "simulate": ["model", "moe/eplb"],
    "parallel_mpi": ["parallel"],
    "text": ["core"],
    "capi": ["engine", "text", "parallel_mpi"],
}

# Everything outside include/switchyard and src is above all layers: it may include any, and no layer may include it.

BAD_FOLDERS = ("utils", "util", "helpers", "misc")  # a folder needs a purpose that its name can state


def allowed_layers(layer, table=None):
    """The layer itself and everything that it reaches."""
    table = LAYERS if table is None else table
    reached, pending = set(), [layer]
    while pending:
        current = pending.pop()
        if current not in reached:
            reached.add(current)
            pending += table[current]
    return reached


def layer_of(path):
    """Layer of a path relative to the root, or None; the longest match, so that moe/runners/x/y.h is in moe/runners."""
    for base in ("include/switchyard/", "src/"):
        if path.startswith(base):
            parts = path[len(base):].split("/")[:-1]
            for count in range(len(parts), 0, -1):
                if "/".join(parts[:count]) in LAYERS:
                    return "/".join(parts[:count])
    return None


def check_include(path, line, name, target, quoted):
    """One message per rule that this include breaks."""
    layer = layer_of(path)
    where = f"{path}:{line}: #include {name}"
    if name == "mpi.h" and layer != "parallel_mpi":
        yield f"{where}: only the layer parallel_mpi may include mpi.h"
    if layer is None:
        return
    if target is None:
        # A header that is made at build time is no file here, but its name tells its layer.
        target = next((made for made in (f"include/{name}", f"src/{name}") if layer_of(made)), None)
    if target is None:
        is_c = name in ("stddef.h", "stdint.h")  # a C interface has no <cstddef>
        is_standard = not quoted and "/" not in name and (is_c or not name.endswith(".h"))
        if path.startswith("include/") and not is_standard:
            yield f"{where}: a public header may include the standard library and Switchyard only"
        return
    target_layer = layer_of(target)
    if target_layer is None:
        yield f"{where}: layer {layer} includes {target}, which is in no layer"
    elif target_layer not in allowed_layers(layer):
        named = ", ".join(LAYERS[layer]) or "no other layer"
        yield (f"{where}: layer {layer} may not include layer {target_layer}; it may use {named}, and what those use "
               "(tools/check_layers.py)")
    elif path.startswith("include/") and target.startswith("src/"):
        yield f"{where}: a public header includes {target}, which is not installed"


def find_cycle(graph):
    """A list of nodes that ends where it starts, or None."""
    state, trail = {}, []

    def visit(node):
        state[node] = "open"
        trail.append(node)
        for target in graph.get(node, ()):
            if state.get(target) == "open":
                return trail[trail.index(target):] + [target]
            if target not in state:
                cycle = visit(target)
                if cycle:
                    return cycle
        state[node] = "done"
        trail.pop()
        return None

    for node in graph:
        if node not in state:
            cycle = visit(node)
            if cycle:
                return cycle
    return None


def check(root):
    """(messages, number of files in layers, number of their includes)"""
    tree = sources.Tree(root)
    messages = []
    files = includes = 0
    for folder in tree.folders:
        if os.path.basename(folder) in BAD_FOLDERS:
            messages.append(f"{folder}: a folder needs a name that says its purpose")
    for path in tree.files:
        if layer_of(path) is None and path.startswith(("include/", "src/")):
            messages.append(f"{path}: in no layer of tools/check_layers.py")
        if layer_of(path) is not None:
            files += 1
            includes += len(tree.includes[path])
        for line, name, target, quoted in tree.includes[path]:
            messages += check_include(path, line, name, target, quoted)
    cycle = find_cycle({path: [target for _, _, target, _ in tree.includes[path] if target] for path in tree.files})
    if cycle:
        messages.append("include cycle: " + " -> ".join(cycle))
    return messages, files, includes


def main():
    root = sys.argv[1] if len(sys.argv) > 1 else sources.ROOT
    messages, files, includes = check(root)
    for message in messages:
        print(message)
    print(f"{files} files, {includes} includes, {len(messages)} violations")
    return 1 if messages else 0


if __name__ == "__main__":
    sys.exit(main())
