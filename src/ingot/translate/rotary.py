"""The rotary embedding: its parameters in ``config.json``, and the metadata and tensors that llama.cpp has of them.

Formulas are those of transformers' ``modeling_rope_utils.py``; llama.cpp's tensors divide each frequency.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import log, sqrt
from typing import Any

import numpy as np

from ingot.model.tensor import Array
from ingot.translate.families import Family
from ingot.translate.keys import Typed
from ingot.translate.numbers import head_size, is_number, same, short

FREQUENCIES, LONG, SHORT = TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""All but the first are LongRoPE's."""
_THETA = "rope.freq_base"
_THETA_SLIDING = "rope.freq_base_swa"
_SCALING = "rope.scaling.type"
_FACTOR = "rope.scaling.factor"
_ORIGINAL = "rope.scaling.original_context_length"
_LOG = "rope.scaling.yarn_log_multiplier"
_ATTENTION = "rope.scaling.attn_factor"
_BETAS = {"beta_fast": "rope.scaling.yarn_beta_fast", "beta_slow": "rope.scaling.yarn_beta_slow"}
READ = (_THETA, _THETA_SLIDING, _SCALING, _FACTOR, _ORIGINAL, _LOG, _ATTENTION, *_BETAS.values())
"""GGUF's keys behind the architecture's name that ``to_config`` reads."""
_MSCALE = ("mscale", "mscale_all_dim")
_LOG_UNIT = 0.1  # llama.cpp has mscale_all_dim times the factor of YaRN's logarithm
_FULL = "full_attention"
_SLIDING = "sliding_attention"
_LARGEST_HEAD = 1 << 16
MOST_FACTORS = _LARGEST_HEAD // 2
_SCALINGS = {"linear": "linear", "yarn": "yarn"}
"""Of transformers, llama.cpp."""
_LONGROPE = "longrope"
_LONGROPES = ("longrope", "su")
_FACTORS = {"long_factor": LONG, "short_factor": SHORT}
_LONG_ARCH = "phi3"  # that of llama.cpp whose LongRoPE is carried
_THETA_OF_MOST = 10000.0
_THETAS = {"mixtral": 1000000.0, "gemma3_text": 1000000.0, "gpt_oss": 150000.0}
"""What transformers takes for ``rope_theta`` if a config states none, by model type."""
_KEYS = frozenset(
    (
        *("rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "low_freq_factor", "high_freq_factor"),
        *("long_factor", "short_factor", "original_max_position_embeddings", "max_position_embeddings"),
        *("attention_factor", "truncate", "finetuned", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),
        *("full_attention", "sliding_attention"),
    )
)
"""Parameters that the functions below read."""
_LENGTH = "original_max_position_embeddings"
_MOST = "max_position_embeddings"
_SHARE = "partial_rotary_factor"
_PHI3_LENGTH = 4096  # where Phi-3's config.json states none


def rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary embedding's parameters, wherever this version of transformers has put them.

    Where layers have different ones, those of layers that see all tokens.
    """
    stated = config.get("rope_parameters") or config.get("rope_scaling") or {}
    found = dict(stated) if isinstance(stated, Mapping) else {}
    if isinstance(found.get(_FULL), Mapping):
        found = dict(found[_FULL])
    if "rope_theta" in config:
        found.setdefault("rope_theta", config["rope_theta"])
    found.setdefault("rope_theta", _THETAS.get(str(config.get("model_type")), _THETA_OF_MOST))
    if _SHARE in config:
        found.setdefault(_SHARE, config[_SHARE])
    found.setdefault("rope_type", found.get("type", "default"))
    if found["rope_type"] in _LONGROPES or (found["rope_type"] == "yarn" and _FACTORS.keys() <= found.keys()):
        found["rope_type"] = _LONGROPE  # as the first of Phi-3's files call it otherwise
        length = config.get(_LENGTH, _PHI3_LENGTH if config.get("model_type") == "phi3" else None)
        if length is not None:
            found[_LENGTH] = length
    return found


def turned(config: Mapping[str, Any]) -> int:
    """Return how many of a head's numbers are turned; errors as ``head_size``."""
    size = head_size(config)
    share = rope_of(config).get(_SHARE, 1.0)
    return int(size * share) if isinstance(share, float) and 0 < share <= 1 else size


def to_metadata(config: Mapping[str, Any], family: Family) -> tuple[Typed, list[str]]:
    """Return GGUF metadata of the rotary embedding, and what of it llama.cpp has no word for."""
    found: Typed = {}
    lost = _rope_to(config, family, found)
    return found, lost


def tensors(config: Mapping[str, Any], family: Family) -> dict[str, Array]:
    """Return the tensors that llama.cpp has of the rotary embedding, f32 [numbers turned / 2]."""
    frequencies = _llama3_factors(config, family)
    if frequencies is not None:
        return {FREQUENCIES: frequencies}
    rope = rope_of(config)
    if rope["rope_type"] != _LONGROPE or _attention(config, rope) is None or family.arch != _LONG_ARCH:
        return {}
    found, size = {name: rope.get(key) for key, name in _FACTORS.items()}, turned(config)
    if size > _LARGEST_HEAD or not all(_are_factors(values, size // 2) for values in found.values()):
        return {}
    return {name: np.asarray(values, np.float32) for name, values in found.items()}


def _are_factors(found: Any, count: int) -> bool:
    """Whether this is a list of numbers that divide frequencies."""
    return isinstance(found, list) and len(found) == count and all(is_number(x) and 0 < x < 2**53 for x in found)


def _attention(config: Mapping[str, Any], rope: Mapping[str, Any]) -> float | None:
    """Return what LongRoPE multiplies queries and keys with; None where its numbers are none."""
    length = rope.get(_LENGTH)
    most = config.get(_MOST)
    if type(length) is not int or not 1 < length < 2**32 or type(most) is not int:
        return None
    stated = rope.get("attention_factor")
    factor = rope.get("factor")
    factor = most / length if factor is None else factor
    if isinstance(stated, int | float) and is_number(stated):
        return float(stated)
    if not is_number(factor) or not 0 < factor < 2**53:
        return None
    return sqrt(1 + log(factor) / log(length)) if factor > 1 else 1.0


def _rope_to(config: Mapping[str, Any], family: Family, found: Typed) -> list[str]:
    rope = rope_of(config)
    theta = rope.get("rope_theta")
    sliding = _sliding_rope(config).get("rope_theta")
    mscale, every = (rope.get(key) for key in _MSCALE)
    found |= _floats(family, {_THETA: theta, _THETA_SLIDING: sliding})
    kind = rope["rope_type"]
    made = tensors(config, family)
    if LONG in made:
        found[f"{family.arch}.{_SCALING}"] = ("string", _LONGROPE)
        found[f"{family.arch}.{_ORIGINAL}"] = ("u32", rope[_LENGTH])
        found |= _floats(family, {_ATTENTION: _attention(config, rope)})
    lost = [*_unread(config, rope, family)]
    if kind == "default" or made:
        return lost
    if kind not in _SCALINGS or not isinstance(rope.get("factor"), int | float):
        return [*lost, f"rope_type {str(kind)[:40]}"]
    found[f"{family.arch}.{_SCALING}"] = ("string", _SCALINGS[kind])
    found[f"{family.arch}.{_FACTOR}"] = ("f32", float(rope["factor"]))
    if isinstance(rope.get(_LENGTH), int):
        found[f"{family.arch}.{_ORIGINAL}"] = ("u32", rope[_LENGTH])
    scaled = _LOG_UNIT * every if isinstance(every, int | float) else None
    found |= _floats(family, {**{name: rope.get(key) for key, name in _BETAS.items()}, _LOG: scaled})
    lost += [
        f"rope_parameters {key}" for key in ("attention_factor", "truncate")
        if rope.get(key) is not None and rope[key] != (family.rope or {}).get(key, key == "truncate")
    ]  # fmt: skip
    return [*lost, "rope_parameters mscale"] if mscale != every else lost


def _unread(config: Mapping[str, Any], rope: Mapping[str, Any], family: Family) -> Iterator[str]:
    """Yield parameters of every scaling that llama.cpp does not read or this family's graph does not compute."""
    share = rope.get(_SHARE)
    if share not in (None, 1.0) and not family.partial and not family.latent:
        yield f"{_SHARE} {share!r:.40}"
    if _sliding_rope(config).get("rope_type", "default") != "default":
        yield f"rope_parameters of {_SLIDING}"
    yield from (
        f"rope_parameters {str(key)[:40]}" for key, value in rope.items() if key not in _KEYS and value is not None
    )


def _floats(family: Family, values: Mapping[str, Any]) -> Typed:
    """Return those of the values that are numbers."""
    numbers = {name: value for name, value in values.items() if is_number(value)}
    return {f"{family.arch}.{name}": ("f32", float(value)) for name, value in numbers.items()}


def _sliding_rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rotary parameters of layers with a sliding window, where they have their own."""
    stated = config.get("rope_parameters")
    found = stated.get(_SLIDING) if isinstance(stated, Mapping) else None
    local = config.get("rope_local_base_freq")
    if isinstance(found, Mapping):
        return found
    return {"rope_type": "default", "rope_theta": local} if is_number(local) else {}


def _llama3_factors(config: Mapping[str, Any], family: Family) -> Array | None:
    """Return what Llama 3.1's scaling divides each frequency of the rotary embedding by; None for another scaling.

    llama.cpp has them as a tensor. Waves longer than ``original_max_position_embeddings / low_freq_factor`` are
    stretched by ``factor``, those shorter than by ``high_freq_factor`` stay, between them goes smoothly (transformers,
    ``modeling_rope_utils.py``). f32 [head size / 2].
    """
    rope = rope_of(config)
    keys = ("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    if rope["rope_type"] != "llama3" or family.arch != "llama":
        return None
    numbers: list[Any] = [rope.get(key) for key in keys]
    if not all(is_number(value) and 0 < value < 2**53 for value in numbers) or numbers[2] == numbers[3]:
        return None
    theta, factor, low, high, length = map(float, numbers)
    size = head_size(config)
    if size > _LARGEST_HEAD:
        return None
    wave = 2 * np.pi * theta ** (np.arange(0, size, 2, dtype=np.float64) / size)
    smooth = np.clip((length / wave - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / factor + smooth)).astype(np.float32)


def to_config(
    metadata: Mapping[str, Any], family: Family, factors: Mapping[str, Array], found: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the keys of ``config.json`` that tell of the rotary embedding.

    Parameters
    ----------
    metadata : mapping
        Of a GGUF file.
    family : Family
    factors : mapping
        Tensors of ``TENSORS``, by their names.
    found : mapping
        The other keys of ``config.json``.
    """

    def said(name: str) -> Any:
        return metadata.get(f"{family.arch}.{name}")

    theta = said(_THETA)
    rope = dict[str, Any](rope_type="default")
    keys = dict[str, Any]()
    if is_number(theta):
        rope["rope_theta"] = keys["rope_theta"] = short(theta)
    size = found.get("head_dim")
    count = said("rope.dimension_count")
    if not family.latent and type(size) is int and type(count) is int and 0 < count < size:
        rope[_SHARE] = count / size
    scaling = next((key for key, name in _SCALINGS.items() if name == said(_SCALING)), None)
    if has_long_factors(factors) and family.arch == _LONG_ARCH:
        rope |= {key: [short(float(value)) for value in factors[name]] for key, name in _FACTORS.items()}
        keys[_LENGTH] = rope[_LENGTH] = said(_ORIGINAL) if type(said(_ORIGINAL)) is int else found.get(_MOST)
        rope["rope_type"] = _LONGROPE
        attention = said(_ATTENTION) if is_number(said(_ATTENTION)) else 1.0
        if not same(attention, _attention(found, rope)):
            rope["attention_factor"] = short(attention)
    elif scaling is not None:
        rope |= {"rope_type": scaling, "factor": short(said(_FACTOR) or 1.0), **(family.rope or {})}
        if said(_ORIGINAL) is not None:
            rope[_LENGTH] = said(_ORIGINAL)
        rope |= {key: short(said(name)) for key, name in _BETAS.items() if is_number(said(name))}
        if is_number(said(_LOG)):
            rope |= dict.fromkeys(_MSCALE, float(f"{said(_LOG) / _LOG_UNIT:.6g}"))
    if family.rope_by_layer:
        local = {"rope_type": "default", "rope_theta": short(said(_THETA_SLIDING) or 10000.0)}
        return {"rope_parameters": {_FULL: rope, _SLIDING: local}}
    return {**keys, "rope_parameters": rope}


def has_long_factors(factors: Mapping[str, Array]) -> bool:
    """Whether these are the factors of LongRoPE, of texts that are long and of those that are not."""
    long = factors.get(LONG)
    brief = factors.get(SHORT)
    return long is not None and brief is not None and long.shape == brief.shape and long.ndim == 1


def agrees(stated: Mapping[str, Any], read: Mapping[str, Any]) -> bool:
    """Whether a ``config.json`` says of the rotary embedding what is read in a file, or what no file can say."""
    rope, new = rope_of(stated), rope_of(read)
    kind = rope["rope_type"]
    longer = new["rope_type"] == _LONGROPE
    if kind not in ("default", *_SCALINGS) and not longer:
        return True
    if longer and (kind != _LONGROPE or not same(_attention(stated, rope), _attention(read, new))):
        return False
    local = _sliding_rope(stated)
    passed = {_SHARE, *(("attention_factor",) if longer else ())}
    return all(same(rope.get(key), value) for key, value in new.items() if key not in passed) and all(
        same(local.get(key), value) for key, value in _sliding_rope(read).items()
    )
