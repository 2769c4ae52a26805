"""Fuzzes the .squizd reader: any bytes open, list and decode, or end in an IngotError. Nothing else may escape.

    pip install --group fuzz
    python -m tests.fuzz.fuzz_squizd -max_total_time=600

The golden corpus is the seed; findings are written to the current folder as crash-*. A finding is replayed by
``python -m tests.fuzz.fuzz_squizd crash-...``. By its first byte an input is a file as it is, a file whose checks over
the header's metadata are put right first, or a series of choices that change numbers of a well-formed file: header,
index, blocks, tables, directory.
"""

from __future__ import annotations

import gc
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import atheris
import numpy as np

from ingot.errors import IngotError
from ingot.ext.squizd.reader import read_catalog
from ingot.model.bytesource import MemorySource
from tests.support.reading import checked, read_all
from tests.support.squizd import squizd
from tests.support.squizd_items import Item, dense, fnv, pruned, quantized
from tests.support.zt import OMIT

CORPUS = Path(__file__).parent.parent / "golden" / "squizd"
NUMBERS = [0, 1, 2, 4, 8, 63, 64, 255, 256, 2**16, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1]
VALUES: list[Any] = [*NUMBERS, -1, True, None, "", "f16", "f32", "bf16", "u8", "row", "tensor", "group", "rows_lsb"]
VALUES += ["flat_lsb", "dense", "quantized_group", "sparse_blocks", "astc", "tca_tbe", [], [4], [4, 16], {}, 1.5]
VALUES += [float("inf"), float("nan"), "crc32c:0x00000000", "6x6", OMIT]


def items() -> list[Item]:
    """A tensor of each kind of which all numbers are known here."""
    codes = np.arange(64).reshape(4, 16) % 16 - 8
    scales = [(0.5, 0.0)] * 8
    return [
        dense("a", "f32", [4], bytes(16)),
        quantized("b", codes, 4, scales, 8, scales="f16"),
        quantized("c", codes % 4 - 2, 2, [(0.5, 1.0)], "tensor", zeros=True, layer=1),
        pruned(quantized("d", codes, 4, scales[:4], "row", layer=1), 0, 6, 2, (0, 2)),
    ]


def chosen(data: atheris.FuzzedDataProvider) -> bytes:
    """A well-formed file of which a few fields of the directory or numbers elsewhere are others."""
    edit = directory_edit(data) if data.ConsumeBool() else None
    draft = [dense("d2t", "i64", [2], bytes(16)), *items()[1:2]] if data.ConsumeBool() else []
    made = squizd(items(), edit=edit, draft=draft, named=data.ConsumeIntInRange(0, 3) > 0, digest=None)
    file = bytearray(made.data)
    for _ in range(data.ConsumeIntInRange(0, 3)):
        size = data.PickValueInList([1, 2, 4, 8])
        at = data.ConsumeIntInRange(0, len(file) - size)
        value = data.PickValueInList(NUMBERS) if data.ConsumeBool() else data.ConsumeIntInRange(0, 2**16)
        file[at : at + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    return repaired(file)


def directory_edit(data: atheris.FuzzedDataProvider) -> Callable[[Any], Any]:
    keys = ["shape", "dtype", "codec", "layer", "offset", "params", "scales", "zeros", "first", "second", "mask"]
    keys += ["digests", "bits", "group_size", "granularity", "packing", "signed", "axis", "block", "channels", "kept"]
    keys += ["inner", "inner_params"]
    changes = [
        (data.PickValueInList(list("abcd")), data.PickValueInList(keys), data.PickValueInList(VALUES))
        for _ in range(data.ConsumeIntInRange(1, 3))
    ]

    def edit(root: Any) -> Any:
        for name, key, value in changes:
            entry = root["tensors"][name]
            target = entry if keys.index(key) < 12 else entry.setdefault("params", {})
            if not isinstance(target, dict):
                continue
            if value is OMIT:
                target.pop(key, None)
            else:
                target[key] = value
        return root

    return edit


def repaired(file: bytes | bytearray) -> bytes:
    """Put the checks over sparsity and draft metadata right: else nothing behind them is reached."""
    data = bytearray(file)
    if len(data) >= 192:
        struct.pack_into("<I", data, 14, zlib.crc32(data[128:160]))
        struct.pack_into("<Q", data, 18, fnv(bytes(data[160:192])))
    return bytes(data)


def test_one_input(data: bytes) -> None:
    """What the fuzzer calls."""
    kind = data[:1]
    if kind < b"\x50":
        file = repaired(data[1:])
    elif kind < b"\xa0":
        file = chosen(atheris.FuzzedDataProvider(data[1:]))
    else:
        file = data[1:]
    try:
        read_all(read_catalog(MemorySource(file, "fuzz")))
    except IngotError as error:
        checked(error)


def instrument() -> None:
    """Let the fuzzer see which branches run.

    ``atheris.instrument_imports`` sees nothing through the import hook of an editable install, so functions are taken
    one by one.
    """
    for function in [item for item in gc.get_objects() if isinstance(item, FunctionType)]:
        if (function.__module__ or "").startswith("ingot.") and ".testing." not in function.__module__:
            atheris.instrument_func(function)


def seeds(folder: Path) -> None:
    """Write every golden file as it is."""
    for index, path in enumerate(sorted(CORPUS.rglob("*.squizd"))):
        (folder / f"{index}-file").write_bytes(b"\xff" + path.read_bytes())
        (folder / f"{index}-repaired").write_bytes(b"\x00" + path.read_bytes())
    for index in range(64):
        (folder / f"{index}-choices").write_bytes(b"\x50" + bytes((index * 37 + 11 * i) % 256 for i in range(40)))


def main() -> None:
    instrument()
    with tempfile.TemporaryDirectory() as name:
        seeds(Path(name))
        replayed = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
        atheris.Setup([*sys.argv, *([] if replayed else [name]), "-max_len=32768"], test_one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
