"""Devices without kernels of ours: parts go over packed and are decoded there, with the bits of the kernels.

Here the CPU is made such a device, and meta, which computes shapes alone, is one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional

import ingot
import ingot.torch
from ingot.codecs.affine.codec import AffineCodec
from ingot.errors import IngotError
from ingot.model.layouts.affine import AffineLayout
from ingot.runtime.arrays import torch_device
from ingot.runtime.arrays.torch import from_numpy
from ingot.runtime.layers import packed_linear
from ingot.runtime.layers.packed_linear import PackedLinear
from ingot.runtime.loading.transformers_weights import materialize
from ingot.testing.codecs import encode_tensor
from tests.support.models import make, output_of
from tests.support.packed import KINDS, matrix

HERE = torch.device("cpu")  # by no name: "cpu" is never asked whether it has kernels


def bits(values: torch.Tensor) -> bytes:
    return values.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """No device has kernels, and who decodes by them all the same is found out; blocks are of few rows."""

    def refuse(*told: object, **more: object) -> None:
        raise AssertionError("decoded by a kernel")

    monkeypatch.setattr(packed_linear, "KERNELS", frozenset())
    monkeypatch.setattr(torch_device, "SCRATCH", 1 << 12)
    for name in ("decode", "reader"):
        monkeypatch.setattr(AffineCodec, name, refuse)


OPTIONS = [
    {"bits": 4, "group": 32},
    {"bits": 4, "group": 32, "symmetric": False},
    {"bits": 8, "group": "row"},
    {"bits": 3, "group": 32},
    {"bits": 2, "group": 32, "symmetric": False},
]


@pytest.fixture(scope="module", params=OPTIONS, ids=str)
def packed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of a matrix in several blocks of rows, and of a vector that is none."""
    rng = np.random.default_rng(3)
    path = tmp_path_factory.mktemp("device") / "m.zt"
    matrix = encode_tensor(AffineCodec(), rng.standard_normal((70, 96)).astype(np.float32), request.param, dtype="f32")
    ingot.save(path, {"a.weight": replace(matrix, name="a.weight"), "norm": np.ones(96, np.float32)})
    return path


@pytest.mark.parametrize("dtype", [None, "f32", "f16", "bf16"])
def test_a_matrix_is_decoded_there_with_the_same_bits(
    packed: Path, dtype: str | None, request: pytest.FixtureRequest
) -> None:
    with ingot.open(packed) as checkpoint:
        wanted = checkpoint["a.weight"].torch(dtype)
        request.getfixturevalue("elsewhere")
        found = checkpoint["a.weight"].torch(dtype, device=HERE)
        as_weight = materialize(checkpoint["a.weight"], wanted.dtype, HERE)
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
        assert bits(found) == bits(wanted) == bits(as_weight)
        shape = checkpoint["a.weight"].torch(dtype, device="meta")
        assert (shape.device.type, shape.dtype, shape.shape) == ("meta", wanted.dtype, wanted.shape)


def test_whole_files_go_over_packed(packed: Path, request: pytest.FixtureRequest) -> None:
    wanted, data = ingot.torch.load_file(packed), packed.read_bytes()
    request.getfixturevalue("elsewhere")
    for found in (ingot.torch.load_file(packed, HERE), ingot.torch.load(data, HERE)):
        assert list(found) == list(wanted)
        assert all(bits(found[name]) == bits(wanted[name]) for name in wanted)
    assert all(values.is_meta for values in ingot.torch.load_file(packed, "meta").values())


def test_damage_is_found_before(packed: Path, tmp_path: Path, elsewhere: None) -> None:
    data = bytearray(packed.read_bytes())
    with ingot.open(packed) as checkpoint:
        data[checkpoint["a.weight"].parts["packed_weight"].offset + 5] ^= 1
    (tmp_path / "m.zt").write_bytes(data)
    with pytest.raises(IngotError) as caught:
        ingot.torch.load_file(tmp_path / "m.zt", HERE)
    assert caught.value.rule == "part.digest-mismatch"


@pytest.mark.parametrize("params", KINDS, ids=str)
@pytest.mark.parametrize("scale", ["f32", "f16", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_layer_multiplies_with_the_kernels_bits(
    params: AffineLayout, scale: str, dtype: torch.dtype, request: pytest.FixtureRequest
) -> None:
    held = matrix(params, 21, 56 if params.bits != 3 else 70, scale)
    name = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}[dtype]
    wanted = from_numpy(held.decode(0, 21, name))
    request.getfixturevalue("elsewhere")
    layer, x = PackedLinear(held, dtype=dtype), torch.randn(3, held.shape[1]).to(dtype)
    assert bits(layer.weight + 0) == bits(wanted + 0)
    assert bits(layer(x)) == bits(functional.linear(x, wanted))


def test_what_is_no_matrix_of_the_family_is_decoded_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    ingot.save(
        tmp_path / "m.safetensors", {"model.layers.0.mlp.up_proj.weight": rng.standard_normal((64, 256), np.float32)}
    )
    ingot.convert(tmp_path / "m.safetensors", tmp_path / "m.zt", recipe="palette8")
    wanted = ingot.torch.load_file(tmp_path / "m.zt")
    monkeypatch.setattr(packed_linear, "KERNELS", frozenset())
    found = ingot.torch.load_file(tmp_path / "m.zt", HERE)
    assert {name: bits(values) for name, values in found.items()} == {name: bits(wanted[name]) for name in wanted}


@pytest.mark.parametrize("keep_packed", [False, True])
def test_a_model_is_loaded_there(tmp_path: Path, keep_packed: bool, request: pytest.FixtureRequest) -> None:
    """Its weights have the kernels' bits; packed layers compute by torch."""
    rule = 'match = ["*"]\nmin_ndim = 2\ncodec = "affine"\noptions = { bits = 4, group = 16 }'
    (tmp_path / "all.toml").write_text(f'name = "all"\ndescription = "all"\n[[rules]]\nlabel = "all"\n{rule}\n')
    make("llama", tmp_path / "source", "float32")
    ingot.convert(tmp_path / "source", tmp_path / "model", tmp_path / "all.toml")
    wanted = ingot.load_model(tmp_path / "model")
    request.getfixturevalue("elsewhere")
    found = ingot.load_model(tmp_path / "model", device="cpu", keep_packed=keep_packed)
    assert any(isinstance(module, PackedLinear) for module in found.modules()) == keep_packed
    here = dict(wanted.named_parameters())
    for name, values in found.named_parameters():
        assert bits(values.detach()) == bits(here[name].detach())
    assert torch.allclose(output_of(found), output_of(wanted), rtol=1e-5, atol=1e-6)
