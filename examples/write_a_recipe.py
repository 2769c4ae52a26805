"""Write a recipe, then explain what it would do: which rule hits which tensor, and the resulting size.

    python examples/write_a_recipe.py [SOURCE [RECIPE.toml]]

Only headers are read, whatever the size of the model. ``ingot convert --dry-run`` prints the same.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from ingot.conversion.run import prepare

RECIPE = """
name = "attention at 8 bits"

[[rules]]
label = "attention, 8 bits per row"
roles = ["attention"]
codec = "quantized_group"
options = { bits = 8, group = "row" }

[[rules]]
label = "feed-forward of the inner layers, 4 bits"
roles = ["mlp"]
layers = "1--2"
codec = "quantized_group"
options = { bits = 4, group = 32, symmetric = false, quantizer = "mse" }

# No rule for the rest: it stays as it is stored.
"""


def main(source: str = "ingot-demo/original", recipe: str = "attention-8.toml") -> None:
    Path(recipe).write_text(RECIPE, encoding="utf-8")
    with prepare(source, "not-written.zt", recipe, None) as prepared:
        plan = prepared.plan
        for step in plan.steps:
            print(f"{step.tensor.name:50} {step.rule:42} {step.in_bytes:>9,} -> {step.out_bytes:>9,}")
        for rule, count in Counter(step.rule for step in plan.steps).items():
            print(f"{count:3} tensors by {rule!r}")
        print(f"{plan.size:,} bytes{'' if plan.size_exact else ' at most'}; nothing was written")


if __name__ == "__main__":
    main(*sys.argv[1:])
