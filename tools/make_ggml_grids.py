#!/usr/bin/env python3
"""Writes src/kernels/ggml/grids.inc, the codebooks of ggml's IQ types, from the gguf package.

    pip install gguf && tools/make_ggml_grids.py

A codebook lists the value patterns that a code may stand for, as ggml's authors chose them from a lattice; no formula
gives them back. Each entry becomes one 16-bit number that holds the index of each of its values among the few that
occur: 8 x 2 bits or 4 x 3 bits, the first value lowest.
"""
import pathlib

import gguf.quants as quants

TYPES = ["IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"]
TARGET = pathlib.Path(__file__).resolve().parent.parent / "src/kernels/ggml/grids.inc"


def entries(name):
    """The codebook of a type as packed numbers."""
    kind = getattr(quants, name)
    kind.init_grid()
    values = list(kind.grid_map)
    bits = 2 if len(values) <= 4 else 3
    for row in kind.grid.reshape(kind.grid_shape):
        yield sum(values.index(int(value)) << (bits * i) for i, value in enumerate(row))


def main():
    lines = ["// Made by tools/make_ggml_grids.py."]
    for name in TYPES:
        numbers = [f"0x{number:04x}," for number in entries(name)]
        label = "".join(part.capitalize() for part in name.split("_"))
        lines.append(f"constexpr uint16_t k{label}[{len(numbers)}] = {{")
        lines += ["    " + " ".join(numbers[i : i + 12]) for i in range(0, len(numbers), 12)]
        lines.append("};")
    TARGET.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
