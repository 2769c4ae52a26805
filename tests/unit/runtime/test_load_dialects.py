"""load_model on folders that other programs pack: the logits of the decoded model, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ingot
from ingot.errors import ResourceError
from ingot.runtime.layers.packed_linear import PackedLinear
from ingot.runtime.loading.load_report import LoadReport
from tests.support.models import make, output_of

RECIPES = {
    "int4": 'codec = "affine"\noptions = { bits = 4, group = 32 }',
    "points": 'codec = "affine"\noptions = { bits = 4, group = 32, symmetric = false, signed = false, scales = "f16" }',
    "fp8": 'codec = "scaled_codebook"\noptions = { table = "f8_e4m3fn", group = [128, 128] }',
    "nvfp4": (
        'codec = "scaled_codebook"\n'
        'options = { table = "f4_e2m1fn", group = 16, scales = "f8_e4m3fn", second = "multiply" }'
    ),
    "mxfp4": 'codec = "scaled_codebook"\noptions = { table = "f4_e2m1fn", group = 32, scales = "f8_e8m0fnu" }',
    "nf4": 'codec = "scaled_codebook"\noptions = { flat = true, order = "high_first" }',
}
WAYS = (
    ("int4", "gptq"),
    ("points", "awq"),
    ("points", "compressed-tensors"),
    ("int4", "mlx"),
    ("fp8", "fp8"),
    ("fp8", "compressed-tensors"),
    ("nvfp4", "modelopt"),
    ("nvfp4", "compressed-tensors"),
    ("mxfp4", "compressed-tensors"),
    ("mxfp4", "mlx"),
    ("nf4", "bitsandbytes"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dialects") / "model"
    return make("llama", folder, hidden_size=64, intermediate_size=128, num_hidden_layers=1)


@pytest.mark.parametrize(("recipe", "format"), WAYS)
def test_packed_folders_give_the_logits_of_the_decoded_model(
    model: Path, tmp_path: Path, recipe: str, format: str
) -> None:
    rule = f'[[rules]]\nlabel = "layers"\nmatch = ["*proj.weight"]\n{RECIPES[recipe]}\n'
    (tmp_path / "recipe.toml").write_text(f'name = "one"\ndescription = "one"\n{rule}')
    ingot.convert(model, tmp_path / "packed", tmp_path / "recipe.toml")
    ingot.convert(tmp_path / "packed", tmp_path / "dense", format="safetensors")
    report = ingot.convert(tmp_path / "packed", tmp_path / "folder", format=format)
    assert "decoded" not in report.actions
    with ingot.open(tmp_path / "folder") as checkpoint:
        assert checkpoint.format == format
    assert torch.equal(
        output_of(ingot.load_model(tmp_path / "folder")), output_of(ingot.load_model(tmp_path / "dense"))
    )


@pytest.mark.parametrize(
    ("recipe", "format", "container"),
    [("int4", "gptq", None), ("points", "gptq", "planes"), ("points", "awq", None), ("points", "awq", "gemv")],
)
def test_words_stay_packed_as_rows(
    model: Path, tmp_path: Path, recipe: str, format: str, container: str | None
) -> None:
    """The same products as of the rows that the words were made of, and a quarter of the memory."""
    rule = f'[[rules]]\nlabel = "layers"\nmatch = ["*proj.weight"]\n{RECIPES[recipe]}\n'
    (tmp_path / "recipe.toml").write_text(f'name = "one"\ndescription = "one"\n{rule}')
    ingot.convert(model, tmp_path / "packed", tmp_path / "recipe.toml")
    report = ingot.convert(tmp_path / "packed", tmp_path / "folder", format=format, container=container)
    assert "decoded" not in report.actions
    with ingot.open(tmp_path / "folder") as checkpoint:
        words = [name for name, tensor in checkpoint.items() if tensor.codec == "affine_words"]
    reports: list[LoadReport] = []
    found = ingot.load_model(tmp_path / "folder", keep_packed=True, report=reports.append)
    layers = [name for name, module in found.named_modules() if isinstance(module, PackedLinear)]
    assert sorted(f"{name}.weight" for name in layers) == sorted(words)
    assert reports[0].packed > 0
    wanted = ingot.load_model(tmp_path / "packed", keep_packed=True)
    assert torch.equal(output_of(found), output_of(wanted))
    with pytest.raises(ResourceError) as caught:
        ingot.load_model(tmp_path / "folder", keep_packed=True, max_ram="4KiB")
    assert caught.value.rule == "ram.guard"
