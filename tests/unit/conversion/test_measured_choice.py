"""Rules with candidates: what is picked, on what evidence, and that nothing else depends on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.codecs.table import CODECS
from ingot.conversion import candidates as measure_choice
from ingot.conversion.candidates import SAMPLE, sample_of
from ingot.conversion.run import prepare
from ingot.errors import UsageError
from ingot.model.layouts.affine import Row
from ingot.model.part import memory_part
from ingot.model.tensor import Tensor
from ingot.recipes.load import parse_recipe
from ingot.recipes.recipe import Recipe
from ingot.testing.codecs import Unreadable, encode_tensor

INT2 = "{ codec = 'affine', options = { bits = 2, group = 32, symmetric = false } }"
INT4 = "{ codec = 'affine', options = { bits = 4, group = 32, quantizer = 'mse' } }"
ZSTD, DENSE = "{ codec = 'dense', encoding = 'zstd' }", "{ codec = 'dense' }"


def recipe(pick: str, *candidates: str, label: str = "r", snr: float | None = None) -> Recipe:
    least = "" if snr is None else f"min_snr_db = {snr}\n"
    text = f"[[rules]]\nlabel = '{label}'\npick = '{pick}'\n{least}candidates = [{', '.join(candidates)}]"
    return parse_recipe(text, location="test")


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> Any:
    return (np.random.default_rng(seed).standard_normal(shape) * 0.05).astype(dtype)


def plan(path: Path, rules: Recipe, suffix: str = "zt") -> dict[str, Any]:
    with prepare(path, path.parent / f"out.{suffix}", rules, None) as prepared:
        return {step.tensor.name: step for step in prepared.plan.steps}


def test_smallest_takes_the_fewest_bytes_for_each_tensor(tmp_path: Path) -> None:
    weights = {
        "flat": np.zeros((64, 64), np.float32),
        "noise": np.frombuffer(np.random.default_rng(0).bytes(4096), "u1"),
    }
    path = tmp_path / "in.safetensors"
    ingot.save(path, weights)
    steps = plan(path, recipe("smallest", ZSTD, DENSE))
    assert [part.encoding for part in steps["flat"].spec.parts] == ["zstd"]
    assert [part.encoding for part in steps["noise"].spec.parts] == ["raw"]
    assert steps["noise"].action == "moved"
    assert all(step.exact for step in steps.values())
    report = ingot.convert(path, tmp_path / "out.zt", recipe("smallest", ZSTD, DENSE))
    assert {item.name: item.rule for item in report.tensors} == {name: step.rule for name, step in steps.items()}
    assert ingot.compare(path, tmp_path / "out.zt").same


def test_smallest_keeps_what_is_smaller_as_it_is_stored(tmp_path: Path) -> None:
    ingot.save(tmp_path / "in.safetensors", {"model.layers.0.mlp.up_proj.weight": normal(64, 64)})
    ingot.convert(tmp_path / "in.safetensors", tmp_path / "int4.zt", "int4")
    (step,) = plan(tmp_path / "int4.zt", recipe("smallest", ZSTD, DENSE)).values()
    assert (step.action, step.spec.codec) == ("moved", "affine")
    assert measure_choice.STORED in step.rule


def test_accurate_takes_the_first_that_reaches_else_the_last(tmp_path: Path) -> None:
    easy = np.arange(1024, dtype=np.float32).reshape(32, 32) % 4  # on a grid of four levels
    path = tmp_path / "in.safetensors"
    ingot.save(path, {"easy": easy, "hard": normal(32, 256)})

    def bits(snr: float, *candidates: str) -> dict[str, Any]:
        steps = plan(path, recipe("accurate", *candidates, snr=snr))
        return {name: step.spec.params.get("bits") for name, step in steps.items()}

    assert bits(15, INT2, INT4) == {"easy": 2, "hard": 4}
    assert bits(-100, INT2, INT4) == {"easy": 2, "hard": 2}
    assert bits(1000, INT2, INT4)["hard"] == 4
    assert bits(15, INT2, DENSE)["hard"] is None


def test_the_figure_in_the_label_is_the_error_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    ingot.save(path, {"w": normal(64, 256)})
    report = ingot.convert(path, tmp_path / "out.zt", recipe("accurate", INT2, INT4, snr=0))
    (item,) = report.tensors
    assert item.error is not None
    assert f"{item.error['snr_db']:.2f} dB >= 0" in item.rule


def test_a_candidate_whose_codec_refuses_the_values_is_left_out(tmp_path: Path) -> None:
    values = normal(64, 64)
    values[3, 3] = np.nan
    path = tmp_path / "in.safetensors"
    ingot.save(path, {"w": values})
    (step,) = plan(path, recipe("accurate", INT2, DENSE, snr=5)).values()
    assert step.spec.codec == "dense"
    assert "affine.non-finite" in step.rule
    (step,) = plan(path, recipe("accurate", INT2, INT4, snr=5)).values()
    assert step.action == "moved"


def test_what_the_target_or_the_tensor_does_not_allow_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "in.safetensors"
    ingot.save(path, {"m": np.zeros((64, 64), np.float32), "cube": np.zeros((4, 64, 64), np.int32)})
    steps = plan(path, recipe("smallest", ZSTD, INT4, DENSE), "safetensors")
    assert {step.spec.codec for step in steps.values()} == {"dense"}
    steps = plan(path, recipe("smallest", "{ codec = 'sparse_csr' }", ZSTD))
    assert {name: step.spec.codec for name, step in steps.items()} == {"m": "dense", "cube": "dense"}
    steps = plan(path, recipe("smallest", "{ codec = 'sparse_csr' }", DENSE))
    assert {name: step.spec.codec for name, step in steps.items()} == {"m": "sparse_csr", "cube": "dense"}


def test_quantizing_again_still_needs_leave(tmp_path: Path) -> None:
    ingot.save(tmp_path / "in.safetensors", {"model.layers.0.mlp.up_proj.weight": normal(64, 64)})
    ingot.convert(tmp_path / "in.safetensors", tmp_path / "int4.zt", "int4")
    with pytest.raises(UsageError) as caught:
        plan(tmp_path / "int4.zt", recipe("accurate", INT2, INT4, snr=9))
    assert caught.value.rule == "convert.requantize"


def test_other_rules_read_no_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ingot.save(tmp_path / "in.safetensors", {"w": normal(64, 64)})

    def forbidden(_: Tensor) -> None:
        raise AssertionError("a sample was taken")

    monkeypatch.setattr(measure_choice, "sample_of", forbidden)
    assert plan(tmp_path / "in.safetensors", recipe("smallest", DENSE))
    for name in ("keep", "int4", "bf16"):
        with prepare(tmp_path / "in.safetensors", tmp_path / "x.zt", name, None):
            pass


class Counting(Unreadable):
    """A source that counts what is read of it."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.read = 0

    def readinto(self, offset: int, out: memoryview) -> None:
        assert offset + out.nbytes <= self.size
        self.read += out.nbytes
        out[:] = bytes(out.nbytes)


@pytest.mark.parametrize(
    "shape", [(1 << 16, 1024), (3, 1 << 24), (1 << 26,), (64, 1024, 1024), ((1 << 20) + 1, 64), (1000, 70_001)]
)
def test_a_sample_of_a_large_dense_tensor_reads_no_more_than_itself(shape: tuple[int, ...]) -> None:
    source = Counting(2 * int(np.prod(shape)))
    part = memory_part(np.zeros(0, np.uint16), "bf16")
    part.source, part.length = source, source.size
    sample = sample_of(Tensor("t", shape, "bf16", "dense", {"data": part}))
    assert sample.dtype == ml_dtypes.bfloat16
    assert SAMPLE // 2 < sample.size <= SAMPLE
    assert source.read == 2 * sample.size


@pytest.mark.parametrize("shape", [(5000, 300), (2, 1_500_000), (1_500_000,), (3, 700, 700), (7, 9), (0, 5), ()])
def test_samples_hold_rows_of_the_tensor_however_it_is_stored(shape: tuple[int, ...]) -> None:
    values = np.arange(int(np.prod(shape)), dtype=np.float32).reshape(shape)
    dense = encode_tensor(CODECS["dense"], values, dtype="f32")
    sample = sample_of(dense)
    assert np.unique(sample).size == sample.size  # every element of the source comes at most once
    assert (np.diff(sample, axis=1) == 1).all()
    if values.size <= SAMPLE:
        assert sample.size == values.size
    else:
        assert sample.max() > 0.9 * values.size
    stored = [encode_tensor(CODECS["sparse_coo"], values, dtype="f32")] if len(shape) else []
    if len(shape) == 2:
        stored.append(encode_tensor(CODECS["sparse_csr"], values, dtype="f32"))
    for tensor in stored:
        again = sample_of(tensor)
        if again.shape == sample.shape:
            np.testing.assert_array_equal(again, sample)


def test_what_is_picked_does_not_depend_on_threads(model: Path, tmp_path: Path) -> None:
    rules = recipe("accurate", INT2, INT4, DENSE, snr=9)
    for threads in (1, 3):
        ingot.convert(model, tmp_path / f"{threads}.zt", rules, threads=threads)
    assert (tmp_path / "1.zt").read_bytes() == (tmp_path / "3.zt").read_bytes()


def test_a_hybrid_file_holds_two_bits_where_they_are_accurate_enough(model: Path, tmp_path: Path) -> None:
    """A matrix with outliers keeps 4 bits between layers of 2; both containers take the same bits.

    In .squizd groups divide rows: 80 columns of 160, where .zt has groups of 128.
    """
    with ingot.open(model) as checkpoint:
        changed = {name: tensor.numpy().copy() for name, tensor in checkpoint.items()}
    heavy = "model.layers.1.mlp.down_proj.weight"
    changed[heavy] = (changed[heavy].astype(np.float32) ** 3).astype(changed[heavy].dtype)
    ingot.save(model / "model.safetensors", changed, {"format": "pt"})
    reports = [ingot.convert(model, tmp_path / f"out.{suffix}", "int2-hybrid") for suffix in ("zt", "squizd")]
    rules = [{item.name: item.rule for item in report.tensors} for report in reports]
    uneven = " (groups of 80: 128 does not divide 160 columns)"
    assert uneven in rules[1][heavy]
    for name, rule in rules[0].items():
        assert rule.partition(" (")[0] == rules[1][name].partition(" (")[0]
    assert all("dB < 8.7: affine int4" in rule[heavy] for rule in rules)
    with ingot.open(tmp_path / "out.squizd") as checkpoint:
        stored = {name: tensor.params.get("bits") for name, tensor in checkpoint.items()}
    assert stored[heavy] == 4
    assert stored["model.layers.0.mlp.up_proj.weight"] == stored["model.layers.2.mlp.up_proj.weight"] == 4
    assert stored["model.layers.1.mlp.up_proj.weight"] == 2
    with ingot.open(tmp_path / "out.zt") as first, ingot.open(tmp_path / "out.squizd") as second:
        for name, tensor in first.items():
            assert tensor.params.get("bits") == second[name].params.get("bits")
            assert np.array_equal(tensor.numpy(), second[name].numpy()) == ("down_proj" not in name)


def test_int8_fine_takes_groups_where_columns_stand_out(tmp_path: Path) -> None:
    even = normal(256, 512)
    uneven = even.copy()
    uneven[:, 100] *= 10
    names = {"model.layers.0.mlp.up_proj.weight": even, "model.layers.0.mlp.down_proj.weight": uneven}
    ingot.save(tmp_path / "source.safetensors", names)
    cosines, rows = {}, {}
    for preset in ("int8", "int8-fine"):
        ingot.convert(tmp_path / "source.safetensors", tmp_path / f"{preset}.zt", preset)
        compared = ingot.compare(tmp_path / "source.safetensors", tmp_path / f"{preset}.zt").tensors
        cosines[preset] = [item.stats.cosine >= 0.9999 for item in compared if item.stats]
        with ingot.open(tmp_path / f"{preset}.zt") as checkpoint:
            rows[preset] = [checkpoint[item.name].layout.grid == Row() for item in compared]
    assert cosines["int8"] == rows["int8-fine"] != [True, True]
    assert rows["int8"] == cosines["int8-fine"] == [True, True]
