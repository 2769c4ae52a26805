"""Presets that profiles claim: each one can be made for the program."""

from __future__ import annotations

import pytest

from ingot.conversion.preset_fit import container_for, holds, presets_of
from ingot.formats.detect import FORMATS
from ingot.recipes.load import load_recipe
from ingot.runtimes.profile import Scheme
from ingot.runtimes.stored import StoredScheme, mismatch
from ingot.runtimes.table import runtime_named


@pytest.mark.parametrize("container", ["compressed-tensors", "gptq", "awq", "coreml"])
def test_offsets_do_not_become_zero_points(container: str) -> None:
    assert holds(FORMATS["mlx"], load_recipe("mlx-4bit"))
    assert holds(FORMATS["gguf"], load_recipe("mlx-4bit"))  # as Q4_1, which has offsets
    assert not holds(FORMATS[container], load_recipe("mlx-4bit"))
    assert not holds(FORMATS["gguf"], load_recipe("mlx-8bit"))  # no type of 8 bits has offsets


def test_a_second_scale_is_not_dropped() -> None:
    assert holds(FORMATS["modelopt"], load_recipe("nvfp4"))
    assert not holds(FORMATS["mlx"], load_recipe("nvfp4"))
    assert holds(FORMATS["mlx"], load_recipe("mlx-nvfp4"))


@pytest.mark.parametrize("runtime", ["vllm", "sglang", "transformers"])
def test_presets_that_pack_embeddings_are_not_claimed_for_programs_that_read_them_dense(runtime: str) -> None:
    profile = runtime_named(runtime)
    claimed = presets_of(profile)
    assert {"w4a16", "w8a8", "fp8-block"} <= set(claimed)
    for preset in ("q4_0", "q8_0", "Q8_0", "mlx-mxfp4"):
        assert preset not in claimed
        assert container_for(profile, load_recipe(preset)) is None


def test_blocks_must_divide_rows_and_columns_of_a_scheme_of_whole_groups() -> None:
    scheme = Scheme(name="blocks", containers=("fp8",), storage="floats", outcome="run", whole_groups=True)
    for rows, columns, whole in ((256, 384, True), (288, 256, False), (256, 288, False)):
        stored = StoredScheme("floats", "f8_e4m3fn", rows, columns, bits=8, group="128x128")
        assert (mismatch(scheme, stored, activations=False) == []) is whole
