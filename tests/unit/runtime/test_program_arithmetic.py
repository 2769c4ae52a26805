"""Rounding of inputs and results as programs do (``--arithmetic``)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ingot
from ingot.errors import UnsupportedError, UsageError
from ingot.runtime.evaluation.evaluate import evaluate
from ingot.runtime.layers.program_arithmetic import round_large_blocks, round_small_blocks
from ingot.runtime.loading.options import Loading, Measures, Protocol
from ingot.runtime.loading.transformers import load_model
from tests.support.paths import DEMO_DATA

TOKENS = torch.arange(1, 33)[None]


def test_small_blocks_have_a_scale_in_f16_for_32_values() -> None:
    values = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)) * torch.tensor([1e-3, 1.0, 300.0])[:, None]
    rounded = round_small_blocks(values)
    for row, result in zip(values.split(32, 1), rounded.split(32, 1), strict=True):
        scale = row.abs().amax(1, keepdim=True) / 127
        codes = torch.round(row / scale)
        assert codes.abs().max() == 127
        assert torch.equal(result, codes * scale.to(torch.float16).float())
    assert torch.equal(round_small_blocks(torch.zeros(2, 32)), torch.zeros(2, 32))


def test_large_blocks_map_the_value_of_the_largest_magnitude_to_minus_127() -> None:
    values = torch.randn(2, 512, generator=torch.Generator().manual_seed(2))
    values[0, 5] = 9.0
    values[1, 300] = -9.0
    rounded = round_large_blocks(values)
    for start in (0, 256):
        block, result = values[:, start : start + 256], rounded[:, start : start + 256]
        largest = block.gather(1, block.abs().argmax(1, keepdim=True))
        scale = largest / -127
        assert torch.equal(result, torch.round(block / scale).clamp(max=127) * scale)
        assert torch.allclose(result.gather(1, block.abs().argmax(1, keepdim=True)), largest, rtol=1e-6)
    assert torch.equal(round_large_blocks(torch.zeros(1, 256)), torch.zeros(1, 256))


def test_inputs_of_linear_layers_are_rounded_by_the_type_of_the_weight(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    ingot.convert(DEMO_DATA, path, recipe="q8_0")
    model = load_model(path, model_dir=DEMO_DATA, cache=False, arithmetic="llama.cpp")
    seen: list[torch.Tensor] = []
    layer = model.model.layers[0].mlp.up_proj
    layer.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.inference_mode():
        model(input_ids=TOKENS, use_cache=False)
    assert torch.allclose(round_small_blocks(seen[0]), seen[0], rtol=2e-3, atol=1e-6)


def test_mlx_computes_in_the_type_of_the_scales(tmp_path: Path) -> None:
    ingot.convert(DEMO_DATA, tmp_path / "m", recipe="w4a16", format="mlx")
    model = load_model(tmp_path / "m", model_dir=DEMO_DATA, cache=False, arithmetic="mlx")
    scales = {
        tensor.parts["scales"].dtype for tensor in ingot.open(tmp_path / "m").values() if "scales" in tensor.parts
    }
    assert {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()} == {
        {"f16": "float16", "bf16": "bfloat16", "f32": "float32"}[scale] for scale in scales
    }


def test_arithmetic_is_refused_where_it_is_not_defined(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"model\.arithmetic"):
        load_model(DEMO_DATA, cache=False, arithmetic="llama.cpp")
    with pytest.raises(UsageError, match=r"model\.arithmetic"):
        Loading(arithmetic="metal")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"model\.arithmetic"):
        Loading(arithmetic="mlx", stream=True)
    with pytest.raises(UsageError, match=r"model\.arithmetic"):
        load_model(DEMO_DATA, cache=False, arithmetic="mlx", keep_packed=True)
    text = DEMO_DATA / "heldout.txt"
    with pytest.raises(UsageError, match=r"model\.arithmetic"):
        evaluate(
            DEMO_DATA,
            text,
            protocol=Protocol(16, 1),
            loading=Loading(arithmetic="mlx"),
            measures=Measures(receipt=True),
        )
