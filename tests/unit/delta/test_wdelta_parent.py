"""Parent hashes of .wdelta: orders, element types, and stored forms that do not matter."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.delta.parent import WIDE, matching_order, parent_hash, parent_orders
from ingot.errors import IntegrityError
from ingot.formats.safetensors.format import SafetensorsFormat
from ingot.model.tensor import Tensor

NAMES = ["b", "a.10", "a.2", "z"]
Arrays = dict[str, np.ndarray[Any, Any]]


def arrays(dtype: str = "bf16") -> Arrays:
    rng = np.random.default_rng(0)
    shapes = {"b": (3, 5), "a.10": (4,), "a.2": (2, 600), "z": (0, 3)}
    return {name: rng.normal(0, 1, shape).astype(numpy_dtype(dtype)) for name, shape in shapes.items()}


def expected(values: Arrays, order: list[str] | tuple[str, ...], wide: bool = False) -> str:
    running = hashlib.sha256()
    for name in order:
        running.update(name.encode())
        running.update((values[name].astype(np.float32) if wide else values[name]).tobytes())
    return running.hexdigest()


def parent_hashes(base: Mapping[str, Tensor], names: list[str]) -> dict[str, str]:
    """Every hash by which a ``.wdelta`` of these tensors may know its base, by order."""
    orders = parent_orders(base, names)
    return {key: parent_hash(base, order, wide=key.endswith(WIDE)) for key, order in orders.items()}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    ingot.save(tmp_path / "base.safetensors", arrays())
    return tmp_path / "base.safetensors"


@pytest.mark.parametrize("io", ["mmap", "pread"])
def test_every_order(path: Path, io: str) -> None:
    with ingot.open(path, io=io) as base:
        found = parent_hashes(base, NAMES)
    values = arrays()
    assert found == {
        "sorted": expected(values, sorted(NAMES)),
        "records": expected(values, NAMES),
        "sorted-f32": expected(values, sorted(NAMES), wide=True),
        "records-f32": expected(values, NAMES, wide=True),
    }


def test_a_delta_of_some_tensors_may_know_the_whole_base(path: Path) -> None:
    values, names = arrays(), ["z", "b"]
    with ingot.open(path) as base:
        orders = {key: order for key, order in parent_orders(base, names).items() if key.startswith("whole")}
        assert orders == {"whole-sorted": tuple(sorted(NAMES)), "whole-sorted-f32": tuple(sorted(NAMES))}
        assert matching_order(base, names, expected(values, sorted(NAMES))) == "whole-sorted"
        assert matching_order(base, names, expected(values, sorted(NAMES), wide=True)) == "whole-sorted-f32"
        assert matching_order(base, names, expected(values, NAMES)) is None


def test_equal_orders_come_once(path: Path) -> None:
    with ingot.open(path) as base:
        assert list(parent_orders(base, sorted(NAMES))) == ["sorted", "sorted-f32"]
        assert parent_orders(base, ["z", "b"])["records"] == ("z", "b")


def test_the_base_may_be_stored_in_any_way(path: Path, tmp_path: Path) -> None:
    wanted = expected(arrays(), sorted(NAMES))
    ingot.convert(path, tmp_path / "base.zt", recipe="lossless")
    with ingot.open(tmp_path / "base.zt") as base:
        assert matching_order(base, sorted(NAMES), wanted) == "sorted"
        assert matching_order(base, NAMES, expected(arrays(), NAMES, wide=True)) == "records-f32"
        assert matching_order(base, sorted(NAMES), "0" * 64) is None


def test_large_tensors_are_hashed_in_pieces(tmp_path: Path) -> None:
    values = {"x": np.random.default_rng(1).normal(0, 1, (1500, 1500)).astype(np.float32)}
    ingot.save(tmp_path / "x.safetensors", values)
    with ingot.open(tmp_path / "x.safetensors") as base:
        assert parent_hash(base, ["x"]) == expected(values, ["x"])
        assert parent_hash(base, ["x"], wide=True) == expected(values, ["x"])


def test_shards_count_by_their_first_name(tmp_path: Path) -> None:
    values = arrays("f32")
    files = {"1": ["b", "a.2"], "2": ["a.10", "z"]}
    for file, names in files.items():
        ingot.save(tmp_path / f"{file}.safetensors", {name: values[name] for name in names})
    weight_map = {name: f"{file}.safetensors" for file, names in files.items() for name in names}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(repr({"weight_map": weight_map}).replace("'", '"'))
    assert SafetensorsFormat().claims(index.name, b"{")
    with ingot.open(index) as base:
        assert parent_orders(base, sorted(NAMES)) == {
            "sorted": ("a.10", "a.2", "b", "z"),
            "shards": ("a.10", "z", "a.2", "b"),
        }


def test_a_base_without_a_tensor_is_another_base(path: Path) -> None:
    with ingot.open(path) as base, pytest.raises(IntegrityError) as caught:
        parent_hashes(base, [*NAMES, "more"])
    assert caught.value.rule == "delta.base"
