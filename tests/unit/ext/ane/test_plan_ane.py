"""``ingot.plan``, ``--suggest`` and kernel units over real files: a small model stored in every form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.conversion.coreml.layer import extract_layer
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.errors import UnsupportedError, UsageError
from ingot.ext.ane.kernel import inspect_kernel, load_kernel, pack_kernel
from ingot.ext.ane.kernel_units.header import is_unit
from ingot.ext.ane.suggest import UNCHANGED, Pick, recipe_text, suggest
from ingot.naming.names import pattern_of
from ingot.recipes.load import parse_recipe
from ingot.recipes.recipe import resolve

RECIPE = """
[[rules]]
match = "*p4*"
codec = "palette"
options = { bits = 4 }
[[rules]]
match = "*p4g*"
codec = "palette"
options = { bits = 4 }
[[rules]]
match = "*grouped*"
codec = "palette"
options = { bits = 4, group = 16 }
[[rules]]
match = "*i8*"
codec = "affine"
options = { bits = 8, group = "row", symmetric = true, scales = "f16" }
[[rules]]
match = "*i4*"
codec = "affine"
options = { bits = 4, group = 32, symmetric = true }
[[rules]]
match = "*sparse*"
codec = "sparse_mask"
options = { sparsity = 0.625 }
[[rules]]
match = "*entropy*"
codec = "float_entropy"
"""
KERNELS = ("p4", "grouped", "i8", "i4", "sparse", "entropy", "plain")
SHAPE = (64, 96)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(7)
    folder = tmp_path_factory.mktemp("plan")
    tensors: dict[str, Any] = {
        f"layers.{layer}.mlp.{name}.weight": rng.standard_normal(SHAPE).astype(np.float16)
        for layer in range(2)
        for name in KERNELS
    }
    tensors["embed_tokens.weight"] = rng.standard_normal((256, 96)).astype(np.float16)
    tensors["norm.weight"] = np.ones(96, np.float16)
    tensors["layers.0.mlp.plain.bias"] = rng.standard_normal(64).astype(np.float16)
    tensors["conv.weight"] = rng.standard_normal((32, 16, 3, 3)).astype(np.float16)
    tensors["steps"] = np.arange(5)
    ingot.save(folder / "model.safetensors", tensors)
    (folder / "recipe.toml").write_text(RECIPE)
    ingot.convert(folder / "model.safetensors", folder / "model.zt", str(folder / "recipe.toml"), allow_requantize=True)
    return folder / "model.zt"


def outcome(found: Any, name: str) -> str:
    return str(next(weight for weight in found.weights if f".0.mlp.{name}.weight" in weight.name).decision.outcome)


def test_the_plan_of_every_form(model: Path) -> None:
    plan = ingot.plan(model, "m1,m4,m5")
    assert [item.chip for item in plan.chips] == ["m1", "m4", "m5"]
    expected = {
        "p4": ("streams", "streams", "streams"),
        "grouped": ("refused", "streams", "streams"),
        "i8": ("folds", "streams", "folds"),
        "i4": ("folds", "folds", "folds"),
        "sparse": ("streams", "streams", "streams"),
        "entropy": ("folds", "folds", "folds"),
        "plain": ("dense", "dense", "dense"),
    }
    for name, outcomes in expected.items():
        assert tuple(outcome(plan[chip], name) for chip in ("m1", "m4", "m5")) == outcomes, name


def test_uses_bytes_and_totals(model: Path) -> None:
    found = ingot.plan(model)["m1"]
    use = {weight.name: weight.use for weight in found.weights}
    assert use["embed_tokens.weight"] == "gather"
    assert use["norm.weight"] == use["layers.0.mlp.plain.bias"] == "vector"
    assert use["steps"] == "other"
    assert use["conv.weight"] == "kernel"
    size = SHAPE[0] * SHAPE[1]
    moved = {weight.name.split(".")[3]: weight.moved for weight in found.kernels if weight.name.startswith("layers.0")}
    with ingot.open(model) as checkpoint:
        kept = checkpoint["layers.0.mlp.sparse.weight"].params["nnz"]
    assert kept == pytest.approx(0.375 * size, abs=2)
    assert moved == {
        "p4": size // 2 + 32, "grouped": 0, "i8": 2 * size, "i4": 2 * size, "sparse": size // 8 + 2 * kept,
        "entropy": 2 * size, "plain": 2 * size,
    }  # fmt: skip
    assert found.totals["moved"] == sum(weight.moved for weight in found.kernels)
    assert found.time is not None
    assert found.time.share == pytest.approx(found.totals["moved"] / 48e6)
    assert found.time.alone == found.time.share + 0.2


def test_stored_bytes_are_those_that_stream(model: Path) -> None:
    """The formulas of the forms against what the codecs wrote, for what holds halves throughout."""
    found = ingot.plan(model, "m4")["m4"]
    for weight in found.kernels:
        if weight.decision is not None and weight.decision.streams:
            assert weight.moved == weight.stored, weight.name


def test_convolutions_tell_of_winograd(model: Path) -> None:
    found = {weight.name: weight for weight in ingot.plan(model, "m5")["m5"].weights}
    assert found["conv.weight"].winograd == ""
    assert found["layers.0.mlp.p4.weight"].winograd is None


def test_assumptions_change_the_plan(model: Path) -> None:
    assert outcome(ingot.plan(model, "m5", assume=["int8=streams"])["m5"], "i8") == "streams"
    mixed = ingot.plan(model, "m4,m5", assume=["m5.int8=streams", "*p4*:stride=2"])
    assert outcome(mixed["m5"], "i8") == "streams"
    assert outcome(mixed["m4"], "p4") == "folds"
    assert outcome(mixed["m4"], "sparse") == "streams"
    unknown = ingot.plan(model, "m3")["m3"]
    assert unknown.time is None
    assert "bandwidth" in unknown.unknown
    assert ingot.plan(model, "m3", assume=["bandwidth=60"])["m3"].time is not None


@pytest.mark.parametrize(
    "text",
    ["", "=", "bandwidth", "bandwidth=", "=5", "m9.int8=streams", "stride=x", "mutable=1", "stride=0", "p:xyz=2"],
)
def test_wrong_assumptions_are_refused(model: Path, text: str) -> None:
    with pytest.raises(UsageError) as found:
        ingot.plan(model, "m1", assume=[text])
    assert found.value.rule == "ane.assume"


@pytest.mark.parametrize("chip", ["", "m1,", [], "z80"])
def test_wrong_chips_are_refused(model: Path, chip: Any) -> None:
    with pytest.raises(UsageError) as found:
        ingot.plan(model, chip)
    assert found.value.rule == "ane.chip"


def test_a_delta_is_no_checkpoint(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        ingot.save(tmp_path / f"{name}.safetensors", {"w": np.full((8, 8), value, np.float16)})
    ingot.diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors", tmp_path / "d.zt")
    with pytest.raises(UsageError) as found:
        ingot.plan(tmp_path / "d.zt")
    assert found.value.rule == "ane.delta"


def test_numbers_in_names_are_folded() -> None:
    assert pattern_of("model.layers.12.mlp.experts.3.w1.weight") == "model.layers.*.mlp.experts.*.w1.weight"


def test_a_suggestion_is_a_recipe_within_its_error(model: Path, tmp_path: Path) -> None:
    source, recipe = model.with_suffix(".safetensors"), tmp_path / "m4.toml"
    found = suggest(source, "m4", recipe, 0.05)
    assert found.worst <= 0.05
    assert found.moved < found.moved_before
    assert len(found.picks) == 2 * len(KERNELS) + 1
    out = tmp_path / "out.zt"
    ingot.convert(source, out, str(recipe))
    planned = ingot.plan(out, "m4")["m4"]
    assert planned.outcomes == {"streams": len(found.picks)}
    assert planned.totals["moved"] == found.moved
    with ingot.open(source) as before, ingot.open(out) as after:
        for name in before:
            a, b = before[name].numpy().astype(np.float64), after[name].numpy().astype(np.float64)
            assert np.sqrt(np.mean((a - b) ** 2)) <= 0.05 * np.sqrt(np.mean(a**2)) * 1.0001, name


def test_a_looser_bound_moves_fewer_bytes(model: Path, tmp_path: Path) -> None:
    source = model.with_suffix(".safetensors")
    moved = [suggest(source, "m1", tmp_path / "x.toml", error, overwrite=True).moved for error in (1e-6, 0.01, 0.2)]
    assert moved[0] > moved[1] > moved[2]


def test_zeros_that_are_there_make_a_sparse_form(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((128, 128)).astype(np.float16)
    values[:, ::8] = values[:, 1::2] = 0
    values[:, 2] = -0.0  # a bit is set: kept
    ingot.save(tmp_path / "z.safetensors", {"mlp.weight": values})
    found = suggest(tmp_path / "z.safetensors", "m1", tmp_path / "z.toml", 1e-9)
    assert [pick.candidate for pick in found.picks] == ["sparse, zeros as they are"]
    ingot.convert(tmp_path / "z.safetensors", tmp_path / "z.zt", str(tmp_path / "z.toml"))
    with ingot.open(tmp_path / "z.zt") as stored:
        np.testing.assert_array_equal(stored["mlp.weight"].numpy(), values)
    assert ingot.plan(tmp_path / "z.zt")["m1"].totals["moved"] == found.moved


def test_what_is_lossy_already_stays(model: Path, tmp_path: Path) -> None:
    found = suggest(model, "m1", tmp_path / "x.toml", 0.2)
    ways = {pick.name.split(".")[3]: pick.candidate for pick in found.picks if pick.name.startswith("layers.0")}
    assert ways["i8"] == ways["p4"] == UNCHANGED
    assert ways["plain"] != UNCHANGED


@pytest.mark.parametrize("error", [0.0, -1.0, 1.001, 25.0, float("nan"), float("inf")])
def test_errors_that_bound_nothing_are_refused(model: Path, tmp_path: Path, error: float) -> None:
    with pytest.raises(UsageError) as found:
        suggest(model, "m1", tmp_path / "x.toml", error)
    assert found.value.rule == "ane.suggest"


@pytest.mark.parametrize("name", ["a.b", 'q"uo\\te', "re:x", "a[0]*?", "é\n\x7f", "\U0001f600", "a.b2"])
def test_names_in_recipes_hit_themselves_alone(name: str) -> None:
    text = recipe_text("mine", [Pick(name, "palette4", 0.01, 2, 1)], ["m1"], 0.1)
    recipe = parse_recipe(text, location="suggested")
    hit = {other for other in (name, f"{name}x", f"x{name}", "a0", "a.b", "aXb") if _hits(recipe, other)}
    assert (hit, recipe.name) == ({name}, "mine")


def _hits(recipe: Any, name: str) -> bool:
    return resolve(recipe, name, (64, 64), "f16", 1).choice is not None


@pytest.mark.parametrize(("chip", "name"), [(c, n) for c in ("m1", "m4") for n in (*KERNELS, "conv")])
def test_units_hold_what_the_checkpoint_says(model: Path, tmp_path: Path, chip: str, name: str) -> None:
    tensor = "conv.weight" if name == "conv" else f"layers.0.mlp.{name}.weight"
    out = tmp_path / "w.anek"
    if (chip, name) == ("m1", "grouped"):
        with pytest.raises(UnsupportedError) as found:
            pack_kernel(model, tensor, out, chip)
        assert found.value.rule == "ane.refused"
        assert not out.exists()
        return
    report = pack_kernel(model, tensor, out, chip)
    unit = load_kernel(out)
    with ingot.open(model) as checkpoint:
        stored = checkpoint[tensor].numpy("f16")
    np.testing.assert_array_equal(unit.dense(), stored)
    assert is_unit(out.read_bytes())
    assert report.nbytes == out.stat().st_size
    folded = report.decision.outcome != "streams"
    assert (unit.header.kernel_format == 4) == (folded or name == "sparse")


def test_a_unit_with_bias_and_activation(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.anek"
    pack_kernel(model, "layers.0.mlp.plain.weight", out, bias="layers.0.mlp.plain.bias", activation="tanh")
    found = inspect_kernel(out)
    assert found.sections["lut"]["length"] == 86
    assert found.sections["bias"]["count"] == 64
    assert len(found.tiles) == 16
    assert sum(found.tiles) == found.nbytes - found.sections["weights"]["offset"]
    with ingot.open(model) as checkpoint:
        np.testing.assert_array_equal(load_kernel(out).weight.bias, checkpoint["layers.0.mlp.plain.bias"].numpy())


@pytest.mark.parametrize(
    ("tensor", "bias", "rule"),
    [
        ("nothing", None, "tensor.unknown"),
        ("norm.weight", None, "ane.layout"),
        ("conv.weight", "nothing", "tensor.unknown"),
        ("conv.weight", "norm.weight", "ane.layout"),
    ],
)
def test_wrong_tensors_are_refused(model: Path, tmp_path: Path, tensor: str, bias: str | None, rule: str) -> None:
    with pytest.raises(UsageError) as found:
        pack_kernel(model, tensor, tmp_path / "w.anek", bias=bias)
    assert found.value.rule == rule


def test_the_tables_knots_lie_where_asked(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.anek"
    pack_kernel(model, "conv.weight", out, activation="tanh", domain=(-3.0, 3.0), outside="line")
    lut = load_kernel(out).weight.lut
    assert lut is not None
    assert (lut.knot_inputs[0], lut.outside) == (pytest.approx(-3, abs=0.01), "line")


@pytest.mark.parametrize(
    ("out", "more", "rule"),
    [
        ("w.anek", {"domain": (-3.0, 3.0)}, "ane.function"),
        ("w.anek", {"outside": "line"}, "ane.function"),
        (None, {}, "ane.layout"),
        ("w.anek", {"biass": "x"}, "kernel.option"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(
    model: Path, tmp_path: Path, out: str | None, more: dict[str, Any], rule: str
) -> None:
    with pytest.raises(UsageError) as found:
        pack_kernel(model, "conv.weight", None if out is None else tmp_path / out, **more)
    assert found.value.rule == rule
    assert not (tmp_path / "w.anek").exists()


def test_values_past_float16_are_refused(tmp_path: Path) -> None:
    tensors = {"large": np.full((8, 8), 1e30, numpy_dtype("bf16")), "infinite": np.full((8, 8), np.inf, np.float16)}
    ingot.save(tmp_path / "m.safetensors", tensors)
    for name, rule in (("large", "dense.overflow"), ("infinite", "ane.layout")):
        with pytest.raises(ingot.IngotError) as found:
            pack_kernel(tmp_path / "m.safetensors", name, tmp_path / "w.anek")
        assert found.value.rule == rule


def test_a_core_ml_package_is_planned_recompressed_and_restored(model: Path, tmp_path: Path) -> None:
    from ingot.conversion.coreml.layer import extract_layer

    source = model.with_suffix(".safetensors")
    package, small, back = (tmp_path / f"{name}.mlpackage" for name in ("whole", "small", "back"))
    extract_layer(source, "conv.weight", package, opset="iOS18")
    assert ingot.plan(package, "m1")["m1"].outcomes == {"dense": 1}
    suggest(package, "m1", tmp_path / "m1.toml", 0.15)
    ingot.convert(package, small, str(tmp_path / "m1.toml"))
    found = ingot.plan(small, "m1")["m1"]
    assert found.outcomes == {"streams": 1}
    assert found.kernels[0].form == "palette4"
    ingot.convert(small, back, "decompress")
    assert ingot.plan(back, "m1")["m1"].outcomes == {"dense": 1}
    assert ingot.compare(small, back).same


def test_odd_tensors_are_planned_too(tmp_path: Path) -> None:
    arrays = {
        "no_rows": np.zeros((0, 5), np.float16),
        "no_cols": np.zeros((5, 0), np.float16),
        "scalar": np.zeros((), np.float32),
        "column": np.zeros((8, 1), np.float16),
        "fp8": np.zeros((8, 8), numpy_dtype("f8_e4m3fn")),
        "other_fp8": np.zeros((8, 8), numpy_dtype("f8_e4m3fnuz")),
        "doubles": np.zeros((8, 8)),
        "bools": np.zeros((8, 8), np.bool_),
    }
    ingot.save(tmp_path / "odd.zt", arrays)
    found = {weight.name: weight for weight in ingot.plan(tmp_path / "odd.zt", "m1,a19")["m1"].weights}
    assert {name: weight.use for name, weight in found.items()} == {
        **dict.fromkeys(("no_rows", "no_cols", "fp8", "other_fp8", "doubles"), "kernel"),
        **dict.fromkeys(("scalar", "column"), "vector"),
        "bools": "other",
    }
    assert {name: weight.decision.outcome for name, weight in found.items() if weight.decision is not None} == {
        "no_rows": "dense", "no_cols": "dense", "fp8": "refused", "other_fp8": "folds", "doubles": "dense",
    }  # fmt: skip
    with pytest.raises(UsageError) as refused:
        pack_kernel(tmp_path / "odd.zt", "no_rows", tmp_path / "x.anek")
    assert refused.value.rule == "ane.layout"


@pytest.mark.parametrize(("opset", "way"), [("iOS16", "palette4"), ("iOS18", "palette3")])
def test_a_package_is_suggested_only_what_its_program_can_have(tmp_path: Path, opset: str, way: str) -> None:
    weight = np.random.default_rng(5).uniform(-1, 1, (64, 128)).astype(np.float16)
    ingot.save(tmp_path / "m.safetensors", {"a.weight": weight})
    extract_layer(tmp_path / "m.safetensors", "a.weight", tmp_path / "a.mlpackage", opset=opset)
    found = suggest(tmp_path / "a.mlpackage", "m4", tmp_path / "x.toml", 0.2)
    assert [pick.candidate for pick in found.picks] == [way]
    assert (
        ingot.convert(tmp_path / "a.mlpackage", tmp_path / "b.mlpackage", tmp_path / "x.toml").actions["encoded"] == 1
    )
