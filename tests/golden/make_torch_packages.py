"""Layers as torchao 0.18, optimum-quanto 0.2.7, hqq 0.2.8.post1 and ModelOpt 0.47.0 write them, and what these packages
decode of them.

    python tests/golden/make_torch_packages.py tests/golden/torch_packages [torchao torchao_small quanto ...]

Run by a Python that has them beside torch, transformers and safetensors; nothing here imports Ingot.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

LAYERS = {"a": (6, 64), "b": (10, 32)}


def model() -> torch.nn.ModuleDict:
    torch.manual_seed(0)
    layers = {name: torch.nn.Linear(cols, rows, bias=name == "a") for name, (rows, cols) in LAYERS.items()}
    return torch.nn.ModuleDict(layers).to(torch.bfloat16)


def save(root: Path, name: str, tensors: dict[str, Any], wanted: dict[str, Any], stated: Any, told: Any = None) -> None:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors", told)
    save_file({key: value.detach().contiguous() for key, value in wanted.items()}, root / f"{name}.safetensors")
    config = {"dtype": "bfloat16", **({"quantization_config": stated} if stated else {})}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def torchao(root: Path) -> None:
    from torchao.core.config import config_to_dict
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.quant_primitives import MappingType

    cases = {
        "torchao-int8": Int8WeightOnlyConfig(version=2),
        "torchao-fp8": Float8WeightOnlyConfig(version=2),
        "torchao-int4": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32), version=2),
        "torchao-int3-asymmetric": IntxWeightOnlyConfig(
            weight_dtype=torch.int3, granularity=PerGroup(16), mapping_type=MappingType.ASYMMETRIC, version=2
        ),
    }
    for name, how in cases.items():
        made = model()
        quantize_(made, how)
        state = made.state_dict()
        tensors, told = flatten_tensor_state_dict(state)
        wanted = {key: value.dequantize() if hasattr(value, "qdata") else value for key, value in state.items()}
        stated = {"quant_method": "torchao", "quant_type": {"default": config_to_dict(how)}}
        save(root, name, tensors, wanted, stated, {"format": "pt", **told})


def torchao_small(root: Path) -> None:
    """MX formats and NVFP4, scales in order and swizzled, and Int4Tensor, whose codes only other machines make: by its
    own constructor, ``w = q * s + z`` (mslk's ``int4_row_quantize_zp``)."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int4Tensor

    torch.manual_seed(2)
    dense = torch.randn(136, 96).to(torch.bfloat16)
    state: dict[str, Any] = {}
    second = per_tensor_amax_to_scale(dense.abs().max().float())
    for swizzled in (False, True):  # blocks of scales are of 128 rows
        how, end = {"is_swizzled_scales": swizzled}, "_swizzled" if swizzled else ""
        some = dense if swizzled else dense[:8]
        state[f"nvfp4{end}.weight"] = NVFP4Tensor.to_nvfp4(some, per_tensor_scale=second, **how)
        state[f"plain_nvfp4{end}.weight"] = NVFP4Tensor.to_nvfp4(dense[:8], **how)
        for name, kind in (("mxfp8", torch.float8_e4m3fn), ("mxfp4", torch.float4_e2m1fn_x2)):
            state[f"{name}{end}.weight"] = MXTensor.to_mx(dense[:8], kind, block_size=32, **how)
    wanted = {name: tensor.dequantize(torch.bfloat16) for name, tensor in state.items()}
    codes = torch.randint(-8, 8, (6, 64), dtype=torch.int8)
    numbers = [(torch.rand(2, 6) + 0.1).to(torch.bfloat16) for _ in range(2)]
    packed = codes[:, ::2] & 15 | codes[:, 1::2] << 4
    state["int4.weight"] = Int4Tensor(packed, *numbers, [1, 32], codes.shape)
    scales, zeros = (each.T.float().repeat_interleave(32, dim=1) for each in numbers)
    wanted["int4.weight"] = (codes.float() * scales + zeros).to(torch.bfloat16)
    tensors, told = flatten_tensor_state_dict(state)
    save(root, "torchao-small", tensors, wanted, {"quant_method": "torchao"}, {"format": "pt", **told})


def quanto(root: Path) -> None:
    from optimum.quanto import freeze, qfloat8, qint8, quantize

    for name, kind in (("quanto-int8", qint8), ("quanto-fp8", qfloat8)):
        made = model()
        quantize(made, weights=kind)
        freeze(made)
        wanted = {key: made[key].weight.dequantize() for key in made}
        bias = {"a.bias": made["a"].bias}
        save(root, name, made.state_dict(), {f"{key}.weight": value for key, value in wanted.items()} | bias, None)
        (root / name / "quanto_qmap.json").write_text(json.dumps({key: {"weights": kind.name} for key in made}) + "\n")


def quanto_bits(root: Path) -> None:
    """Of 2 and 4 bits; values in f32, rounded once. Rows of "b" are odd, one group a row."""
    from optimum.quanto import freeze, qint2, qint4, quantize

    for name, kind in (("quanto-int2", qint2), ("quanto-int4", qint4)):
        torch.manual_seed(0)
        layers = {"a": torch.nn.Linear(192, 6), "b": torch.nn.Linear(32, 9)}
        made = torch.nn.ModuleDict({**layers, "up_proj": torch.nn.Linear(192, 4, bias=False)}).to(torch.bfloat16)
        quantize(made, weights=kind)
        freeze(made)
        wanted = {f"{key}.bias": made[key].bias for key in ("a", "b")}
        for key in made:
            packed = made[key].weight
            values = packed._scale.float() * packed._data.unpack().float() - packed._shift.float()
            wanted[f"{key}.weight"] = values.reshape(packed.shape).to(torch.bfloat16)
        save(root, name, made.state_dict(), wanted, None)
        (root / name / "quanto_qmap.json").write_text(json.dumps({key: {"weights": kind.name} for key in made}) + "\n")
        config = {"dtype": "bfloat16", "hidden_size": 192}
        (root / name / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def hqq(root: Path) -> None:
    """Of 1 to 8 bits; values in f32, rounded once. Groups do not fill the words of 3 bits."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear, Quantizer

    for bits, axis in ((1, 1), (2, 1), (3, 1), (4, 1), (6, 1), (8, 1), (3, 0), (4, 0)):
        torch.manual_seed(bits)
        state, wanted = {}, {}
        # Of axis 0 groups are strided over the matrix: of "c" none is of one column.
        layers: dict[str, tuple[int, int, int | None]] = {"a": (16, 64, 32), "b": (24, 32, None)}
        for key, (rows, cols, group) in (layers if axis else {"a": (32, 64, 16), **layers, "c": (24, 32, 64)}).items():
            plain = torch.nn.Linear(cols, rows, bias=key == "a").to(torch.bfloat16)
            stated = BaseQuantizeConfig(nbits=bits, group_size=group, axis=axis)
            stated["weight_quant_params"]["optimize"] = False
            made = HQQLinear(plain, stated, compute_dtype=torch.bfloat16, device="cpu")
            state.update({f"{key}.{name}": value for name, value in made.state_dict().items() if value is not None})
            codes = Quantizer.unpack[made.meta["packing"]](made.W_q, dtype=torch.float32)
            codes = codes[: len(made.meta["scale"]) if axis else group or rows]
            values = (codes - made.meta["zero"].float()) * made.meta["scale"].float()
            wanted[f"{key}.weight"] = values.reshape(made.meta["shape"]).to(torch.bfloat16)
            if key == "a":
                wanted["a.bias"] = made.bias
        save(root, f"hqq-{bits}{'' if axis else '-axis-0'}", state, wanted, None)


def modelopt(root: Path) -> None:
    """Integers of 4 bits by AWQ. Its o_proj and down_proj keep factors of their inputs, which are part of the values
    here: ``y = W (p x)`` is ``(W p) x``. In f32, rounded once; compared with what the package itself computes with."""
    from modelopt.torch import quantization
    from modelopt.torch.export import export_hf_checkpoint
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 16, "head_dim": 16}
    config = LlamaConfig(architectures=["LlamaForCausalLM"], num_attention_heads=2, num_key_value_heads=1, **sizes)
    made = LlamaForCausalLM(config).to(torch.bfloat16)
    how: Any = copy.deepcopy(quantization.INT4_AWQ_CFG)
    weights = next(item for item in how["quant_cfg"] if item["quantizer_name"] == "*weight_quantizer")
    weights["cfg"]["block_sizes"][-1] = 16
    made = quantization.quantize(made, how, lambda model: [model(torch.randint(0, 16, (2, 16))) for _ in range(4)])
    own = {}
    for name, module in made.named_modules():
        if name.endswith(("o_proj", "down_proj")):
            factors = module.input_quantizer._pre_quant_scale.float()
            own[f"{name}.weight"] = module.weight_quantizer(module.weight.float()) * factors
    with tempfile.TemporaryDirectory() as folder:
        export_hf_checkpoint(made, export_dir=folder)
        tensors = load_file(Path(folder) / "model.safetensors")
        stated = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]
    wanted = {}
    for name, tensor in tensors.items():
        if tensor.dtype == torch.uint8:
            codes = torch.stack([tensor & 15, tensor >> 4], dim=1).reshape(-1, tensor.shape[1]).to(torch.int32)
            scales = tensors[f"{name}_scale"].repeat_interleave(16, dim=1)
            factors = tensors.get(name.replace("weight", "pre_quant_scale"), torch.ones(tensor.shape[1])).float()
            values = (scales * factors) * torch.where(codes > 7, codes - 16, codes)
            if name in own:  # but for codes that lie between two, which the two round otherwise
                assert torch.isclose(values, own[name], rtol=1e-5).float().mean() > 0.999
            wanted[name] = values.to(torch.bfloat16)
        elif not name.endswith("_scale"):
            wanted[name] = tensor
    assert own.keys() <= wanted.keys()
    save(root, "modelopt-int4", tensors, wanted, stated)


if __name__ == "__main__":
    for write in (torchao, torchao_small, quanto, quanto_bits, hqq, modelopt):
        if write.__name__ in sys.argv[2:] or not sys.argv[2:]:
            write(Path(sys.argv[1]))
