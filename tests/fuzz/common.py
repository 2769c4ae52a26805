"""Parts that several fuzz targets share: changes to JSON-like values, instrumentation, the main loop."""

from __future__ import annotations

import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from pathlib import Path
from types import FunctionType
from typing import Any

import atheris

NUMBERS = [0, 1, 2, 3, 4, 7, 8, 16, 31, 32, 63, 64, 255, 256, 4096, 2**16, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64]
VALUES: list[Any] = [
    *NUMBERS,
    -1,
    -(2**63),
    10**400,
    True,
    False,
    None,
    "",
    [],
    {},
    [0],
    [[]],
    {"": 0},
    0.5,
    1e308,
    -0.0,
]
VALUES += ["a", "a/b", "..", "../x", "/x", "\0", "\ud800", "\udcff", "\x9b", "\u202e", "x" * 300, "0" * 64, "e" * 64]


def change_value(data: atheris.FuzzedDataProvider, node: Any, values: Sequence[Any] = VALUES) -> None:
    """Replace, add or take away something somewhere in a tree of dictionaries and lists."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = data.PickValueInList(keys)
        inner = node[key]
        if isinstance(inner, dict | list) and inner and data.ConsumeIntInRange(0, 7):
            node = inner
            continue
        how = data.ConsumeIntInRange(0, 9)
        if how == 0:
            del node[key]
        elif how == 1:
            node[key] = data.ConsumeUnicode(12)
        elif how == 2 and isinstance(node, dict):
            node[data.ConsumeUnicode(12)] = deepcopy(inner)
        elif how == 3 and isinstance(node, list):
            node.append(deepcopy(inner))
        elif how == 4:
            other = data.PickValueInList(keys)
            node[key], node[other] = node[other], node[key]
        else:
            node[key] = deepcopy(data.PickValueInList(values))
        return


def changed(data: atheris.FuzzedDataProvider, root: Any, values: Sequence[Any] = VALUES, most: int = 4) -> Any:
    """Return a copy of a tree in which a few things are others."""
    copied = deepcopy(root)
    for _ in range(data.ConsumeIntInRange(1, most)):
        change_value(data, copied, values)
    return copied


def as_json(value: Any) -> bytes:
    """Return JSON as a stranger may write it: with any text, and numbers that are none."""
    return json.dumps(value).encode()


def instrument() -> None:
    """Let the fuzzer see which branches run.

    ``atheris.instrument_imports`` sees nothing through the import hook of an editable install, so functions are taken
    one by one.
    """
    for function in [item for item in gc.get_objects() if isinstance(item, FunctionType)]:
        if (function.__module__ or "").startswith("ingot.") and ".testing." not in function.__module__:
            atheris.instrument_func(function)


def fuzz(one_input: Callable[[bytes], None], seeds: Iterable[bytes], longest: int = 16384) -> None:
    """Run the fuzzer with the options of the command line, or replay the inputs that it names."""
    instrument()
    with tempfile.TemporaryDirectory() as name:
        for index, seed in enumerate(seeds):
            (Path(name) / f"{index}").write_bytes(seed)
        for index in range(128):
            (Path(name) / f"{index}-choices").write_bytes(bytes((index * 37 + 11 * i) % 256 for i in range(64)))
        replayed = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
        atheris.Setup([*sys.argv, *([] if replayed else [name]), f"-max_len={longest}"], one_input)
        atheris.Fuzz()
