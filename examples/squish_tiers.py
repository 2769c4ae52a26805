"""Make a Squish directory, load a model of transformers from it, and see which tier was taken and why.

    python examples/squish_tiers.py [SOURCE [DESTINATION]]

Needs the extra transformers. SOURCE is a folder with config.json; DESTINATION must not exist.
"""

from __future__ import annotations

import sys

import ingot
from ingot.ext.squish.tiers.status import status
from ingot.runtime.loading.load_report import LoadReport


def show(report: LoadReport) -> None:
    """Print what a load did."""
    print(f"{report.tier}: {report.mapped:,} bytes mapped, {report.decoded:,} decoded, {report.packed:,} kept packed")
    print(f"    {report.why}")


def main(source: str = "ingot-demo/original", destination: str = "squish") -> None:
    ingot.convert(source, destination, format="npydir", recipe="squish-int8")

    ingot.load_model(destination, cache=False, report=show)  # decodes the arrays, and leaves nothing behind
    ingot.load_model(destination, report=show)  # writes the bf16 tier, and maps it
    ingot.load_model(destination, report=show)  # maps what is there
    model = ingot.load_model(
        destination, keep_packed=True, report=show
    )  # computes from the integers as they are stored
    print(f"{type(model).__name__}, {sum(parameter.numel() for parameter in model.parameters()):,} dense parameters")

    for one in status(destination):
        print(f"tier {one.tier}: {one.state}")


if __name__ == "__main__":
    main(*sys.argv[1:])
