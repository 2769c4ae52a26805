"""How byte-level tokenizers cut a text into words: llama.cpp's names, and the steps of ``tokenizer.json``.

Expressions are those of the models' own ``tokenizer.json`` as ``llama-vocab.cpp`` names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Steps(NamedTuple):
    """Expressions to split at, whether digits stand alone, whether GPT-2's expression follows, whole words first."""

    splits: tuple[str, ...] = ()
    digits: bool = False
    gpt2: bool = False
    whole: bool = False


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_SHORT}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _GPT4O.replace(_SHORT, "").replace(r"\p{N}{1,3}", r"\p{N}")
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _DEEPSEEK_WORDS,
)
_DEEPSEEK_CODER = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
)
STEPS: Mapping[str, Steps] = {
    "gpt-2": Steps(gpt2=True),
    "llama-bpe": Steps((_LLAMA3,), whole=True),
    "dbrx": Steps((_LLAMA3,)),
    "qwen2": Steps((_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),)),
    "gpt-4o": Steps((_GPT4O,)),
    "tekken": Steps((_TEKKEN,), whole=True),
    "deepseek-v3": Steps(_DEEPSEEK3),
    "deepseek-coder": Steps(_DEEPSEEK_CODER, digits=True),
    "starcoder": Steps(digits=True, gpt2=True),
}
_ALIASES = {
    **dict.fromkeys(("llama3", "llama-v3"), "llama-bpe"),
    **dict.fromkeys(("default", "mpt", "olmo", "jais", "phi-2", "trillion"), "gpt-2"),
    **dict.fromkeys(("refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), "starcoder"),
    **dict.fromkeys(("stablelm2", "megrez"), "qwen2"),
    "smaug-bpe": "dbrx",
}


def steps_of(name: str) -> Steps | None:
    """Return the steps of one of llama.cpp's names; None for one that is not known."""
    return STEPS.get(_ALIASES.get(name, name))


def name_of(found: Any, *, whole: bool) -> str | None:
    """Return llama.cpp's name of a ``pre_tokenizer``; None where it has none that is known.

    ``whole``: a word that is a token is not put together of merges.
    """
    read = _read(found)
    if read is None:
        return None
    alike = [name for name, steps in STEPS.items() if steps._replace(whole=False) == read]
    same = next((name for name in alike if STEPS[name].whole == whole), None)
    return same or (alike[0] if alike else None)


def _read(found: Any) -> Steps | None:
    steps = found.get("pretokenizers", [found]) if isinstance(found, Mapping) else []
    splits, digits, level = list[str](), False, None
    for step in steps if isinstance(steps, list) else []:
        kind = step.get("type") if isinstance(step, Mapping) else None
        if level is not None or kind not in ("Split", "Digits", "ByteLevel"):
            return None
        if kind == "ByteLevel":
            level = step.get("use_regex", True) is True
            if step.get("add_prefix_space", True) is True:
                return None
        elif kind == "Digits":
            digits = True
            if step.get("individual_digits") is not True:
                return None
        else:
            pattern = step.get("pattern")
            text = pattern.get("Regex") if isinstance(pattern, Mapping) else None
            if not isinstance(text, str) or digits or step.get("behavior") != "Isolated" or step.get("invert") is True:
                return None
            splits.append(_spelled(text))
    return None if level is None else Steps(tuple(splits), digits, level)


def _spelled(text: str) -> str:
    """Return an expression with line ends and quotes written in one way."""
    return text.replace("\r", r"\r").replace("\n", r"\n").replace('[!"#', r"[!\"#")


def pre_tokenizer(steps: Steps) -> dict[str, Any]:
    """Return the ``pre_tokenizer`` of ``tokenizer.json``."""
    made: list[dict[str, Any]] = [
        {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False} for text in steps.splits
    ]
    made += [{"type": "Digits", "individual_digits": True}] if steps.digits else []
    made.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": steps.gpt2})
    return made[0] if len(made) == 1 else {"type": "Sequence", "pretokenizers": made}
