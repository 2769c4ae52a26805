"""AutoRound folders: layers in the layout of GPTQ, AWQ, compressed-tensors or FP8, named by ``packing_format``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ingot.errors import IngotError
from ingot.formats.dialects.awq import AwqFormat
from ingot.formats.dialects.base import HUGGING_FACE, Config, Dialect, Entries, Layer
from ingot.formats.dialects.columns import unsupported
from ingot.formats.dialects.compressed_tensors import CompressedTensorsFormat
from ingot.formats.dialects.fp8 import Fp8Format
from ingot.formats.dialects.gptq import V1, V2, GptqFormat
from ingot.formats.dialects.gptq_awq_keys import AUTOROUND_KEYS
from ingot.formats.dialects.mlx import AUTOROUND_METHODS, AUTOROUND_PACKINGS

_PACKING, _DATA_TYPE, _BLOCK = "packing_format", "data_type", "weight_block_size"
_V1 = ("auto_round:auto_gptq", "auto_round:gptq", "auto_round:gptq:exllamav2", "auto")
_V2 = ("auto_round", "auto_round:gptqmodel", "auto_round:exllamav2")
_AWQ = ("auto_round:auto_awq", "auto_round:awq")
_FLOATS = ("auto_round:llm_compressor",)
_FP8 = ("auto_round:fp8", "auto_round:fp8_static")
_PACKINGS = (*_V1, *_V2, *_AWQ, *_FLOATS, *_FP8)
_DENSE_BITS = 16


class AutoRoundFormat(Dialect):
    """A folder whose layers are those of another dialect, under AutoRound's own description of them."""

    name = "autoround"
    summary = "a folder of AutoRound: dense tensors, and layers as GPTQ, AWQ, compressed-tensors or FP8; read only"
    keys = AUTOROUND_KEYS

    def claims_config(self, config: Config) -> bool:
        """Whether ``quant_method`` is AutoRound, and the words are not MLX's."""
        stated = config.get(HUGGING_FACE)
        if not isinstance(stated, dict) or stated.get("quant_method") not in AUTOROUND_METHODS:
            return False
        return _packing(stated) not in AUTOROUND_PACKINGS

    def layers(self, entries: Entries, config: Config) -> Sequence[Layer]:
        """Return the layers that the other dialect finds.

        Raises what that dialect raises, by its rules; ``UnsupportedError`` ``autoround.packing``, ``autoround.type``.
        """
        dialect, translated = self._translated(config)
        return dialect.layers(entries, translated)

    def require_complete(self, entries: Entries, config: Config, layers: Sequence[Layer]) -> None:
        """Raise what the other dialect raises."""
        dialect, translated = self._translated(config)
        dialect.require_complete(entries, translated, layers)

    def remarks(self, entries: Entries, config: Config, layers: Sequence[Layer]) -> Sequence[tuple[str, str]]:
        """Return what the other dialect remarks."""
        dialect, translated = self._translated(config)
        return dialect.remarks(entries, translated, layers)

    def check_layers(self, entries: Entries, config: Config, layers: Sequence[Layer]) -> Iterator[IngotError]:
        """Yield what the other dialect finds."""
        dialect, translated = self._translated(config)
        return dialect.check_layers(entries, translated, layers)

    def activations(self, config: Config) -> Mapping[str, str]:
        """Return the settings of inputs, if they have fewer than 16 bits, and those of keys, values and attention."""
        stated = self.quantization(config)
        found = {key: str(stated[key])[:40] for key in _STATIC if stated.get(key) is not None}
        bits = stated.get("act_bits")
        if type(bits) is int and bits < _DENSE_BITS:
            kind = "dynamic" if stated.get("act_dynamic", True) else "static"
            found["act_bits"] = f"{bits} bits {str(stated.get('act_data_type', ''))[:40]}, {kind}"
        return found

    def _translated(self, config: Config) -> tuple[Dialect, Config]:
        """Return the dialect whose layout the layers have, and the ``config.json`` that it would have written."""
        stated = self.quantization(config)
        packing = _packing(stated)
        if packing not in _PACKINGS:
            raise unsupported("autoround.packing", f"{_PACKING} {', '.join(_PACKINGS)}", repr(packing[:60]))
        integers = packing in (*_V1, *_V2, *_AWQ)
        _require_type(stated, packing, integers=integers)
        dialect, translated = _FORMATS[packing](stated)
        return dialect, {**config, HUGGING_FACE: translated}


def _packing(stated: Config) -> str:
    """Return the packing that the configuration declares, or the one that vLLM takes for its type of codes.

    Old versions state it under ``backend``.
    """
    backend = stated.get("backend")
    old = backend if isinstance(backend, str) and backend.startswith("auto_round") else None
    packing = stated.get(_PACKING, old)
    if packing is not None:
        return str(packing).lower()
    if "mx_fp" in _data_type(stated) or "nv_fp" in _data_type(stated):
        return _FLOATS[0]
    return _FP8[0] if _data_type(stated).startswith("fp") else _V1[0]


def _data_type(stated: Config) -> str:
    return str(stated.get(_DATA_TYPE) or "int").lower()


def _require_type(stated: Config, packing: str, *, integers: bool) -> None:
    """Raise ``UnsupportedError`` ``autoround.type`` if codes are not of the type that the packing holds."""
    kind, bits = _data_type(stated), stated.get("act_bits")
    known = ("int",) if integers else ("mx_fp", "nv_fp") if packing in _FLOATS else ("fp",)
    if not kind.startswith(known) or (integers and kind != "int"):
        raise unsupported("autoround.type", f"codes of the type {' or '.join(known)} in {packing}", repr(kind[:40]))
    if packing in _V2 and type(bits) is int and bits < _DENSE_BITS:
        raise unsupported("autoround.type", f"inputs of {_DENSE_BITS} bits in {packing}", f"act_bits {bits}")
    if not integers and stated.get("sym", True) is not True:
        raise unsupported("autoround.type", "floats without zero points (sym true)", f"sym {stated.get('sym')!r}")


def _gptq(stated: Config, kind: str) -> tuple[Dialect, Config]:
    return GptqFormat(), {**_integers(stated), "quant_method": "gptq", "checkpoint_format": kind}


def _awq(stated: Config) -> tuple[Dialect, Config]:
    sym = stated.get("sym")
    point = {"zero_point": not sym} if isinstance(sym, bool) else {}
    return AwqFormat(), {**_integers(stated), **point, "quant_method": "awq", "version": "gemm"}


def _integers(stated: Config) -> dict[str, Any]:
    """Return the keys of GPTQ and AWQ; layers that differ are the rules of ``dynamic``."""
    rules = {}
    for key in ("extra_config", "regex_config"):
        layers = stated.get(key) or {}
        rules.update({name: rule for name, rule in layers.items() if _bits(rule) < _DENSE_BITS})
    keys = ("bits", "group_size", "sym", "desc_act")
    return {
        **{key: stated[key] for key in keys if key in stated},
        "dynamic": {**rules, **(stated.get("dynamic") or {})},
    }


def _bits(rule: Config) -> int:
    bits = rule.get("bits")
    return bits if type(bits) is int else 0


def _floats(stated: Config) -> tuple[Dialect, Config]:
    """Layers in the entries of compressed-tensors; of layers that differ, the shapes of entries decide."""
    weights = {"num_bits": stated.get("bits", 8), "type": "float", "group_size": stated.get("group_size")}
    eight = {"num_bits": 8, "type": "float", "group_size": 32}
    groups = {f"group_{number}": {"targets": [], "weights": kind} for number, kind in enumerate((weights, eight))}
    return CompressedTensorsFormat(), {"quant_method": "compressed-tensors", "config_groups": groups}


def _fp8(stated: Config) -> tuple[Dialect, Config]:
    size = stated.get("group_size")
    block = {_BLOCK: size} if isinstance(size, list) else {}
    return Fp8Format(), {"quant_method": "fp8", **block}


_STATIC = ("static_kv_dtype", "static_attention_dtype")
_FORMATS = {
    **dict.fromkeys(_V1, lambda stated: _gptq(stated, V1)),
    **dict.fromkeys(_V2, lambda stated: _gptq(stated, V2)),
    **dict.fromkeys(_AWQ, _awq),
    **dict.fromkeys(_FLOATS, _floats),
    **dict.fromkeys(_FP8, _fp8),
}
