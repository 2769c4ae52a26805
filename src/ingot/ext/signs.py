"""Signs of the formats that ship as extensions; see ``ingot.formats.detect.Sign``.

This module imports nothing, so that detecting the format of a file imports only the formats that may claim it.
"""

from __future__ import annotations

SQUIZD = (".squizd", (0, b"SQZD"))
NPYDIR = ("manifest.json",)
NPY = (".npy", "finalized/")
NPZ = (".npz",)
ANEK = (".anek", "kernels.json", (0, b"ANEKUNIT"))
