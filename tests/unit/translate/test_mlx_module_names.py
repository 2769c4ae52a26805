"""Names of mlx_lm's modules by model type."""

from __future__ import annotations

import pytest

from ingot.translate.mlx_families import MODULES, REMAPPED, module_of


@pytest.mark.parametrize(
    ("model_type", "module"),
    [("llama", "llama"), ("mistral", "llama"), ("qwen2_5_vl", "qwen2_vl"), ("bert", None), ("", None)],
)
def test_a_model_type_has_the_module_that_mlx_lm_lists(model_type: str, module: str | None) -> None:
    assert module_of(model_type) == module


def test_every_remapped_type_has_a_module() -> None:
    assert {module_of(model_type) for model_type in REMAPPED} <= MODULES
