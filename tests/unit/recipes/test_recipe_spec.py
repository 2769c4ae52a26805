"""The spec pages of recipes and of the dense and sparse codecs say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ingot.naming.names import ROLES
from ingot.recipes import choice, load
from ingot.recipes.choice import Measured
from ingot.recipes.load import PRESETS, parse_recipe

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "spec" / "recipes.md").read_text(encoding="utf-8")


def rules_in_code(prefix: str, *files: str) -> set[str]:
    text = "".join((ROOT / "src" / "ingot" / file).read_text(encoding="utf-8") for file in files)
    return set(re.findall(rf'"({prefix}\.[a-z-]+)"', text))


def rules_in_page(prefix: str, page: str) -> set[str]:
    text = (ROOT / "spec" / page).read_text(encoding="utf-8")
    return set(re.findall(rf"`({prefix}\.[a-z-]+)`", text))


def test_the_example_parses() -> None:
    example = re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert example is not None
    found = parse_recipe(example[1], location="spec/recipes.md")
    assert [rule.label for rule in found.rules] == [
        "untouched",
        "rule 1",
        "large matrices",
        "the rest, smaller without loss",
    ]


def test_the_example_of_candidates_parses() -> None:
    example = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1]
    (rule,) = parse_recipe(example, location="spec/recipes.md").rules
    assert isinstance(rule.choice, Measured)
    assert len(rule.choice.candidates) == 2


def test_every_key_role_and_preset_is_described() -> None:
    for key in (*load._ROOT_KEYS, *load._CHOICE_KEYS, *load._CONDITIONS):
        assert f"`{key}`" in PAGE or f"`{key} = true`" in PAGE, key
    assert f"`{' '.join(ROLES)}`" in PAGE
    for preset in PRESETS:
        assert f"| `{preset}` |" in PAGE
    assert all(f"`{dtype}`" in PAGE for dtype in choice.WEIGHT_DTYPES)


@pytest.mark.parametrize(
    ("prefix", "page", "files"),
    [
        ("recipe", "recipes.md", ["recipes/recipe.py", "recipes/choice.py", "recipes/load.py"]),
        ("dense", "dense.md", ["codecs/dense/codec.py", "codecs/cast.py", "inspect/tensors.py"]),
    ],
)
def test_rules_are_listed_where_they_are_raised(prefix: str, page: str, files: list[str]) -> None:
    written = rules_in_page(prefix, page)
    assert rules_in_code(prefix, *files) <= written
    # `check_values` and `require_part` make their rules of the tensor's codec id
    assert written - rules_in_code(prefix, *files) <= {"dense.part-missing", "dense.dtype", "dense.size"}
