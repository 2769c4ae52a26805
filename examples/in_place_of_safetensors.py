"""``ingot.numpy`` in place of ``safetensors.numpy``: load_file, save_file, load, save, over every format.

    python examples/in_place_of_safetensors.py [SOURCE [TARGET]]

``ingot.torch`` is the same for ``safetensors.torch``.
"""

from __future__ import annotations

import sys

import numpy as np

from ingot.numpy import load, load_file, save, save_file


def main(source: str = "ingot-demo/original/model.safetensors", target: str = "copy.zt") -> None:
    weights = load_file(source)
    print(f"{len(weights)} arrays of {', '.join(sorted({str(array.dtype) for array in weights.values()}))}")

    save_file(weights, target, metadata={"format": "np"})  # the suffix names the format
    again = load_file(target)
    same = all(np.array_equal(array.view(np.uint8), again[name].view(np.uint8)) for name, array in weights.items())
    print(f"{target}: {'the same bits' if same else 'different'}")

    name, array = next(iter(weights.items()))
    data = save({name: array})  # the bytes of a safetensors file
    print(f"{name} alone: {len(data):,} bytes, {load(data)[name].shape}")


if __name__ == "__main__":
    main(*sys.argv[1:])
