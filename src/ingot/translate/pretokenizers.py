"""Pre-tokenizers of byte-level BPE: llama.cpp's names, and the steps of ``tokenizer.json``.

The regular expressions are those of the models' published ``tokenizer.json``; names are from ``llama-vocab.cpp``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Steps(NamedTuple):
    """The steps of a pre-tokenizer.

    Parameters
    ----------
    splits : tuple of str
        Regular expressions to split at, in order.
    digits : bool
        Whether digits are split one by one.
    gpt2 : bool
        Whether GPT-2's expression is applied last.
    ignore_merges : bool
        Whether a word that is a token is never built by merges.
    threes : bool
        Whether runs of punctuation are split off first, and digits last, in threes from the left.
    """

    splits: tuple[str, ...] = ()
    digits: bool = False
    gpt2: bool = False
    ignore_merges: bool = False
    threes: bool = False


_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
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
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d"
    "\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4"
    "\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139"
    "\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a"
    "\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2"
    "\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
"""Letters with upper and lower case in an older version of Unicode, as the model's file lists them."""
_DEEPSEEK_LLM = (
    r"[\r\n]",
    rf"\s?[{_DEEPSEEK_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _DEEPSEEK_CODER[-1],
)
STEPS: Mapping[str, Steps] = {
    "gpt-2": Steps(gpt2=True),
    "llama-bpe": Steps((_LLAMA3,), ignore_merges=True),
    "dbrx": Steps((_LLAMA3,)),
    "qwen2": Steps((_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),)),
    "gpt-4o": Steps((_GPT4O,)),
    "tekken": Steps((_TEKKEN,), ignore_merges=True),
    "deepseek-v3": Steps(_DEEPSEEK3),
    "deepseek-llm": Steps(_DEEPSEEK_LLM, digits=True),
    "deepseek-coder": Steps(_DEEPSEEK_CODER, digits=True),
    "starcoder": Steps(digits=True, gpt2=True),
    "falcon": Steps(gpt2=True, threes=True),
}
ROBERTA = "roberta-bpe"
"""Like ``gpt-2``, with a token before and after each text, and two tokens between a pair of texts."""
BEGIN_WITH_BOS = frozenset(
    (
        "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano",
        "tekken", "chameleon",
    )
)  # fmt: skip
"""Names for which llama.cpp adds BOS before a text by default."""
_ALIASES = {
    **dict.fromkeys(("llama3", "llama-v3"), "llama-bpe"),
    **dict.fromkeys(("default", "mpt", "olmo", "jais", "phi-2", "trillion", ROBERTA), "gpt-2"),
    **dict.fromkeys(("refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), "starcoder"),
    **dict.fromkeys(("stablelm2", "megrez"), "qwen2"),
    "smaug-bpe": "dbrx",
}


def steps_of(name: str) -> Steps | None:
    """Return the steps for one of llama.cpp's names; None if the name is unsupported."""
    return STEPS.get(_ALIASES.get(name, name))


def name_of(value: Any, *, ignore_merges: bool) -> str | None:
    """Return llama.cpp's name for a ``pre_tokenizer``; None if there is no supported name.

    ``ignore_merges``: whether a word that is a token is never built by merges.
    """
    steps_read = _normalized_steps(value)
    candidates = [name for name, steps in STEPS.items() if _normalized_steps(pre_tokenizer(steps)) == steps_read]
    match = next((name for name in candidates if STEPS[name].ignore_merges == ignore_merges), None)
    return match or (candidates[0] if candidates else None)


def _normalized_steps(value: Any) -> list[tuple[Any, ...]]:
    """Return the parameters of the steps of a ``pre_tokenizer``, with the defaults of ``tokenizers``."""
    steps = value.get("pretokenizers", [value]) if isinstance(value, Mapping) else []
    return [_normalized_step(step) for step in steps] if isinstance(steps, list) else []


def _normalized_step(step: Any) -> tuple[Any, ...]:
    if not isinstance(step, Mapping):
        return (None,)
    step_type = step.get("type")
    if step_type == "ByteLevel":
        return step_type, step.get("use_regex", True) is True, step.get("add_prefix_space", True) is True
    if step_type == "Digits":
        return step_type, step.get("individual_digits") is True
    if step_type == "Punctuation":
        return step_type, step.get("behavior", "Isolated")
    pattern = step.get("pattern") if step_type == "Split" else None
    text = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    return (
        step_type,
        _canonical(text) if isinstance(text, str) else None,
        step.get("behavior"),
        step.get("invert") is True,
    )


def _canonical(text: str) -> str:
    """Return a regular expression with line ends and quotes in canonical spelling."""
    return text.replace("\r", r"\r").replace("\n", r"\n").replace('[!"#', r"[!\"#")


def pre_tokenizer(steps: Steps) -> dict[str, Any]:
    """Return the ``pre_tokenizer`` of ``tokenizer.json`` for the steps."""
    result: list[dict[str, Any]] = [{"type": "Punctuation", "behavior": "Contiguous"}] if steps.threes else []
    result += [_split(text) for text in steps.splits]
    result += [{"type": "Digits", "individual_digits": True}] if steps.digits else []
    result.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": steps.gpt2})
    result += [{"type": "Digits", "individual_digits": False}, _split("[0-9][0-9][0-9]")] if steps.threes else []
    return result[0] if len(result) == 1 else {"type": "Sequence", "pretokenizers": result}


def _split(text: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}
