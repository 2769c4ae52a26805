"""AutoRound folders: layers in the layout of GPTQ, AWQ, compressed-tensors or FP8, named by ``packing_format``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ingot.errors import IngotError
from ingot.formats.packed_folders.awq import AwqFormat
from ingot.formats.packed_folders.base import HUGGING_FACE, Config, Entries, Layer, PackedFolderFormat
from ingot.formats.packed_folders.columns import unsupported
from ingot.formats.packed_folders.compressed_tensors import CompressedTensorsFormat
from ingot.formats.packed_folders.fp8 import Fp8Format
from ingot.formats.packed_folders.gptq import V1, V2, GptqFormat
from ingot.formats.packed_folders.gptq_awq_keys import AUTOROUND_KEYS
from ingot.formats.packed_folders.mlx import AUTOROUND_METHODS, AUTOROUND_PACKINGS

_PACKING = "packing_format"
_DATA_TYPE = "data_type"
_BLOCK = "weight_block_size"
_V1 = ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:gptq:exllamav2", "auto")
_V2 = ("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2")
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_FLOATS = ("auto_round:llm_compressor",)
_FP8 = ("auto_round:fp8", "auto_round:fp8_static")
_PACKINGS = (*_V1, *_V2, *_AWQ, *_FLOATS, *_FP8)
_DENSE_BITS = 16


class AutoRoundFormat(PackedFolderFormat):
    """A folder in the layout of another packed folder format, which AutoRound describes with its own keys."""

    name = "autoround"
    summary = "a folder of AutoRound: dense tensors, and layers as GPTQ, AWQ, compressed-tensors or FP8; read only"
    keys = AUTOROUND_KEYS

    def claims_config(self, config: Config) -> bool:
        """Return whether ``quant_method`` is AutoRound, and the layout is not MLX's."""
        quantization = config.get(HUGGING_FACE)
        if not isinstance(quantization, dict) or quantization.get("quant_method") not in AUTOROUND_METHODS:
            return False
        return _packing(quantization) not in AUTOROUND_PACKINGS

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Return the layers, read by the format of the declared layout.

        Raises the errors of that format, with its rules; ``UnsupportedError`` ``autoround.packing``,
        ``autoround.type``.
        """
        format, translated = self._translate(config)
        return format.layers(entries, translated)

    def require_complete(self, entries: Entries, config: Config, layers: Sequence[Layer]) -> None:
        """Raise the errors of the format of the declared layout."""
        format, translated = self._translate(config)
        format.require_complete(entries, translated, layers)

    def remarks(self, entries: Entries, config: Config, layers: Sequence[Layer]) -> Sequence[tuple[str, str]]:
        """Return the remarks of the format whose layout the folder declares."""
        format, translated = self._translate(config)
        return format.remarks(entries, translated, layers)

    def check_layers(self, entries: Entries, config: Config, layers: Sequence[Layer]) -> Iterator[IngotError]:
        """Yield the errors of the format whose layout the folder declares."""
        format, translated = self._translate(config)
        return format.check_layers(entries, translated, layers)

    def activations(self, config: Config) -> Mapping[str, str]:
        """Return the settings for inputs with fewer than 16 bits, and the settings for keys, values and attention."""
        quantization = self.quantization(config)
        settings = {key: str(quantization[key])[:40] for key in _STATIC if quantization.get(key) is not None}
        bits = quantization.get("act_bits")
        if type(bits) is int and bits < _DENSE_BITS:
            mode = "dynamic" if quantization.get("act_dynamic", True) else "static"
            settings["act_bits"] = f"{bits} bits {str(quantization.get('act_data_type', ''))[:40]}, {mode}"
        return settings

    def _translate(self, config: Config) -> tuple[PackedFolderFormat, Config]:
        """Return the format of the declared layout, and the ``config.json`` that this format's program would write."""
        quantization = self.quantization(config)
        packing = _packing(quantization)
        if packing not in _PACKINGS:
            raise unsupported("autoround.packing", f"{_PACKING} {', '.join(_PACKINGS)}", repr(packing[:60]))
        integers = packing in (*_V1, *_V2, *_AWQ)
        _require_type(quantization, packing, integers=integers)
        dialect, translated = _FORMATS[packing](quantization)
        return dialect, {**config, HUGGING_FACE: translated}


def _packing(quantization: Config) -> str:
    """Return the declared packing, or the one that vLLM assumes for the declared type of codes.

    Old versions declare it under ``backend``.
    """
    backend = quantization.get("backend")
    old = backend if isinstance(backend, str) and backend.startswith("auto_round") else None
    packing = quantization.get(_PACKING, old)
    if packing is not None:
        return str(packing).lower()
    if "mx_fp" in _data_type(quantization) or "nv_fp" in _data_type(quantization):
        return _FLOATS[0]
    return _FP8[0] if _data_type(quantization).startswith("fp") else _V1[0]


def _data_type(quantization: Config) -> str:
    return str(quantization.get(_DATA_TYPE) or "int").lower()


def _require_type(quantization: Config, packing: str, *, integers: bool) -> None:
    """Raise ``UnsupportedError`` ``autoround.type`` if the packing has no codes of the declared type."""
    data_type = _data_type(quantization)
    bits = quantization.get("act_bits")
    types = ("int",) if integers else ("mx_fp", "nv_fp") if packing in _FLOATS else ("fp",)
    if not data_type.startswith(types) or (integers and data_type != "int"):
        raise unsupported(
            "autoround.type", f"codes of the type {' or '.join(types)} in {packing}", repr(data_type[:40])
        )
    if packing in _V2 and type(bits) is int and bits < _DENSE_BITS:
        raise unsupported("autoround.type", f"inputs of {_DENSE_BITS} bits in {packing}", f"act_bits {bits}")
    if not integers and quantization.get("sym", True) is not True:
        raise unsupported("autoround.type", "floats without zero points (sym true)", f"sym {quantization.get('sym')!r}")


def _gptq(quantization: Config, format: str) -> tuple[PackedFolderFormat, Config]:
    return GptqFormat(), {**_integers(quantization), "quant_method": "gptq", "checkpoint_format": format}


def _awq(quantization: Config) -> tuple[PackedFolderFormat, Config]:
    sym = quantization.get("sym")
    point = {"zero_point": not sym} if isinstance(sym, bool) else {}
    return AwqFormat(), {**_integers(quantization), **point, "quant_method": "awq", "version": "gemm"}


def _integers(quantization: Config) -> dict[str, Any]:
    """Return the settings with the keys of GPTQ and AWQ; settings of single layers become rules in ``dynamic``."""
    rules: dict[str, Any] = {}
    for key in ("dynamic", "regex_config", "extra_config"):
        layers = quantization.get(key)
        rules.update(layers if isinstance(layers, dict) else {})
    packed = {name: rule for name, rule in rules.items() if isinstance(rule, dict) and _bits(rule) < _DENSE_BITS}
    keys = ("bits", "group_size", "sym", "desc_act")
    return {
        **{key: quantization[key] for key in keys if key in quantization},
        "dynamic": packed,
    }


def _bits(rule: Config) -> int:
    bits = rule.get("bits")
    return bits if type(bits) is int else 0


def _floats(quantization: Config) -> tuple[PackedFolderFormat, Config]:
    """Return the format and ``config.json`` of compressed-tensors; layers with other settings are recognized by their
    shapes.
    """
    weights = {"num_bits": quantization.get("bits", 8), "type": "float", "group_size": quantization.get("group_size")}
    eight = {"num_bits": 8, "type": "float", "group_size": 32}
    groups = {f"group_{index}": {"targets": [], "weights": item} for index, item in enumerate((weights, eight))}
    return CompressedTensorsFormat(), {"quant_method": "compressed-tensors", "config_groups": groups}


def _fp8(quantization: Config) -> tuple[PackedFolderFormat, Config]:
    size = quantization.get("group_size")
    block = {_BLOCK: size} if isinstance(size, list) else {}
    return Fp8Format(), {"quant_method": "fp8", **block}


_STATIC = ("static_kv_dtype", "static_attention_dtype")
_FORMATS = {
    **dict.fromkeys(_V1, lambda quantization: _gptq(quantization, V1)),
    **dict.fromkeys(_V2, lambda quantization: _gptq(quantization, V2)),
    **dict.fromkeys(_AWQ, _awq),
    **dict.fromkeys(_FLOATS, _floats),
    **dict.fromkeys(_FP8, _fp8),
}
