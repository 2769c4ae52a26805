"""Packages that packed layers decode the golden files, and new random ones, to our values: `make peers` installs them.

torchao, hqq and GPTQModel compute as Ingot does, in f32 or once rounded. quanto's own ``dequantize`` of 2 and 4 bits
rounds twice; there its codes, scales and shifts are taken from it and multiplied here. New cases have other numbers in
every run: a test that fails prints the seed, INGOT_SEED sets it.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import ingot
from tests.support.matrix import explore

pytestmark = [
    pytest.mark.skipif(not os.environ.get("INGOT_PEERS"), reason="INGOT_PEERS is not set: make peers"),
    pytest.mark.filterwarnings("ignore"),
]
GOLDEN = Path(__file__).parents[1] / "golden"
SEED = int(os.environ.get("INGOT_SEED") or int.from_bytes(os.urandom(3), "little"))
Values = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    """What made the golden files."""
    spec = importlib.util.spec_from_file_location("make_torch_packages", GOLDEN / "make_torch_packages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(params=["golden", "random"])
def root(request: pytest.FixtureRequest, maker: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function from a package's name to its folders: the golden ones, or some that it writes now."""

    def folders(name: str, *writers: str) -> Iterator[Path]:
        place = GOLDEN / "torch_packages"
        if request.param != "golden":
            print(f"INGOT_SEED={SEED}")
            place, plain = tmp_path, torch.manual_seed
            monkeypatch.setattr(torch, "manual_seed", lambda seed: plain(seed + SEED))
            for writer in writers:
                getattr(maker, writer)(place)
        found = sorted(path for path in place.iterdir() if path.is_dir() and path.name.startswith(name))
        assert len(found) >= 4
        yield from found

    return folders


def require_equal(folder: Path, values: Values, dtype: torch.dtype) -> None:
    with ingot.open(folder) as checkpoint:
        packed = {name for name, tensor in checkpoint.items() if tensor.codec != "dense"}
        assert packed == set(values)
        for name, value in values.items():
            assert torch.equal(checkpoint[name].torch(dtype), value.detach().to(dtype)), (folder.name, name)


def test_torchao_decodes_what_we_read(root: Callable[..., Iterator[Path]]) -> None:
    support = pytest.importorskip("torchao.prototype.safetensors.safetensors_support")
    for folder in root("torchao", "torchao", "torchao_small"):
        with safe_open(folder / "model.safetensors", "pt") as file:
            state, _ = support.unflatten_tensor_state_dict(load_file(folder / "model.safetensors"), file.metadata())
        values = {name: tensor for name, tensor in state.items() if type(tensor) is not torch.Tensor}
        own = {name: tensor for name, tensor in values.items() if type(tensor).__name__ != "Int4Tensor"}
        made = {name: tensor.dequantize() for name, tensor in own.items()}
        for name in values.keys() - own.keys():  # which dequantizes on other machines alone
            tensor = values[name]
            codes = torch.stack([tensor.qdata & 15, tensor.qdata >> 4 & 15], -1).reshape(len(tensor.qdata), -1)
            codes = (codes ^ 8).to(torch.int32) - 8
            wide = [each.T.float().repeat_interleave(32, 1) for each in (tensor.scale, tensor.zero_point)]
            made[name] = codes.float() * wide[0] + wide[1]
        require_equal(folder, made, torch.bfloat16)


def test_hqq_decodes_what_we_read(root: Callable[..., Iterator[Path]]) -> None:
    quantize = pytest.importorskip("hqq.core.quantize")
    for folder in root("hqq", "hqq"):
        state, values = load_file(folder / "model.safetensors"), {}
        for stem in sorted({name.partition(".")[0] for name in state}):
            layer = quantize.HQQLinear(None, None, compute_dtype=torch.float32, device="cpu", initialize=False)
            own = {name.removeprefix(f"{stem}."): value for name, value in state.items() if name.startswith(f"{stem}.")}
            layer.load_state_dict(own)
            values[f"{stem}.weight"] = layer.dequantize()
        require_equal(folder, values, torch.float32)


@pytest.mark.timeout(1800)  # its unpacking is compiled when it is first asked for
def test_quanto_decodes_what_we_read(root: Callable[..., Iterator[Path]]) -> None:
    quanto = pytest.importorskip("optimum.quanto")
    for folder in root("quanto", "quanto", "quanto_bits"):
        state = load_file(folder / "model.safetensors")
        stated = json.loads((folder / "quanto_qmap.json").read_text())
        layers = {}
        for name in stated:
            with ingot.open(folder) as checkpoint:
                rows, cols = checkpoint[f"{name}.weight"].shape
            layers[name] = torch.nn.Linear(cols, rows, bias=f"{name}.bias" in state)
        model = torch.nn.ModuleDict(layers).to(torch.bfloat16)
        qmap = {key: {**value, "activations": "none"} for key, value in stated.items()}
        quanto.requantize(model, state, qmap)
        require_equal(folder, decoded_by_quanto(model), torch.bfloat16)


def decoded_by_quanto(model: Any) -> dict[str, torch.Tensor]:
    values = {}
    for name, layer in model.items():
        weight = layer.weight
        values[f"{name}.weight"] = weight.dequantize()
        if hasattr(weight, "_shift"):
            once = weight._scale.float() * weight._data.unpack().float() - weight._shift.float()
            values[f"{name}.weight"] = once.reshape(weight.shape)
    return values


def gptq_layer(bits: int, group: int, shape: tuple[int, int], entries: Mapping[str, torch.Tensor], form: str) -> Any:
    """Return a layer of GPTQModel that holds entries of a file."""
    module = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
    how = {"in_features": shape[1], "out_features": shape[0], "bias": False, "sym": False, "desc_act": False}
    layer = module.TorchLinear(bits=bits, group_size=group, format=form, **how)
    layer.load_state_dict(dict(entries))
    layer.post_init()
    return layer


def entries_of(folder: Path, stem: str) -> dict[str, torch.Tensor]:
    start = f"{stem}."
    held = load_file(folder / "model.safetensors")
    return {name.removeprefix(start): value for name, value in held.items() if name.startswith(start)}


@pytest.mark.parametrize("name", ["gptq-planes-sym", "gptq-planes-asym"])
def test_gptqmodel_decodes_golden_planes(name: str) -> None:
    folder, values = GOLDEN / "gptq_awq" / name, {}
    with ingot.open(folder) as checkpoint:
        for key in [key for key, tensor in checkpoint.items() if tensor.codec != "dense"]:
            params, shape = checkpoint[key].params, checkpoint[key].shape
            entries = entries_of(folder, key.removesuffix(".weight"))
            layer = gptq_layer(params["bits"], params["group_size"], shape, entries, "gptq_p")
            values[key] = layer.dequantize_weight().T
    assert len(values) == 5
    require_equal(folder, values, torch.float16)


@pytest.mark.parametrize(
    ("form", "bits"), [*(("gptq_v2", bits) for bits in (2, 3, 4, 8)), *(("gptq_p", bits) for bits in range(2, 9))]
)
def test_gptqmodel_packs_what_we_read(form: str, bits: int, tmp_path: Path) -> None:
    module = pytest.importorskip("gptqmodel.nn_modules.qlinear.torch")
    print(f"INGOT_SEED={SEED}")
    torch.manual_seed(SEED + bits)
    rows, cols, group = 32 * int(torch.randint(1, 5, ())), 128, (32, 64, 128)[int(torch.randint(0, 3, ()))]
    how = {"in_features": cols, "out_features": rows, "bias": False, "sym": False, "desc_act": False}
    layer = module.TorchLinear(bits=bits, group_size=group, format=form, **how)
    codes, points = (torch.randint(0, 1 << bits, (rows, count)) for count in (cols, cols // group))
    scales = (torch.rand(points.shape) / 50 + 0.01).half()
    linear = torch.nn.Linear(cols, rows, bias=False)
    linear.weight.data = (codes - points.repeat_interleave(group, 1)) * scales.float().repeat_interleave(group, 1)
    layer.pack_original(linear, scales, points, (torch.arange(cols) // group).int())
    layer.post_init()
    stem = "model.layers.0.mlp.up_proj"
    save_file({f"{stem}.{key}": value.contiguous() for key, value in layer.state_dict().items()}, tmp_path / "m")
    (tmp_path / "m").rename(tmp_path / "model.safetensors")
    stated = {"bits": bits, "group_size": group, "desc_act": False, "sym": False, "checkpoint_format": form}
    config = {"model_type": "llama", "quantization_config": {"quant_method": "gptq", **stated}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    require_equal(tmp_path, {f"{stem}.weight": layer.dequantize_weight().T}, torch.float16)


def test_gptqmodel_decodes_what_we_write(tmp_path: Path) -> None:
    """Every family's layers that GPTQ takes, in v2's words and in planes."""
    seen = set()
    for item in explore(("gptq", "gptq-planes")):
        if item.made is None or (group := item.made.params.get("group_size", item.made.shape[1])) == 0:
            continue
        folder, params = tmp_path / f"{len(seen)}", item.made.params
        key = (item.target, params["bits"], group, params["form"], item.what)
        if key in seen:
            continue
        seen.add(key)
        ingot.save(folder, {item.made.name: item.made}, format=item.target)
        entries = entries_of(folder, item.made.name.removesuffix(".weight"))
        stated = json.loads((folder / "config.json").read_text())["quantization_config"]["checkpoint_format"]
        layer = gptq_layer(params["bits"], group, item.made.shape, entries, stated)
        if stated == "gptq":  # as GPTQModel does when it loads such a file
            convert = pytest.importorskip("gptqmodel.utils.model").convert_gptq_v1_to_v2_format_module
            convert(layer, params["bits"], torch.int32)
        found = layer.dequantize_weight().T
        wanted = item.source.torch(torch.float32).to(found.dtype)
        assert torch.equal(found, wanted), key
    assert len(seen) > 20


def test_ztensor_reads_layers_of_every_family(tmp_path: Path) -> None:
    """In container 2, as parts: what its profiles have no name for is a tensor of parts too."""
    ztensor = pytest.importorskip("ztensor")
    layers = {f"{item.family}.{index}": item.made for index, item in enumerate(explore(("zt2",))) if item.made}
    ingot.save(tmp_path / "m.zt", layers, format="zt2")
    source = ztensor.open(str(tmp_path / "m.zt"))
    for name, tensor in layers.items():
        found = [source[name][role].tobytes() for role in source[name].parts]  # which have the document's names
        assert sorted(found) == sorted(bytes(part.view()) for part in tensor.parts.values()), (name, tensor)
    source.close()


def test_ztensor_reads_what_is_appended(tmp_path: Path) -> None:
    ztensor = pytest.importorskip("ztensor")
    path = str(tmp_path / "m.zt")
    values = np.random.default_rng(SEED).standard_normal((300, 70))
    ingot.save(path, {"a": values}, format="zt2")
    ingot.append(path, {"b": values[1:], "empty": values[:0]})
    writer = ztensor.Writer(path, canonical=False, append=True)
    writer.add("c", values[2:].tobytes(), [298, 70], "f64")
    writer.finish()
    ingot.append(path, {"d": values[3:]})
    source = ztensor.open(path)
    assert source.verify(True).undigested == 0
    with ingot.open(path) as opened:
        assert {*opened} == {*source.keys()} == {"a", "b", "c", "d", "empty"}
        for index, name in enumerate("abcd"):
            np.testing.assert_array_equal(opened[name].numpy(), values[index:])
            assert source[name].tobytes() == values[index:].tobytes()
    source.close()
