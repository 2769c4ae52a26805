"""Go through a model one layer at a time: norms of its weights, with no more than one layer in memory.

python examples/load_by_layer.py [PATH]
"""

from __future__ import annotations

import sys

import numpy as np

import ingot


def main(path: str = "ingot-demo/original") -> None:
    with ingot.open(path) as ckpt:
        print(f"{len(ckpt)} tensors, {ckpt.nbytes:,} bytes stored, {ckpt.format} read by {ckpt.io}")
        for layer, arrays in ckpt.layers(dtype="f32"):
            label = "outside the layers" if layer is None else f"layer {layer}"
            squares = sum(float(np.square(array, dtype=np.float64).sum()) for array in arrays.values())
            size = sum(array.nbytes for array in arrays.values())
            print(f"{label:20} {len(arrays):3} tensors {size:>12,} bytes decoded, norm {squares**0.5:.3f}")


if __name__ == "__main__":
    main(*sys.argv[1:])
