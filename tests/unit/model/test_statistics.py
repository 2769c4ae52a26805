"""Statistics of matrices: what a file must hold, names, sharing, other models, importance matrices of llama.cpp."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.artifacts.identity import content_id
from ingot.errors import FormatError, IngotError, UsageError
from ingot.model.statistics import VERSION, VERSION_KEY, Statistics
from ingot.translate.imatrix import write_imatrix

COLS, ROWS = 4, 3
META = {VERSION_KEY: VERSION}
WEIGHT = "model.layers.0.mlp.up_proj.weight"


def arrays(name: str = "a.weight", **changed: np.ndarray | None) -> dict[str, np.ndarray]:
    """Return all fields of one matrix, but those that are changed, or None."""
    fields = {
        "inputs": np.eye(COLS, dtype=np.float32),
        "outputs": np.eye(ROWS, dtype=np.float32),
        "in_sum2": np.arange(COLS, dtype=np.float32),
        "absmax": np.ones(COLS, np.float32),
        "count": np.array([7]),
    } | changed
    return {f"{name}:{field}": value for field, value in fields.items() if value is not None}


def test_a_file_is_read_matrix_by_matrix(tmp_path: Path) -> None:
    path = tmp_path / "stats.safetensors"
    shared = arrays("b.weight", inputs=None, outputs=None)
    ingot.save(path, arrays() | shared, {**META, "b.weight:same": "a.weight", "model": "blake3:0"})
    with Statistics.open(path) as found:
        assert list(found.names) == ["a.weight", "b.weight"]
        assert found.model_id == "blake3:0"
        first, second = found.for_matrix("a.weight"), found.for_matrix("b.weight")
        assert first is not None
        assert second is not None
        np.testing.assert_array_equal(first.diagonal, np.arange(COLS))
        np.testing.assert_array_equal(first.inputs, second.inputs)
        assert (first.count, first.rows, second.rows, second.outputs) == (7, ROWS, None, None)
        first.require_shape(ROWS, COLS)
        second.require_shape(99, COLS)
        with pytest.raises(FormatError) as refused:
            first.require_shape(ROWS + 1, COLS)
        assert refused.value.rule == "statistics.shape"
        assert found.for_matrix("c.weight") is None


@pytest.mark.parametrize(
    ("entries", "metadata", "rule"),
    [
        (arrays(), {VERSION_KEY: "9"}, "statistics.version"),
        (arrays(), {}, "statistics.version"),
        ({"a.weight": np.ones(3)}, META, "statistics.entries"),
        (arrays(in_sum2=None), META, "statistics.entries"),
        (arrays(count=None), META, "statistics.entries"),
        (arrays(), {**META, "a.weight:same": "b.weight"}, "statistics.entries"),
        (arrays(inputs=np.ones((COLS, COLS + 1))), META, "statistics.shape"),
        (arrays(outputs=np.ones(ROWS)), META, "statistics.shape"),
        (arrays(in_sum2=np.float32(1)), META, "statistics.shape"),
        (arrays(in_sum2=np.ones((2, 2)), absmax=None, inputs=None), META, "statistics.shape"),
        (arrays(count=np.array([-1])), META, "statistics.value"),
        (arrays(count=np.array([1.5])), META, "statistics.value"),
    ],
)
def test_what_does_not_fit_is_refused(
    entries: dict[str, np.ndarray], metadata: dict[str, str], rule: str, tmp_path: Path
) -> None:
    path = tmp_path / "stats.safetensors"
    ingot.save(path, entries, metadata)
    with pytest.raises(FormatError) as refused:
        Statistics.open(path)
    assert refused.value.rule == rule


@pytest.mark.parametrize("field", ["inputs", "outputs", "diagonal", "absmax"])
def test_values_that_are_no_numbers_are_refused_when_they_are_read(field: str) -> None:
    key = "in_sum2" if field == "diagonal" else field
    broken = arrays()[f"a.weight:{key}"].copy()
    broken.flat[1] = np.nan
    matrix = Statistics.in_memory(arrays(**{key: broken})).for_matrix("a.weight")
    with pytest.raises(FormatError) as refused:
        getattr(matrix, field)
    assert refused.value.rule == "statistics.value"


def test_another_models_are_refused_by_its_content(tmp_path: Path) -> None:
    path = tmp_path / "stats.safetensors"
    own = {"a.weight": np.ones((ROWS, COLS), np.float32)}
    for name, weights in (("own", own), ("other", {"a.weight": own["a.weight"] * 2})):
        ingot.save(tmp_path / name, weights)
    with ingot.open(tmp_path / "own") as model, ingot.open(tmp_path / "other") as other:
        ingot.save(path, arrays(), {**META, "model": content_id(model)})
        Statistics.open(path, model).close()
        with pytest.raises(UsageError) as refused:
            Statistics.open(path, other)
        assert refused.value.rule == "statistics.model"
        ingot.save(path, arrays("b.weight"), META)
        with pytest.raises(UsageError) as refused:
            Statistics.open(path, model)
        assert refused.value.rule == "statistics.model"
        ingot.save(path, arrays(outputs=np.ones((ROWS + 1, ROWS + 1), np.float32)), META)
        with pytest.raises(FormatError) as mismatched:
            Statistics.open(path, model)
        assert mismatched.value.rule == "statistics.shape"


def binary(name: bytes, calls: int, values: np.ndarray) -> bytes:
    """Return an importance matrix of the older kind, as llama.cpp wrote it."""
    entry = struct.pack("<i", len(name)) + name + struct.pack("<ii", calls, len(values)) + values.tobytes()
    return struct.pack("<i", 1) + entry + struct.pack("<ii", 3, 4) + b"text"


def test_binary_importance_matrices_are_read(tmp_path: Path) -> None:
    path = tmp_path / "imatrix.dat"
    values = np.array([2, 4, 6, 8], np.float32)
    path.write_bytes(binary(b"blk.0.ffn_up.weight", 2, values))
    matrix = Statistics.open(path).for_matrix("blk.0.ffn_up.weight")
    assert matrix is not None
    np.testing.assert_array_equal(matrix.diagonal, values / 2)
    assert matrix.inputs is None
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(IngotError) as refused:
        Statistics.open(path)
    assert refused.value.rule == "statistics.imatrix"


def test_gguf_importance_matrices_go_both_ways(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    folder = tmp_path / "model"
    expert = "model.layers.0.mlp.experts.{}.up_proj.weight"
    names = [WEIGHT, *map(expert.format, range(3)), "model.layers.0.mlp.gate.weight"]
    ingot.save(folder, {name: np.ones((ROWS, COLS), np.float32) for name in names}, format="safetensors")
    (folder / "config.json").write_text('{"model_type": "qwen3_moe"}', encoding="utf-8")
    known: dict[str, np.ndarray] = {}
    for number, name in enumerate((*names[:2], names[3], "stray.weight")):
        known |= arrays(name, in_sum2=np.full(COLS, number + 1, np.float32), inputs=None, outputs=None)
    written = Statistics.in_memory(known)
    path = tmp_path / "imatrix.gguf"
    with ingot.open(folder) as model:
        assert write_imatrix(path, written, model) == [WEIGHT, "stray.weight"]
        there = Statistics.open(path)
        assert list(there.names) == [f"blk.0.ffn_up_exps.weight:expert.{number}" for number in range(3)]
        here = Statistics.open(path, model)
    assert set(here.names) == {expert.format(number) for number in range(3)}
    for name, value, count in ((expert.format(0), 2, 7), (expert.format(1), 0, 0), (expert.format(2), 3, 7)):
        matrix = here.for_matrix(name)
        assert matrix is not None
        assert matrix.count == count
        np.testing.assert_array_equal(matrix.diagonal, np.full(COLS, value))


@pytest.mark.parametrize(
    ("sums", "counts"),
    [
        (np.ones((1, 64)), [np.inf]),
        (np.ones((1, 64)), [np.nan]),
        (np.ones((1, 64)), [-1]),
        (np.ones((1, 64)), [1e30]),  # more than any integer holds
        (np.ones((2, 64)), [1]),
        (np.ones((3, 0)), [1, 1, 1]),
        (np.ones(0), [1]),
    ],
)
def test_importance_matrices_with_numbers_that_are_none_are_refused(
    tmp_path: Path, sums: np.ndarray, counts: list[float]
) -> None:
    arrays = {"w.in_sum2": sums.astype(np.float32), "w.counts": np.array(counts, np.float32)}
    ingot.save(tmp_path / "i.gguf", arrays, {"general.type": "imatrix"})
    with pytest.raises(IngotError) as caught:
        Statistics.open(tmp_path / "i.gguf")
    assert caught.value.rule in ("statistics.imatrix", "gguf.tensors")
