"""Recipes: ordered rules that choose a codec for each tensor; the first rule that applies decides.

``spec/recipes.md`` describes recipe files and their errors; ``load.py`` reads them.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from math import prod
from typing import Any

from ingot.core.numeric.dtypes import DTYPES
from ingot.core.regex import Regex, RegexError
from ingot.errors import UsageError
from ingot.naming.names import ROLES, layer_of, role_of
from ingot.recipes.choice import WEIGHT_DTYPES, Choice, Measured

_SPECIAL = re.compile(r"[*?\[]")


class Patterns:
    """A set of patterns for tensor names; a call returns whether any of them matches a name.

    A glob (``*``, ``?``, ``[abc]``, ``[!abc]``; ``*`` also matches dots and newlines) must match the full name. A
    regular expression must match from the first character on and may end before the last, as in llm-compressor. The
    time for a match is linear in the length of the name (``core.regex``).

    Raises
    ------
    UsageError
        ``recipe.pattern``: an invalid regular expression, or one that needs backtracking or is too large.
    """

    def __init__(self, texts: tuple[str, ...]) -> None:
        globs = [text for text in texts if not text.startswith("re:")]
        # Most rules use globs `*text*`; a substring search is enough for them.
        simple = [text for text in globs if len(text) > 1 and text[0] == text[-1] == "*" and not _special(text[1:-1])]
        remaining = [text for text in globs if text not in simple]
        self._substrings = tuple(text[1:-1] for text in simple)
        # The translated globs do not backtrack across stars (atomic groups, since Python 3.11).
        self._globs = re.compile("|".join(map(fnmatch.translate, remaining))) if remaining else None
        self._expressions = [_regex(text.removeprefix("re:")) for text in texts if text.startswith("re:")]

    def __call__(self, name: str) -> bool:
        for substring in self._substrings:
            if substring in name:
                return True
        if self._globs is not None and self._globs.match(name):
            return True
        return any(expression.matches(name) for expression in self._expressions)


def exactly(name: str) -> str:
    """Return a pattern that matches only the tensor name ``name``."""
    return f"re:{re.escape(name)}\\Z" if _special(name) or name.startswith("re:") else name


def _special(text: str) -> bool:
    return _SPECIAL.search(text) is not None


def _regex(text: str) -> Regex:
    try:
        return Regex(text, re.DOTALL)
    except RegexError as error:
        raise UsageError(str(error), rule="recipe.pattern") from error


_SPAN = re.compile(r"(-?[0-9]{1,6})(?:-(-?[0-9]{1,6}))?")


@dataclass(frozen=True, slots=True)
class Subject:
    """The properties of a tensor that rules test, computed once for all rules."""

    name: str
    role: str
    layer: int | None
    layer_count: int
    dtype: str
    ndim: int
    size: int
    cols: int


@dataclass(frozen=True)
class Rule:
    """A rule: conditions that must all hold, and the choice for tensors that meet them.

    A rule without conditions applies to every tensor.

    Parameters
    ----------
    choice : Choice, Measured or None
        None keeps the tensor as it is stored.
    label : str
        The rule's name in reports.
    match, exclude : tuple of str
        Patterns for tensor names (``Patterns``): globs, or regular expressions after ``re:``. At least one of ``match``
        and none of ``exclude`` must match.
    roles : tuple of str
        Roles of ``naming.names``.
    layers : str
        Layer numbers and ranges, both ends included; negative numbers count from the end: ``"0-3,-1"``.
    dtypes : tuple of str
        Element types; by default all, or only ``f64 f32 f16 bf16`` if the choice changes values.
    min_ndim, max_ndim : int
        Bounds of the number of dimensions.
    min_size, max_size : int
        Bounds of the number of elements.
    min_cols, cols_multiple_of : int
        Conditions on the length of the last dimension.

    Raises
    ------
    UsageError
        ``recipe.pattern``, ``recipe.role``, ``recipe.layers`` or ``recipe.dtype``.
    """

    choice: Choice | Measured | None
    label: str = "rule"
    match: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    layers: str = ""
    dtypes: tuple[str, ...] = ()
    min_ndim: int = 0
    max_ndim: int | None = None
    min_size: int = 0
    max_size: int | None = None
    min_cols: int = 0
    cols_multiple_of: int = 1

    def __post_init__(self) -> None:
        # evaluate the cached properties, so that an invalid pattern or range raises here and not at the first tensor
        _ = (self._matches, self._excludes, self._spans)
        for role in self.roles:
            if role not in ROLES:
                raise UsageError(f"expected roles among {', '.join(ROLES)}; found {role!r}", rule="recipe.role")
        allowed = WEIGHT_DTYPES if self.choice is not None and self.choice.changes_values else tuple(DTYPES)
        for name in self.dtypes:
            if name not in allowed:
                raise UsageError(
                    f"expected dtypes among {', '.join(allowed)} for this codec; found {name!r}", rule="recipe.dtype"
                )
        if self.cols_multiple_of < 1:
            raise UsageError(
                f"expected cols_multiple_of of at least 1, found {self.cols_multiple_of}", rule="recipe.shape"
            )

    def hits(self, subject: Subject) -> bool:
        """Return whether a tensor meets all conditions of the rule."""
        return (
            (self._dtypes is None or subject.dtype in self._dtypes)
            and self._hits_shape(subject)
            and (not self.roles or subject.role in self.roles)
            and (not self.layers or self._hits_layer(subject))
            and (not self.match or self._matches(subject.name))
            and not (self.exclude and self._excludes(subject.name))
        )

    def _hits_shape(self, subject: Subject) -> bool:
        return (
            self.min_ndim <= subject.ndim
            and (self.max_ndim is None or subject.ndim <= self.max_ndim)
            and self.min_size <= subject.size
            and (self.max_size is None or subject.size <= self.max_size)
            and self.min_cols <= subject.cols
            and subject.cols % self.cols_multiple_of == 0
        )

    def _hits_layer(self, subject: Subject) -> bool:
        layer = subject.layer
        count = subject.layer_count
        if layer is None:
            return False
        return any(
            (first if first >= 0 else count + first) <= layer <= (last if last >= 0 else count + last)
            for first, last in self._spans
        )

    @cached_property
    def _dtypes(self) -> tuple[str, ...] | None:
        if self.dtypes:
            return self.dtypes
        return WEIGHT_DTYPES if self.choice is not None and self.choice.changes_values else None

    @cached_property
    def _matches(self) -> Patterns:
        return Patterns(self.match)

    @cached_property
    def _excludes(self) -> Patterns:
        return Patterns(self.exclude)

    @cached_property
    def _spans(self) -> tuple[tuple[int, int], ...]:
        return parse_layers(self.layers) if self.layers else ()


@dataclass(frozen=True, slots=True)
class Rotate:
    """The rotations of a model (``spec/folding.md``), and the seed of their random signs.

    ``r1`` rotates the residual stream, ``r2`` the value heads. Raises ``UsageError`` ``recipe.rotate`` if both are
    false.
    """

    r1: bool = False
    r2: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.r1 or self.r2):
            raise UsageError("expected r1 = true, r2 = true or both, found neither", rule="recipe.rotate")

    @classmethod
    def parse(cls, text: str) -> Rotate:
        """Parse a list of rotations such as ``r1,r2``; raise ``UsageError`` ``recipe.rotate`` for any other text."""
        names = [name.strip() for name in text.split(",")]
        if not set(names) <= {"r1", "r2"} or len(set(names)) < len(names):
            raise UsageError(f"expected --rotate r1, r2 or r1,r2, found {text!r:.80}", rule="recipe.rotate")
        return cls("r1" in names, "r2" in names)


STATIC_ACTIVATIONS = ("nvfp4",)
"""Schemes in which each matrix has a static input scale from calibration. In ``nvfp4``, inputs are FP4 in groups of 16;
each group also has an FP8 scale that is computed while the model runs.
"""
ACTIVATIONS = ("int8", "fp8", *STATIC_ACTIVATIONS)
"""Schemes of quantizing layer inputs while the model runs; ``int8`` and ``fp8`` compute one scale per
token."""


@dataclass(frozen=True, slots=True)
class Mixture:
    """One of llama.cpp's mixtures of block types.

    ``file_type`` is GGUF's ``general.file_type``, ``base`` the type of tensors without a rule. ``quantizer`` rounds the
    matrices of layers; None rounds each block separately.
    """

    name: str
    file_type: int
    base: str
    quantizer: str | None = None


@dataclass(frozen=True)
class Recipe:
    """Named, ordered rules; a tensor to which no rule applies is unchanged.

    ``general`` rules, such as those of presets, are for all models, so one may apply to no tensor of a model.
    ``rotate`` is applied to the model before the rules. ``activations`` states how layers quantize their inputs while
    the model runs (``ACTIVATIONS``). ``runs_in`` lists the programs that run the result. Rules of a ``mixture`` depend
    on the model; ``llama_cpp_mixtures.expand`` adds them.

    If the block of a rule's type does not divide the columns of a matrix, a rule of the mixture with another type
    applies. ``fallbacks`` maps the label of each such rule to the requested and the stored type.
    """

    name: str
    rules: tuple[Rule, ...]
    description: str = ""
    general: bool = False
    rotate: Rotate | None = None
    activations: str | None = None
    runs_in: tuple[str, ...] = ()
    mixture: Mixture | None = None
    fallbacks: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.activations is not None and self.activations not in ACTIVATIONS:
            raise UsageError(
                f"expected activations {' or '.join(ACTIVATIONS)}, found {self.activations!r:.80}",
                rule="recipe.activations",
            )

    @property
    def has_quantizer(self) -> bool:
        """Whether a rule, or a rule that the mixture adds for a model, rounds matrices by statistics."""
        choices = [rule.choice for rule in self.rules]
        by_rule = any(isinstance(choice, Choice) and choice.quantizer is not None for choice in choices)
        return by_rule or (self.mixture is not None and self.mixture.quantizer is not None)

    def fingerprint(self) -> str:
        """Return a SHA-256 of all that determines the output: the rules in order, without names and descriptions."""
        content: list[Any] = [_content(rule) for rule in self.rules]
        content += [] if self.rotate is None else [asdict(self.rotate)]
        content += [] if self.activations is None else [self.activations]
        content += [] if self.mixture is None else [asdict(self.mixture)]
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"ingot-recipe-1\n" + text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Decision:
    """A recipe's decision on one tensor.

    ``choice`` is None if the tensor stays as stored; ``rule_index`` is None if no rule applies.
    """

    rule_index: int | None
    rule_label: str
    choice: Choice | Measured | None


NO_RULE = Decision(None, "no rule", None)


def resolve(recipe: Recipe, name: str, shape: tuple[int, ...], dtype: str, layer_count: int) -> Decision:
    """Return a recipe's decision on a tensor, in about 10 microseconds.

    Parameters
    ----------
    recipe : Recipe
    name, shape, dtype :
        The tensor's name, shape and dtype; ``dtype`` may be unknown to Ingot.
    layer_count : int
        Number of layers of the checkpoint: the highest layer number plus 1.
    """
    cols = shape[-1] if shape else 1
    subject = Subject(name, role_of(name), layer_of(name), layer_count, dtype, len(shape), prod(shape), cols)
    for index, rule in enumerate(recipe.rules):
        if rule.hits(subject):
            return Decision(index, rule.label, rule.choice)
    return NO_RULE


def parse_layers(text: str) -> tuple[tuple[int, int], ...]:
    """Parse ``"0-3,-1"`` into (first, last) layer ranges, both ends included.

    Raises ``UsageError`` ``recipe.layers`` for any other text.
    """
    spans = []
    for item in text.split(","):
        match = _SPAN.fullmatch(item.strip())
        if match is None:
            raise UsageError(
                f"expected layers such as '0-3,-1', found {item.strip()!r} in {text!r}", rule="recipe.layers"
            )
        first = int(match[1])
        last = int(match[2]) if match[2] else first
        if first > last and (first < 0) == (last < 0):
            raise UsageError(f"expected a rising range of layers, found {item.strip()!r}", rule="recipe.layers")
        spans.append((first, last))
    return tuple(spans)


def _content(rule: Rule) -> dict[str, Any]:
    content = asdict(rule)
    del content["label"]
    for choice in (content["choice"], *((content["choice"] or {}).get("candidates") or ())):
        if choice is not None and choice.get("quantizer") is None:  # keeps fingerprints older than quantizers
            choice.pop("quantizer", None)
    return content
