"""A new user's way: torch to Core ML, planned, compressed for a chip, checked by coremltools, planned again, undone."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.errors import UnsupportedError
from ingot.ext.ane.suggest import suggest

pytest.importorskip("coremltools")
torch = pytest.importorskip("torch")

CHIPS = ("m1", "m4", "m5")
RECIPES = ("ane-m1", "ane-m4", "ane-m5", "ane-int8", "palette4", "sparse50", "masked-palette", "masked-int8")
# Where everything that a recipe made streams.
STREAMS = {"ane-m1": CHIPS, "ane-m4": ("m4", "m5"), "ane-m5": ("m4", "m5"), "ane-int8": ("m4",), "palette4": CHIPS}
OWN = {
    "masked-palette": '{ sparsity = 0.5, inner = "palette", options = { bits = 4 } }',
    "masked-int8": '{ sparsity = 0.5, inner = "affine", '
    'options = { bits = 8, group = "row", cut = "axis0", scales = "source" } }',
}


def network() -> Any:
    """Convolutions, one of them per channel, a norm that is folded into the first, and two linear layers."""
    nn = torch.nn
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2), nn.ReLU()]
    layers += [nn.Conv2d(64, 64, 3, groups=64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    head = {"fc1": nn.Linear(64, 128), "act": nn.ReLU(), "fc2": nn.Linear(128, 10)}
    model = nn.Sequential(*layers)
    for name, layer in head.items():
        model.add_module(name, layer)
    return model.eval()


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("story")
    made = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import coremltools

        given = torch.rand(1, 3, 16, 16)
        traced = torch.jit.trace(network(), given)
        for opset in ("iOS16", "iOS18"):
            model = coremltools.convert(
                traced,
                inputs=[coremltools.TensorType("x", given.shape)],
                convert_to="mlprogram",
                minimum_deployment_target=getattr(coremltools.target, opset),
                skip_model_load=True,
            )
            made[opset] = folder / f"{opset}.mlpackage"
            model.save(str(made[opset]))
    return made


def values(path: Path) -> dict[str, np.ndarray]:
    """Return every constant that an operation takes, by name, as coremltools decompresses it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import coremltools
        from coremltools.converters.mil.frontend.milproto.load import load

        model = coremltools.models.MLModel(str(path), skip_model_load=True)
        dense = coremltools.optimize.coreml.decompress_weights(model)
        version = dense._spec.specificationVersion
        program = load(dense._spec, specification_version=version, file_weights_dir=dense.weights_dir)
        operations = program.functions["main"].operations
        given = [one for operation in operations for one in operation.inputs.values() if one is not None]
    singles = [one for group in given for one in (group if isinstance(group, list | tuple) else [group])]
    return {one.name: np.asarray(one.val) for one in singles if one.val is not None}


def written(folder: Path, recipe: str) -> str | Path:
    """Return a preset's name, or a file with one's own recipe."""
    if recipe not in OWN:
        return recipe
    path = folder / f"{recipe}.toml"
    path.write_text(f'[[rules]]\nmin_ndim = 2\nmin_size = 512\ncodec = "sparse_mask"\noptions = {OWN[recipe]}\n')
    return path


def same(path: Path) -> None:
    """Compare every tensor with what coremltools says, bit by bit."""
    expected = values(path)
    with ingot.open(path) as found:
        for name in found:
            value = found[name].numpy()
            assert (value.dtype, value.shape) == (expected[name].dtype, expected[name].shape)
            assert value.tobytes() == expected[name].tobytes(), name


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("opset", ["iOS16", "iOS18"])
def test_planned_compressed_planned_again_and_restored(
    packages: dict[str, Path], tmp_path: Path, opset: str, recipe: str
) -> None:
    source, small, back = packages[opset], tmp_path / "small.mlpackage", tmp_path / "back.mlpackage"
    for chip in ingot.plan(source, CHIPS).chips:
        assert chip.outcomes == {"dense": 5}
    chosen = written(tmp_path, recipe)
    if opset == "iOS16" and recipe in OWN:
        with pytest.raises(UnsupportedError) as refused:
            ingot.convert(source, small, chosen)
        assert refused.value.rule == "convert.unsupported"
        assert not small.exists()
        return
    report = ingot.convert(source, small, chosen)
    assert report.actions["encoded"] >= 1
    same(small)
    with ingot.open(small) as packed, ingot.open(source) as plain:
        changed = {name for name in packed if packed[name].codec != "dense"}
        assert len(changed) == report.actions["encoded"]
        assert all(packed[name].numpy().ndim >= 2 for name in changed)
        assert all(
            packed[name].numpy().tobytes() == plain[name].numpy().tobytes() for name in packed if name not in changed
        )
    forms = {chip.chip: chip.outcomes for chip in ingot.plan(small, CHIPS).chips}
    for name in STREAMS.get(recipe, ()):
        assert forms[name].get("streams") == len(changed), name
    assert ingot.convert(small, back, "decompress").actions["decoded"] == len(changed)
    same(back)
    with ingot.open(small) as packed, ingot.open(back) as restored:
        for name in packed:
            assert restored[name].codec == "dense"
            assert packed[name].numpy().tobytes() == restored[name].numpy().tobytes()


def test_what_is_suggested_for_a_package_is_what_the_chips_stream(packages: dict[str, Path], tmp_path: Path) -> None:
    for opset, source in packages.items():
        for chip in CHIPS:
            found = suggest(source, chip, tmp_path / "x.toml", 0.25, overwrite=True)
            small = tmp_path / f"{opset}-{chip}.mlpackage"
            report = ingot.convert(source, small, tmp_path / "x.toml")
            picked = [pick for pick in found.picks if pick.candidate != "kept as stored"]
            assert report.actions["encoded"] == len(picked) == 5
            (planned,) = ingot.plan(small, chip).chips
            assert planned.outcomes == {"streams": 5}
            same(small)
