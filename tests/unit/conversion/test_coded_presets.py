"""The presets ``coded4-calibrated`` and ``coded3-calibrated``: integers that a ``.zt`` stores in few bits."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

import ingot
from ingot.conversion.preset_fit import holds
from ingot.core.bytes.packed import PACKED
from ingot.errors import UnsupportedError, UsageError
from ingot.formats.detect import FORMATS
from ingot.model.statistics import Statistics
from ingot.recipes.load import load_recipe, parse_recipe
from tests.support import preset_model

PRESETS = ("coded4-calibrated", "coded3-calibrated")


def statistics(*, gradients: bool = True) -> Statistics:
    """Return statistics of all matrices; errors of the feed-forward matrices weigh much more."""
    rng = np.random.default_rng(8)
    arrays = preset_model.arrays()
    for name, shape in preset_model.SHAPES.items():
        if len(shape) == 2 and gradients:
            outputs = rng.standard_normal((shape[0], 600)) * rng.uniform(0.3, 2, (shape[0], 1))
            outputs *= 8 if name.startswith("mlp") else 1
            arrays[f"model.layers.0.{name}.weight:outputs"] = (outputs @ outputs.T / 600).astype(np.float32)
    return Statistics.in_memory(arrays)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return preset_model.written(tmp_path_factory.mktemp("source") / "model", ml_dtypes.bfloat16)


@pytest.fixture(scope="module")
def coded(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("coded") / "out"
    ingot.convert(source, target, "coded4-calibrated", format="zt", calibration=statistics())
    return target


def bits_of(location: Path, part: str = "") -> float:
    """Return the stored bits per weight of the quantized matrices whose names contain ``part``."""
    with ingot.open(location) as checkpoint:
        packed = [tensor for name, tensor in checkpoint.items() if tensor.codec == "affine" and part in name]
        assert packed
        stored = sum(tensor.parts["packed_weight"].length for tensor in packed)
        return 8 * stored / sum(tensor.size for tensor in packed)


def decoded(location: Path) -> dict[str, bytes]:
    with ingot.open(location) as checkpoint:
        names = [f"model.layers.0.{name}.weight" for name, shape in preset_model.SHAPES.items() if len(shape) == 2]
        return {name: checkpoint[name].numpy("f32").tobytes() for name in names}


def test_matrices_take_the_bits_of_the_name_on_average(source: Path, tmp_path: Path) -> None:
    for preset in PRESETS:
        ingot.convert(source, tmp_path / preset, preset, format="zt", calibration=statistics())
        bits = int(preset[5])
        # tables and indices of matrices of 8 to 32 thousand weights add a fifth of a bit
        assert bits - 0.05 < bits_of(tmp_path / preset) < bits + 0.25, preset


def test_matrices_whose_errors_weigh_more_take_more_bits(coded: Path) -> None:
    assert bits_of(coded, "mlp") > bits_of(coded, "self_attn") + 2


def test_without_gradients_all_matrices_take_as_many_bits(source: Path, tmp_path: Path) -> None:
    ingot.convert(source, tmp_path / "out", "coded3-calibrated", format="zt", calibration=statistics(gradients=False))
    for part in ("mlp", "self_attn"):
        assert 2.95 < bits_of(tmp_path / "out", part) < 3.3


def test_the_report_counts_encoded_matrices_and_their_size(source: Path, tmp_path: Path) -> None:
    report = ingot.convert(source, tmp_path / "o.zt", "coded3-calibrated", calibration=statistics())
    data = report
    assert data.actions == {"encoded": 7, "moved": 5}
    assert data.size == (tmp_path / "o.zt").stat().st_size
    assert len(data.rounded) == 7
    assert not data.exact


def test_bytes_do_not_depend_on_threads(source: Path, coded: Path, tmp_path: Path) -> None:
    for threads in (1, 3):
        target = tmp_path / str(threads)
        ingot.convert(source, target, "coded4-calibrated", format="zt", calibration=statistics(), threads=threads)
        assert (target / "model.zt").read_bytes() == (coded / "model.zt").read_bytes()


@pytest.mark.parametrize("format", ["gptq", "compressed-tensors", "gguf", "zt2"])
def test_other_containers_get_the_same_integers(coded: Path, tmp_path: Path, format: str) -> None:
    target = tmp_path / ("out.gguf" if format == "gguf" else "out")
    report = ingot.convert(coded, target, format=format, keep_names=True)
    assert report.actions == {"moved": 5, "repacked": 7}
    assert decoded(target) == decoded(coded)
    ingot.convert(target, tmp_path / "back.zt", "lossless", keep_names=True)
    assert decoded(tmp_path / "back.zt") == decoded(coded)


@pytest.mark.parametrize("format", ["gptq", "compressed-tensors", "mlx", "gguf", "zt2", "safetensors", "squizd"])
def test_containers_without_the_encoding_are_refused(source: Path, tmp_path: Path, format: str) -> None:
    assert not holds(FORMATS[format], load_recipe("coded4-calibrated"))
    target = tmp_path / ("out.gguf" if format == "gguf" else "out")
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert(source, target, "coded4-calibrated", format=format, calibration=statistics(), keep_names=True)
    assert caught.value.rule in ("convert.not-held", "convert.unsupported")
    assert not target.exists()


def test_a_file_loads_and_verifies(coded: Path) -> None:
    assert not [finding for finding in ingot.verify(coded) if finding.level == "error"]
    with ingot.open(coded) as checkpoint:
        tensor = checkpoint["model.layers.0.mlp.up_proj.weight"]
        assert tensor.parts["packed_weight"].encoding == PACKED
        assert np.array_equal(np.asarray(tensor[3:5]), tensor.numpy()[3:5])


def test_any_quantizer_can_have_entropy_coded_parts(source: Path, tmp_path: Path) -> None:
    text = """[[rules]]
roles = ["mlp"]
codec = "affine"
options = { bits = 4, group = 64 }
quantizer = "two-sided"
"""
    ingot.convert(source, tmp_path / "plain.zt", parse_recipe(text, location="r"), calibration=statistics())
    packed = parse_recipe(f'{text}encoding = "{PACKED}"\n', location="r")
    ingot.convert(source, tmp_path / "packed.zt", packed, calibration=statistics())
    assert decoded(tmp_path / "packed.zt") == decoded(tmp_path / "plain.zt")
    assert bits_of(tmp_path / "packed.zt") < bits_of(tmp_path / "plain.zt") - 0.1


def test_a_budget_refuses_types_that_share_a_step(source: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        ingot.convert(source, tmp_path / "out.zt", target_bpw=6, types="coded4-calibrated", calibration=statistics())
    assert caught.value.rule == "recipe.encoding"


@pytest.mark.parametrize("encoding", ["raw", "zstd"])
def test_coded_bits_need_the_entropy_coder(encoding: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_recipe(
            f'[[rules]]\ncodec = "affine"\nquantizer = "two-sided"\nencoding = "{encoding}"\n'
            "options = { coded_bits = 3 }\n",
            location="r",
        )
    assert caught.value.rule == "recipe.encoding"
