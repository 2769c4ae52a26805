"""Conversion of the rotary embedding's parameters between ``config.json`` and llama.cpp's metadata and tensors.

Formulas are those of transformers' ``modeling_rope_utils.py``. llama.cpp divides each frequency by a value of its
tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log, sqrt
from typing import Any

import numpy as np

from ingot.model.tensor import Array
from ingot.translate.config_numbers import head_size, is_number, number_error, same_value, shorten
from ingot.translate.families import FAMILIES, Family
from ingot.translate.keys import Typed

FREQUENCIES, LONG, SHORT = TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Names of llama.cpp's tensors of the rotary embedding; the second and third are for LongRoPE."""
_THETA = "rope.freq_base"
_THETA_SLIDING = "rope.freq_base_swa"
_SCALING = "rope.scaling.type"
_FACTOR = "rope.scaling.factor"
_ORIGINAL = "rope.scaling.original_context_length"
_LOG = "rope.scaling.yarn_log_multiplier"
_ATTENTION = "rope.scaling.attn_factor"
_SECTIONS_KEY = "rope.dimension_sections"
_BETAS = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
READ = (_THETA, _THETA_SLIDING, _SCALING, _FACTOR, _ORIGINAL, _LOG, _ATTENTION, _SECTIONS_KEY, *_BETAS.values())
"""GGUF's keys without the architecture's name that ``to_config`` reads."""
_MSCALE = ("mscale", "mscale_all_dim")
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_MAX_HEAD = 1 << 16
MAX_FACTORS = _MAX_HEAD // 2
_SCALINGS = {"linear": "linear", "yarn": "yarn"}
"""Scaling types: transformers' name to llama.cpp's."""
_LONGROPE = "longrope"
_LONGROPES = ("longrope", "su")
_LLAMA3 = "llama3"
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_NEGLIGIBLE = 1e-5
"""Radians per position up to which no note reports that llama.cpp does not rotate a frequency. Qwen3-VL has 4e-7.
"""
_NEAR = 1e-5
"""Largest relative difference of divisors that count as equal, because they may be computed in f32 or f64."""
_FACTORS = {"long_factor": LONG, "short_factor": SHORT}
_DEFAULT_THETA = 10000.0
_KEYS = frozenset(
    (
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor"),
        *("long_factor", "short_factor", "original_max_position_embeddings", "max_position_embeddings"),
        *("attention_factor", "truncate", "finetuned", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("full_attention", "sliding_attention"),
    )
)
"""Parameters that the functions in this module read."""
_LENGTH = "original_max_position_embeddings"
_POSITIONS = "max_position_embeddings"
_PARTIAL = "partial_rotary_factor"
_SECTIONS = "mrope_section"
MULTIMODAL_KEYS = (_SECTIONS, "mrope_interleaved")
_MULTIMODAL = "mrope"
"""The type of rotary embedding in Qwen's multimodal models. For text, it equals the default type."""
_ROTATED = "rotary_dim"
_PHI3_LENGTH = 4096  # default if Phi-3's config.json states none


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding's parameters from any of the keys in which transformers has stored them.

    If layers have different parameters, those of layers with full attention are returned.
    """
    declared = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = dict(declared) if isinstance(declared, Mapping) else {}
    if isinstance(rope.get(_FULL), Mapping):
        rope = dict(rope[_FULL])
    if "rope_theta" in config:
        rope.setdefault("rope_theta", config["rope_theta"])
    rope.setdefault("rope_theta", _default_theta(config))
    if _PARTIAL in config:
        rope.setdefault(_PARTIAL, config[_PARTIAL])
    if type(config.get(_ROTATED)) is int and config[_ROTATED] > 0:
        rope.setdefault(_PARTIAL, config[_ROTATED] / head_size(config))
    family = FAMILIES.get(str(config.get("model_type")))
    if family is not None and family.partial_default != 1:
        rope.setdefault(_PARTIAL, family.partial_default)
    rope.setdefault("rope_type", rope.get("type", "default"))
    rope["rope_type"] = "default" if rope["rope_type"] == _MULTIMODAL else rope["rope_type"]
    if rope["rope_type"] in _LONGROPES or (rope["rope_type"] == "yarn" and _FACTORS.keys() <= rope.keys()):
        rope["rope_type"] = _LONGROPE  # early Phi-3 files use "su" or "yarn" for it
        length = config.get(_LENGTH, _PHI3_LENGTH if config.get("model_type") == "phi3" else None)
        if length is not None:
            rope[_LENGTH] = length
    return rope


def _default_theta(config: Mapping[str, Any]) -> float:
    """Return transformers' default of ``rope_theta`` for the config's model type."""
    family = FAMILIES.get(str(config.get("model_type")))
    return _DEFAULT_THETA if family is None else family.theta


def rotated_size(config: Mapping[str, Any]) -> int:
    """Return the number of dimensions of a head that the rotary embedding rotates.

    Raises ``UnsupportedError`` ``architecture.config``.
    """
    size = head_size(config)
    share = rope_of(config).get(_PARTIAL, 1.0)
    return int(size * share) if isinstance(share, float) and 0 < share <= 1 else size


def to_metadata(config: Mapping[str, Any], family: Family) -> tuple[Typed, list[str]]:
    """Return GGUF metadata of the rotary embedding, and descriptions of parameters that llama.cpp has no key for."""
    metadata: Typed = {}
    dropped = _add_metadata(config, family, metadata)
    if family.sections:
        sections = rope_of(config).get(_SECTIONS, [*family.sections])
        if not isinstance(sections, list) or len(sections) > 4 or not all(type(x) is int and x >= 0 for x in sections):
            raise number_error(_SECTIONS, "a list of up to four numbers", sections)
        if sum(sections) > head_size(config):  # llama.cpp ends the process
            raise number_error(_SECTIONS, f"a sum of at most the head's {head_size(config)} dimensions", sections)
        metadata[f"{family.arch}.{_SECTIONS_KEY}"] = ("array:i32", [*sections, 0, 0, 0, 0][:4])
        dropped += _unrotated_frequencies(config, family, sections)
    return metadata, dropped


def _unrotated_frequencies(config: Mapping[str, Any], family: Family, sections: list[int]) -> Iterator[str]:
    """Yield a note if llama.cpp does not rotate frequencies that transformers rotates.

    llama.cpp assigns frequencies to the three sections in turn, and does not rotate frequencies beyond a section's
    length. transformers rotates these frequencies by the position of the first section.
    """
    lengths = [*sections, 0, 0, 0][:3]
    count = rotated_size(config) // 2
    theta = rope_of(config)["rope_theta"]
    if not family.alternates or not is_number(theta) or theta <= 1 or count > _MAX_HEAD:
        return
    beyond = [index for index in range(count) if index >= 3 * lengths[index % 3]]
    if any(theta ** (-index / count) > _NEGLIGIBLE for index in beyond):
        yield f"{_SECTIONS} {sections}: llama.cpp's {family.arch} does not rotate {len(beyond)} of {count} frequencies"


def tensors(config: Mapping[str, Any], family: Family) -> dict[str, Array]:
    """Return llama.cpp's tensors of the rotary embedding, f32 [rotated dimensions / 2]."""
    frequencies = _llama3_factors(config, family)
    if frequencies is not None:
        return {FREQUENCIES: frequencies}
    rope = rope_of(config)
    if rope["rope_type"] != _LONGROPE or _attention_factor(config, rope) is None or not family.long_factors:
        return {}
    factors = {name: rope.get(key) for key, name in _FACTORS.items()}
    size = rotated_size(config)
    if size > _MAX_HEAD or not all(_are_factors(values, size // 2) for values in factors.values()):
        return {}
    return {name: np.asarray(values, np.float32) for name, values in factors.items()}


def _are_factors(value: Any, count: int) -> bool:
    """Return whether a value is a list of ``count`` positive divisors of frequencies."""
    return isinstance(value, list) and len(value) == count and all(is_number(x) and 0 < x < 2**53 for x in value)


def _attention_factor(config: Mapping[str, Any], rope: Mapping[str, Any]) -> float | None:
    """Return LongRoPE's scaling factor of queries and keys; None if the parameters are invalid."""
    length = rope.get(_LENGTH)
    positions = config.get(_POSITIONS)
    if type(length) is not int or not 1 < length < 2**32 or type(positions) is not int:
        return None
    declared = rope.get("attention_factor")
    factor = rope.get("factor")
    factor = positions / length if factor is None else factor
    if isinstance(declared, int | float) and is_number(declared):
        return float(declared)
    if not is_number(factor) or not 0 < factor < 2**53:
        return None
    return sqrt(1 + log(factor) / log(length)) if factor > 1 else 1.0


def _add_metadata(config: Mapping[str, Any], family: Family, metadata: Typed) -> list[str]:
    rope = rope_of(config)
    theta = rope.get("rope_theta")
    sliding = sliding_rope_of(config).get("rope_theta")
    mscale, mscale_all = (rope.get(key) for key in _MSCALE)
    metadata |= _floats(family, {_THETA: theta, _THETA_SLIDING: sliding})
    rope_type = rope["rope_type"]
    factor_tensors = tensors(config, family)
    if LONG in factor_tensors:
        metadata[f"{family.arch}.{_SCALING}"] = ("string", _LONGROPE)
        metadata[f"{family.arch}.{_ORIGINAL}"] = ("u32", rope[_LENGTH])
        metadata |= _floats(family, {_ATTENTION: _attention_factor(config, rope)})
    dropped = [*_unsupported_parameters(config, rope, family)]
    if rope_type == "default" or factor_tensors:
        return dropped
    if rope_type not in _SCALINGS or not isinstance(rope.get("factor"), int | float):
        return [*dropped, f"rope_type {str(rope_type)[:40]}"]
    metadata[f"{family.arch}.{_SCALING}"] = ("string", _SCALINGS[rope_type])
    metadata[f"{family.arch}.{_FACTOR}"] = ("f32", float(rope["factor"]))
    if isinstance(rope.get(_LENGTH), int):
        metadata[f"{family.arch}.{_ORIGINAL}"] = ("u32", rope[_LENGTH])
    scaled = family.log_unit * mscale_all if isinstance(mscale_all, int | float) else None
    metadata |= _floats(family, {**{name: rope.get(key) for key, name in _BETAS.items()}, _LOG: scaled})
    dropped += [
        f"rope_parameters {key}" for key in ("attention_factor", "truncate")
        if rope.get(key) is not None and rope[key] != (family.rope or {}).get(key, key == "truncate")
    ]  # fmt: skip
    return [*dropped, "rope_parameters mscale"] if mscale != mscale_all else dropped


def _unsupported_parameters(config: Mapping[str, Any], rope: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield rotary parameters that llama.cpp does not read, or that its graph of this family does not use."""
    read = {*_KEYS, *(MULTIMODAL_KEYS if family.sections else ())}
    carried = {key for key, _, _ in family.keys}
    share = rope.get(_PARTIAL)
    if share not in (None, 1.0) and not family.partial and not family.latent:
        yield f"{_PARTIAL} {share!r:.40}"
    if sliding_rope_of(config).get("rope_type", "default") != "default":
        yield f"rope_parameters of {_SLIDING}"
    yield from (
        f"rope_parameters {str(key)[:40]}"
        for key, value in rope.items()
        if key not in read and value is not None and f"rope_parameters.{key}" not in carried
    )


def _floats(family: Family, values: Mapping[str, Any]) -> Typed:
    """Return f32 metadata for those of ``values`` that are numbers."""
    values = {name: value for name, value in values.items() if is_number(value)}
    return {f"{family.arch}.{name}": ("f32", float(value)) for name, value in values.items()}


def sliding_rope_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the separate rotary parameters of layers with a sliding window; empty if there are none."""
    declared = config.get("rope_parameters")
    sliding = declared.get(_SLIDING) if isinstance(declared, Mapping) else None
    local = config.get("rope_local_base_freq")
    if isinstance(sliding, Mapping):
        return sliding
    return {"rope_type": "default", "rope_theta": local} if is_number(local) else {}


def _llama3_factors(config: Mapping[str, Any], family: Family) -> Array | None:
    """Return the divisors of Llama 3.1's scaling if llama.cpp's graph of the family uses them; None otherwise."""
    return llama3_factors(rope_of(config), head_size(config)) if family.rope_factors else None


def llama3_factors(rope: Mapping[str, Any], size: int) -> Array | None:
    """Return the divisors of Llama 3.1's scaling for each frequency, f32 [size / 2]; None for another scaling.

    llama.cpp stores them as a tensor. Wavelengths longer than ``original_max_position_embeddings / low_freq_factor``
    are stretched by ``factor``, and those below ``original_max_position_embeddings / high_freq_factor`` are unchanged.
    Between the limits the divisor is interpolated (transformers, ``modeling_rope_utils.py``).
    """
    if rope["rope_type"] != _LLAMA3 or size > _MAX_HEAD:
        return None
    values: list[Any] = [rope.get(key) for key in ("rope_theta", *_LLAMA3_KEYS)]
    if not all(is_number(value) and 0 < value < 2**53 for value in values) or values[2] == values[3]:
        return None
    theta, factor, low, high, length = map(float, values)
    wave = 2 * np.pi * theta ** (np.arange(0, size, 2, dtype=np.float64) / size)
    smooth = np.clip((length / wave - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def llama3_scaling(factors: Array, theta: float) -> dict[str, Any] | None:
    """Return the parameters of Llama 3.1's scaling that give these divisors of frequencies; None if none do.

    The divisors determine ``factor`` and the limits ``original_max_position_embeddings / low_freq_factor`` and ``/
    high_freq_factor``. First the limits of Llama 3 are tried. Then a low factor of 1 is tried, with limits that follow
    from the interpolated divisors.
    """
    if factors.ndim != 1 or not factors.size or not np.isfinite(factors).all() or factors.min() < 1 - _NEAR:
        return None
    factor = shorten(float(factors.max()))
    candidates = [(1.0, 4.0, 8192)]
    wave = 2 * np.pi * theta ** (np.arange(factors.size, dtype=np.float64) / factors.size)
    between = (factors > 1 + _NEAR) & (factors < factors.max() * (1 - _NEAR))
    if between.sum() > 1:
        smooth = (1 / factors[between].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
        slope, offset = np.polyfit(1 / wave[between], smooth, 1)
        if offset < 0 < slope:
            length = round(float(-slope / offset))
            candidates.append((1.0, float(f"{1 - 1 / offset:.4g}"), length))
    for low, high, length in candidates:
        scaling = dict(zip(_LLAMA3_KEYS, (factor, low, high, length), strict=True))
        expected = llama3_factors({"rope_type": _LLAMA3, "rope_theta": theta, **scaling}, 2 * factors.size)
        if factor > 1 and expected is not None and np.allclose(factors, expected, rtol=_NEAR, atol=0):
            return {"rope_type": _LLAMA3, **scaling}
    return None


def states_tensors(config: Mapping[str, Any]) -> bool:
    """Return whether ``config.json`` declares a scaling that llama.cpp reads from tensors of the file."""
    return rope_of(config)["rope_type"] in (_LONGROPE, _LLAMA3)


def to_config(
    metadata: Mapping[str, Any], family: Family, factors: Mapping[str, Array], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of ``config.json`` that describe the rotary embedding.

    Parameters
    ----------
    metadata : mapping
        A GGUF file's metadata.
    family : Family
    factors : mapping
        Values of the tensors in ``TENSORS``, by name.
    config : mapping
        The other keys of ``config.json``.
    """

    def read_value(name: str) -> Any:
        return metadata.get(f"{family.arch}.{name}")

    theta = read_value(_THETA)
    rope = dict[str, Any](rope_type="default")
    keys = dict[str, Any]()
    if is_number(theta):
        rope["rope_theta"] = keys["rope_theta"] = shorten(theta)
    size = config.get("head_dim")
    count = read_value("rope.dimension_count")
    if not family.latent and type(size) is int and type(count) is int and 0 < count < size:
        rope[_PARTIAL] = count / size
    scaling = next((key for key, name in _SCALINGS.items() if name == read_value(_SCALING)), None)
    if has_long_factors(factors) and family.long_factors:
        rope |= {key: [shorten(float(value)) for value in factors[name]] for key, name in _FACTORS.items()}
        keys[_LENGTH] = rope[_LENGTH] = (
            read_value(_ORIGINAL) if type(read_value(_ORIGINAL)) is int else config.get(_POSITIONS)
        )
        rope["rope_type"] = _LONGROPE
        attention = read_value(_ATTENTION) if is_number(read_value(_ATTENTION)) else 1.0
        if not same_value(attention, _attention_factor(config, rope)):
            rope["attention_factor"] = shorten(attention)
    elif FREQUENCIES in factors and (llama3 := llama3_scaling(factors[FREQUENCIES], rope.get("rope_theta", 1e4))):
        rope |= llama3
    elif scaling is not None:
        rope |= {"rope_type": scaling, "factor": shorten(read_value(_FACTOR) or 1.0), **(family.rope or {})}
        if read_value(_ORIGINAL) is not None:
            rope[_LENGTH] = read_value(_ORIGINAL)
        rope |= {key: shorten(read_value(name)) for key, name in _BETAS.items() if is_number(read_value(name))}
        if is_number(read_value(_LOG)):
            rope |= dict.fromkeys(_MSCALE, float(f"{read_value(_LOG) / family.log_unit:.6g}"))
    if family.rope_by_layer:
        local = {"rope_type": "default", "rope_theta": shorten(read_value(_THETA_SLIDING) or 10000.0)}
        return {"rope_parameters": {_FULL: rope, _SLIDING: local}}
    return {**keys, "rope_parameters": rope}


def has_long_factors(factors: Mapping[str, Array]) -> bool:
    """Return whether LongRoPE's long and short factors are present and have equal shapes."""
    long = factors.get(LONG)
    brief = factors.get(SHORT)
    return long is not None and brief is not None and long.shape == brief.shape and long.ndim == 1


def has_same_rotary(original: Mapping[str, Any], read: Mapping[str, Any]) -> bool:
    """Return whether the original ``config.json`` has the rotary parameters that were read from a file.

    Parameters that GGUF cannot store are not compared.
    """
    rope = rope_of(original)
    new = rope_of(read)
    rope_type = rope["rope_type"]
    if new["rope_type"] == _LLAMA3:
        size = head_size(original)
        factors = (llama3_factors(parameters, size) for parameters in (rope, new))
        before, after = (np.ones(1) if values is None else values for values in factors)
        is_close = bool(np.allclose(before, after, rtol=_NEAR))
        return is_close and same_value(rope.get("rope_theta"), new.get("rope_theta"))
    longer = new["rope_type"] == _LONGROPE
    if rope_type not in ("default", *_SCALINGS) and not longer:
        return True
    if longer and (
        rope_type != _LONGROPE or not same_value(_attention_factor(original, rope), _attention_factor(read, new))
    ):
        return False
    local = sliding_rope_of(original)
    skipped = {_PARTIAL, *(("attention_factor",) if longer else ())}
    return all(same_value(rope.get(key), value) for key, value in new.items() if key not in skipped) and all(
        same_value(local.get(key), value) for key, value in sliding_rope_of(read).items()
    )
