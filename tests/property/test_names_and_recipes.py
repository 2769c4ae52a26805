"""Whatever a tensor is called, it has a role, a place in the natural order, and a decision."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from ingot.naming.names import ROLES, layer_of, role_of
from ingot.recipes.load import PRESETS, load_recipe
from ingot.recipes.recipe import WEIGHT_DTYPES, resolve
from tests.support.strategies import dtypes, names, shapes

RECIPES = {preset: load_recipe(preset) for preset in PRESETS}


@given(names())
def test_every_name_has_a_role_and_maybe_a_layer(name: str) -> None:
    assert role_of(name) in ROLES
    layer = layer_of(name)
    assert layer is None or layer in [int(digits) for digits in re.findall("[0-9]{1,6}", name)]


@given(names(), st.integers(0, 999_999))
def test_a_layer_in_front_is_the_layer(name: str, layer: int) -> None:
    assert layer_of(f"model.layers.{layer}.{name}") == layer


@given(names(), shapes(), dtypes(), st.integers(0, 40))
def test_every_tensor_gets_a_decision(name: str, shape: tuple[int, ...], dtype: str, layer_count: int) -> None:
    for preset, recipe in RECIPES.items():
        decision = resolve(recipe, name, shape, dtype, layer_count)
        if decision.choice is not None and decision.choice.changes_values:
            assert dtype in WEIGHT_DTYPES, preset
