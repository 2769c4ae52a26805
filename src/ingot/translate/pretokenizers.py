"""Pre-tokenizers of byte-level BPE: llama.cpp's names, and the regular expressions of each name.

The names and their behaviour are those of ``llama-vocab.cpp`` and ``unicode.cpp``. The expressions are written for the
package ``tokenizers``. If llama.cpp approximates a model's published expressions, ``STEPS`` has the approximation, and
``PUBLISHED`` has the model's expressions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple


class Steps(NamedTuple):
    """A pre-tokenizer of llama.cpp.

    Parameters
    ----------
    splits : tuple of str
        Regular expressions at which text is split, in order.
    ignore_merges : bool
        Whether a word that is a token is never built by merges.
    bytewise : bool
        Whether tokens are spelled with a character per byte; otherwise they are text, with marks for spaces.
    """

    splits: tuple[str, ...]
    ignore_merges: bool = False
    bytewise: bool = True


class Match(NamedTuple):
    """llama.cpp's name for a tokenizer's pre-tokenizer.

    Parameters
    ----------
    name : str
    difference : str
        How llama.cpp splits text differently; empty if it does not.
    """

    name: str
    difference: str = ""


_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_END = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _END
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"


def _cased(upper: str, lower: str, suffix: str = _SHORT + "?", digits: str = r"\p{N}{1,3}") -> str:
    """Return GPT-4o's expression with the given character classes of upper-case and lower-case letters."""
    before = r"[^\r\n\p{L}\p{N}]?"
    words = f"{before}[{upper}]*[{lower}]+{suffix}|{before}[{upper}]+[{lower}]*{suffix}"
    return f"{words}|{digits}|{_SIGNS}{_END}"


# llama.cpp has upper and lower case of ASCII only, and for some names no letters with combining marks.
_LETTERS = (r"\p{L}&&[^a-z]", r"\p{L}&&[^A-Z]")
_MARKED = (r"\p{L}\p{M}&&[^a-z]", r"\p{L}\p{M}&&[^A-Z]")
_CASELESS = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_SHORT}?|\p{{N}}{{1,3}}|{_SIGNS}{_END}"
_HAN = "\u4e00-\u9fff\u3400-\u4dbf\U00020000-\U0002a6df\U0002a700-\U0002ebef\uf900-\ufaff\U0002f800-\U0002fa1f"
_KIMI = (
    rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_SHORT}?|\p{{N}}{{1,3}}"
    rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_END}"
)
_KIMI_PUBLISHED = r"[\p{Han}]+|" + _cased(rf"{_UPPER}&&[^\p{{Han}}]", rf"{_LOWER}&&[^\p{{Han}}]").replace(
    "\\n/]", "\\n]"
)
# The demo model's (ingot.demo.tokenizer).
_DEMO_WORDS = r" ?[^\W\d_]+| ?\d{1,3}| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+"
_THREES_FROM_RIGHT = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
_DEEPSEEK_WORDS = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
    + _END
)
_CHINESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK3 = (r"\p{N}{1,3}", _CHINESE, _DEEPSEEK_WORDS)
_DEEPSEEK_CODER = (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")
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
    r"\p{N}+",
)
_YOUTU_SCRIPTS = (
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_FALCON_SIGNS = r"[\p{P}\$\+<=>\^~\|`]+"
_THREE_DIGITS = "[0-9][0-9][0-9]"
_BAILING_TAIL = r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_LINES = r"[^\n]+|[\n]+"
_JAIS2_SPACES = "".join(rf"\s{{{2**power}}}(?!\S)|" for power in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s{1}"
STEPS: Mapping[str, Steps] = {
    "gpt-2": Steps((_GPT2,)),
    "llama-bpe": Steps((_LLAMA3,), ignore_merges=True),
    "dbrx": Steps((_LLAMA3,)),
    "qwen2": Steps((_QWEN2,)),
    "qwen35": Steps(
        (_SHORT + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _END,),
    ),
    "gpt-4o": Steps((_cased(*_LETTERS),)),
    "tekken": Steps((_cased(*_LETTERS, "", r"\p{N}"),), ignore_merges=True),
    "granite-embed-multi-97m": Steps((_cased(*_MARKED),), ignore_merges=True),
    "youtu": Steps((_YOUTU_SCRIPTS, _CASELESS.replace("{1,3}", "")), ignore_merges=True),
    "tiny_aya": Steps((_THREES_FROM_RIGHT, _CASELESS)),
    "kimi-k2": Steps((_KIMI,)),
    "deepseek-v3": Steps(_DEEPSEEK3),
    "deepseek-llm": Steps(_DEEPSEEK_LLM),
    "deepseek-coder": Steps((*_DEEPSEEK_CODER, r"\p{N}")),
    "spark2_5": Steps(
        (*_DEEPSEEK3[:2], _DEEPSEEK_WORDS.replace(r"+[\r\n]*|\s*[\r\n]+|", r"+|[\r\n]|"), r"\p{N}"),
    ),
    "afmoe": Steps((_THREES_FROM_RIGHT, _AFMOE_SCRIPTS, _DEEPSEEK_WORDS)),
    "minicpm5": Steps((r"\p{N}{1,3}", _LLAMA3.replace("{1,3}", "+")), ignore_merges=True),
    "starcoder": Steps((r"\p{N}", _GPT2)),
    "falcon": Steps((_FALCON_SIGNS, _GPT2, _THREE_DIGITS)),
    "default": Steps((_FALCON_SIGNS.replace("`", ""), _GPT2, r"\p{N}+", _THREE_DIGITS)),
    "jais-2": Steps((_LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + _JAIS2_SPACES,)),
    "bloom": Steps((_BLOOM,)),
    "viking": Steps((_BLOOM, r"\p{N}")),
    "chameleon": Steps(
        (
            "<sentinel:[0-9]+>",
            "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",
            r"([\t\n]|    |  )",
            r"\p{N}",
            r"[\p{P}!-/:-@\[-`{-~]",
            _GPT2,
        )
    ),
    "superbpe": Steps((r"\p{N}+", "(?=([0-9]{3})+(?![0-9]))")),
    "bailingmoe": Steps((r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}" + _BAILING_TAIL,)),
    "seed-coder": Steps((_QWEN2.replace(r"\p{N}|", r"\p{N}{1}|").replace(r"\p{N}]+[\r\n]*", r"\p{N}\r\n]+"),)),
    "ufakzeka": Steps((_QWEN2.removeprefix(_SHORT + "|"),)),
    "laguna": Steps((_LINES, _QWEN2)),
    "exaone-moe": Steps(
        (
            _SHORT + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
            r"|\s*[\r\n]|\s+(?!\S)|\s+",
        )
    ),
    "glm4": Steps((_LLAMA3,), ignore_merges=True),
    "gemma4": Steps((_LINES,), bytewise=False),
    "sarvam-moe": Steps((_LINES,), bytewise=False),
}
"""The pre-tokenizers of llama.cpp by name, without the names in ``ALIASES``."""
ROBERTA = "roberta-bpe"
"""Splits like ``gpt-2``, but adds a token before and after each text, and two tokens between a pair of texts."""
SEPARATED = frozenset((ROBERTA, "jina-v1-en", "jina-v2-code"))
"""Names for which llama.cpp adds a separator after a text by default."""
_ALIASES_BY_NAME: Mapping[str, tuple[str, ...]] = {
    "llama-bpe": (*("llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),),
    "gpt-2": (
        *("phi-2", "jina-es", "jina-de", "gigachat", "jina-v2-es", "jina-v2-de", "a.x-4.0", "mellum", "modern-bert"),
        *("mpt", "olmo", "jais", "trillion", "granite-docling", "exaone4", *sorted(SEPARATED)),
    ),
    "starcoder": ("refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b", "mellum2"),
    "qwen2": (*("stablelm2", "megrez", "deepseek-r1-qwen", "kormo", "f2llmv2", "hunyuan", "solar-open", "grok-2"),),
    "dbrx": ("smaug-bpe", "chatglm-bpe"),
    "glm4": ("glm5",),
    "gpt-4o": ("llama4", "kanana2", "talkie", "minimax-m2"),
    "deepseek-v3": ("hunyuan-dense", "hy_v4", "joyai-llm"),
    "bloom": ("poro-chat", "gpt3-finnish"),
    "tiny_aya": ("cohere2moe",),
    "bailingmoe": ("bailingmoe2", "llada-moe"),
    "gemma4": ("granite-embed-multi-311m",),
}
ALIASES: Mapping[str, str] = {alias: name for name, aliases in _ALIASES_BY_NAME.items() for alias in aliases}
"""Other names of llama.cpp, and the name in ``STEPS`` that splits equally."""
BEGIN_WITH_BOS = frozenset(("llama-bpe", *_ALIASES_BY_NAME["llama-bpe"], "tekken", "chameleon"))
"""Names for which llama.cpp adds BOS before a text by default."""
_MARKS = "words with combining marks"
_CASES = "words of mixed case"
PUBLISHED: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("gpt-4o", (_cased(_UPPER, _LOWER),), f"{_MARKS}, and {_CASES} outside of ASCII"),
    ("tekken", (_cased(_UPPER, _LOWER, "", r"\p{N}"),), f"{_MARKS}, and {_CASES} outside of ASCII"),
    ("youtu", (_YOUTU_SCRIPTS, _cased(_UPPER, _LOWER, digits=r"\p{N}")), _CASES),
    ("tiny_aya", (r"\d{1,3}(?=(?:\d{3})*\b)", _cased(_UPPER, _LOWER)), f"{_CASES}, and digits before letters"),
    ("kimi-k2", (_KIMI_PUBLISHED,), f"{_MARKS}, and {_CASES}"),
    (
        "afmoe",
        (_THREES_FROM_RIGHT, _AFMOE_SCRIPTS.replace("\u8c48", "\uf900"), _DEEPSEEK_WORDS),
        "characters of private use",
    ),
    ("deepseek-llm", (*_DEEPSEEK_LLM[:-1], r"\p{N}"), "numbers"),
    ("superbpe", (r"\p{N}+", r"(?=(\d{3})+(?!\d))"), "digits outside of ASCII"),
    ("gpt-2", (_DEMO_WORDS,), "numbers and shortened words"),
)
"""Names of llama.cpp that only approximate published expressions, these expressions, and the texts that differ.
"""


_FALCON_PUBLISHED: Mapping[str, Any] = {
    "pretokenizers": [
        {"type": "Punctuation", "behavior": "Contiguous"},
        {"type": "ByteLevel", "add_prefix_space": False},
        {"type": "Digits", "individual_digits": False},
        {"type": "Split", "pattern": {"Regex": _THREE_DIGITS}, "behavior": "Isolated"},
    ]
}
"""Falcon's steps, of which the last two split the characters that stand for bytes."""


def steps_of(name: str) -> Steps | None:
    """Return the steps of one of llama.cpp's names; None if Ingot does not support the name."""
    return STEPS.get(ALIASES.get(name, name))


def candidates(*, ignore_merges: bool) -> Iterator[tuple[Match, tuple[str, ...]]]:
    """Yield all names with their expressions; names with the given ``ignore_merges`` come first."""
    names = [name for name, steps in STEPS.items() if steps.bytewise]
    for name in sorted(names, key=lambda name: STEPS[name].ignore_merges != ignore_merges):
        yield Match(name), STEPS[name].splits
    for name, splits, difference in PUBLISHED:
        yield Match(name, difference), splits


def match_steps(value: Any, *, ignore_merges: bool) -> Match | None:
    """Return llama.cpp's name for a ``pre_tokenizer`` whose steps are in the table; None if they are not.

    ``ignore_merges`` states whether a word that is a token is never built by merges.
    """
    steps_read = normalized_steps(value)
    if steps_read == normalized_steps(_FALCON_PUBLISHED):
        return Match("falcon", "numbers outside of ASCII")
    for match, splits in candidates(ignore_merges=ignore_merges):
        if steps_read == normalized_steps(pre_tokenizer(Steps(splits))):
            return match
    return None


def normalized_steps(value: Any) -> list[tuple[Any, ...]]:
    """Return the parameters of each step of a ``pre_tokenizer``, with the defaults of ``tokenizers`` filled in."""
    steps = value.get("pretokenizers", [value]) if isinstance(value, Mapping) else []
    return [part for step in steps for part in _normalized_step(step)] if isinstance(steps, list) else []


def _normalized_step(step: Any) -> list[tuple[Any, ...]]:
    if not isinstance(step, Mapping):
        return [(None,)]
    step_type = step.get("type")
    if step_type == "ByteLevel":
        split = [("Split", _canonical(_GPT2))] if step.get("use_regex", True) is True else []
        return [*split, (step_type, step.get("add_prefix_space", True) is True)]
    if step_type == "Digits" and step.get("individual_digits") is True:
        return [("Split", r"\p{N}")]
    if step_type == "Punctuation" and step.get("behavior") == "Contiguous":
        return [("Split", _FALCON_SIGNS)]
    pattern = step.get("pattern") if step_type == "Split" else None
    text = pattern.get("Regex") if isinstance(pattern, Mapping) else None
    how = (step.get("behavior"), step.get("invert") is True)
    # an expression whose last alternative is all spaces matches everything, so there is nothing to remove
    if isinstance(text, str) and (how == ("Isolated", False) or (how == ("Removed", True) and text.endswith(r"|\s+"))):
        return [("Split", _canonical(text))]
    return [(step_type, *((key, str(value)) for key, value in sorted(step.items()) if key != "type"))]


def _canonical(text: str) -> str:
    """Return a regular expression with line ends, quotes and shortened words in canonical spelling."""
    spellings = {
        "\r": r"\r", "\n": r"\n", '[!"#': r"[!\"#", "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])": _SHORT,
    }  # fmt: skip
    for spelling, canonical in spellings.items():
        text = text.replace(spelling, canonical)
    return text


def pre_tokenizer(steps: Steps) -> dict[str, Any]:
    """Return the ``pre_tokenizer`` of ``tokenizer.json`` for the steps."""
    splits = list(steps.splits)
    ends_as_gpt2 = splits[-1] == _GPT2
    result = [_split(text) for text in (splits[:-1] if ends_as_gpt2 else splits)]
    if steps.bytewise:
        result.append({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": ends_as_gpt2})
    return result[0] if len(result) == 1 else {"type": "Sequence", "pretokenizers": result}


def _split(text: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}


def byte_characters() -> list[str]:
    """Return byte-level BPE's character for each byte: itself if printable Latin-1, else a character from U+0100 on.

    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; their encoder.py.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    replacements = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(replacements)) for byte in range(256)]
