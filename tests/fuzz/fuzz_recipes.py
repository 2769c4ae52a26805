"""Fuzzes recipes: any bytes are a recipe that decides on every tensor, or end in an IngotError.

    pip install --group fuzz
    python -m tests.fuzz.fuzz_recipes -max_total_time=600

The presets are the seeds. Findings are written to the current folder as crash-*; ``python -m tests.fuzz.fuzz_recipes
crash-...`` replays one. By its first byte an input is TOML as it is, or a series of choices that change tables of a
preset or of a recipe that uses every key. One in eight plans the conversion of a small checkpoint.
"""

from __future__ import annotations

import tomllib
from typing import Any

import atheris
import numpy as np
import tomli_w

import ingot
from ingot.conversion.options import ConvertOptions
from ingot.conversion.run import prepare
from ingot.errors import IngotError
from ingot.recipes.load import PRESETS, parse_recipe, preset_text
from ingot.recipes.recipe import resolve
from ingot.stores.memory import shared_files
from tests.fuzz.common import VALUES, changed, fuzz
from tests.support.reading import checked

NAMES = ["lm_head.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.31.self_attn.q_proj.bias", "", "\ud800"]
SHAPES: list[tuple[int, ...]] = [(64, 64), (64,), (), (2**31, 2**31)]
EVERY = tomllib.loads(
    """
    name = "n"
    description = "d"
    rotate = { r1 = true, r2 = true, seed = 3 }
    [[rules]]
    label = "l"
    match = ["*gate*", "re:.*\\\\.(up|down)_proj\\\\..*$", "re:(?!x)[a-z.]+"]
    exclude = "re:lm_head"
    roles = ["mlp", "attention"]
    layers = "0-3,-1"
    dtypes = ["f32", "bf16"]
    min_ndim = 2
    max_ndim = 2
    min_size = 10
    max_size = 100000
    min_cols = 2
    cols_multiple_of = 2
    codec = "affine"
    encoding = "raw"
    options = { bits = 4, group = 32, symmetric = true, scales = "f16" }
    [[rules]]
    pick = "accurate"
    min_snr_db = 10.0
    candidates = [{ codec = "palette", options = { bits = 4 } }, { codec = "dense", encoding = "zstd" }]
    [[rules]]
    match = "*"
    codec = "affine"
    quantizer = "gptq"
    options = { bits = 4, group = 32 }
    [[rules]]
    keep = true
    """
)
ROOTS: list[dict[str, Any]] = [EVERY, EVERY, EVERY, *(tomllib.loads(preset_text(name)) for name in PRESETS)]
CHOICES = [value for value in VALUES if value is not None and value != 10**400]
CHOICES += [
    "re:",
    "re:(",
    "re:(a*)*b",
    "re:(?i)A",
    "re:" + "(a?){40}" * 3,
    "[",
    "[!",
    "*" * 60 + "b",
    "0-",
    "-1",
    "9-1",
]
CHOICES += [
    "affine",
    "dense",
    "palette",
    "sparse_mask",
    "trellis",
    "zstd",
    "raw",
    "f16",
    "smallest",
    "nf4",
    "rtn",
    "awq",
]


def one_input(data: bytes) -> None:
    """Run one input of the fuzzer."""
    if data[:1] >= b"\xc0":
        text: bytes | str = data[1:]
    else:
        choices = atheris.FuzzedDataProvider(data[1:])
        try:
            text = tomli_w.dumps(changed(choices, choices.PickValueInList(ROOTS), CHOICES)).encode("utf-8", "replace")
        except (TypeError, ValueError):
            return
    try:
        recipe = parse_recipe(text, location="recipe")
        recipe.fingerprint()
        for name in NAMES:
            for shape in SHAPES:
                resolve(recipe, name, shape, "f32", 32)
        if sum(data) % 8:
            return
        shared_files("fuzz")["r.toml"] = bytearray(text if isinstance(text, bytes) else text.encode())
        options = ConvertOptions("memory:fuzz/m.safetensors", "memory:out/m.zt", "memory:fuzz/r.toml")
        with prepare(options) as prepared:
            repr(prepared.report())
    except IngotError as error:
        checked(error)


def save_checkpoint() -> None:
    """Put a checkpoint into memory."""
    values = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    tensors = {f"model.layers.{layer}.mlp.up_proj.weight": values for layer in range(2)}
    ingot.save("memory:fuzz/m.safetensors", {**tensors, "model.norm.weight": values[0], "ids": np.arange(9)})


if __name__ == "__main__":
    save_checkpoint()
    fuzz(one_input, [b"\xff" + preset_text(name).encode() for name in PRESETS])
