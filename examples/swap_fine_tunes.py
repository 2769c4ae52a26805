"""Swap two fine-tunes of one base in memory, in place, and prove that the base comes back bit for bit.

    python examples/swap_fine_tunes.py [BASE]

The fine-tunes are made here: a few weights of the base are changed. With tensors of ``ingot.torch.load_file`` it is the
same.
"""

from __future__ import annotations

import sys

import numpy as np

import ingot
from ingot.numpy import load_file, save_file


def fine_tune(base: str, path: str, seed: int) -> None:
    """Write a model in which one weight of fifty in the feed-forward networks is another than in the base."""
    rng = np.random.default_rng(seed)
    weights = load_file(base)
    for name, array in weights.items():
        if ".mlp." in name:
            array[rng.random(array.shape) < 0.02] *= 1.01
    save_file(weights, path)


def same(left: dict[str, np.ndarray], right: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(array.view(np.uint8), right[name].view(np.uint8)) for name, array in left.items())


def main(base: str = "ingot-demo/original") -> None:
    for seed, name in enumerate(("coder", "poet")):
        fine_tune(base, f"{name}.safetensors", seed)
        report = ingot.diff(base, f"{name}.safetensors", f"{name}-delta.zt")
        print(f"{name}-delta.zt: {report.size:,} bytes, exact")

    weights, before = load_file(base), load_file(base)
    for name in ("coder", "poet", "coder"):
        applied = ingot.apply_delta(weights, f"{name}-delta.zt")  # proves first that the weights are the delta's base
        right = same(weights, load_file(f"{name}.safetensors"))
        print(f"{name}: {'the same bits' if right else 'DIFFERENT'}, {applied.nbytes:,} bytes to undo it")
        ingot.revert(weights, applied)
    print(f"base: {'the same bits' if same(weights, before) else 'DIFFERENT'} after all of them")


if __name__ == "__main__":
    main(*sys.argv[1:])
