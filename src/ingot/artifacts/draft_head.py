"""Checks of EAGLE-3 draft heads: tensors, shapes and vocabulary mappings (``spec/attachments.md``).

Names and shapes follow ``SafeAILab/EAGLE`` (``model/cnets.py``). vLLM's ``llama_eagle3.py`` and the speculators
checkpoints use ``layers.0.`` instead of ``midlayer.``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from ingot.artifacts.companions import companion_config
from ingot.core.numeric.dtypes import DTYPES
from ingot.errors import FormatError
from ingot.model.checkpoint import Checkpoint
from ingot.model.draft_head_names import IN_DRAFT, MATRICES, NORMS, TO_TARGET, is_nameless
from ingot.model.tensor import Tensor
from ingot.naming.config import parse_config

CONFIG_KEY = "draft_config"
"""The metadata key for the ``config.json`` of a draft head, as JSON text, in an artifact that contains the head."""

_LAYER = re.compile(r"(?:midlayer|layers\.([0-9]{1,4}))\.(.+)")
# A draft head reads the inputs of three layers of its target model.
_FEATURES = 3


@dataclass(frozen=True, slots=True)
class DraftShape:
    """The sizes of a draft head.

    ``target_hidden`` is the hidden size of the target model. ``attention`` and ``kv`` are the widths of queries and
    keys. ``vocab`` and ``draft_vocab`` are the vocabulary sizes of the target and of the head; ``mapped`` is set if d2t
    and t2d map between them. ``embedded`` is set if the head has token embeddings.
    """

    layers: int
    hidden: int
    target_hidden: int
    attention: int
    kv: int
    intermediate: int
    vocab: int
    draft_vocab: int
    mapped: bool
    embedded: bool


def check_head_or_none(tensors: Mapping[str, Tensor]) -> DraftShape | None:
    """Check a draft head and return its sizes, or return None if its tensors have placeholder names.

    Raises the errors of ``check_draft``.
    """
    return None if is_nameless(tensors) else check_draft(tensors)


def check_draft(tensors: Mapping[str, Tensor]) -> DraftShape:
    """Check the tensors of a draft head against each other; reads only the bytes of ``d2t`` and ``t2d``.

    Raises
    ------
    FormatError
        ``draft.missing``, ``draft.layers``, ``draft.dtype``, ``draft.shape``, ``draft.mapping``, ``draft.range``,
        ``draft.order``, ``draft.mask``.
    """
    head = _Head(tensors)
    hidden = head.vector("norm.weight")
    fused = head.matrix("fc.weight", rows=hidden)[1]
    if not fused or fused % _FEATURES:
        _refuse("draft.shape", f"expected columns for {_FEATURES} features of the target, found {fused}", "fc.weight")
    layers = head.layers()
    widths = [head.layer(start, hidden, first=not number) for number, start in enumerate(layers)]
    draft_vocab = head.matrix("lm_head.weight", cols=hidden)[0]
    mapped = head.mapped()
    vocab = head.size(IN_DRAFT, "bool") if mapped else draft_vocab
    embedded = "embed_tokens.weight" in tensors
    if embedded:
        head.matrix("embed_tokens.weight", rows=vocab, cols=hidden)
    if mapped:
        head.size(TO_TARGET, "i64", draft_vocab)
        _check_mapping(tensors[TO_TARGET], tensors[IN_DRAFT], draft_vocab, vocab)
    return DraftShape(len(layers), hidden, fused // _FEATURES, *widths[0], vocab, draft_vocab, mapped, embedded)


def config_of_draft(head: Checkpoint) -> dict[str, Any]:
    """Return the ``config.json`` of a draft head; empty if there is none.

    It is in the head's folder, or in the metadata of an artifact that contains a head. Raises ``FormatError``
    ``draft.config`` if it is not a JSON object.
    """
    if head.attachments.draft is None:
        return companion_config(head.companions, "draft.config")
    text = head.metadata.get(CONFIG_KEY, "{}")
    return parse_config(str(text).encode(), "draft.config", head.location)


class _Head:
    """Access to a draft head's tensors by name, with checks of their types and shapes that raise ``FormatError``."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def get(self, name: str) -> Tensor:
        if name not in self._tensors:
            count = len(self._tensors)
            _refuse("draft.missing", f"expected this tensor in a draft head, found {count} others", name)
        return self._tensors[name]

    def floats(self, name: str) -> Tensor:
        tensor = self.get(name)
        row = DTYPES.get(tensor.dtype)
        if row is None or not row.is_float:
            _refuse("draft.dtype", f"expected floats, found {tensor.dtype}", name)
        return tensor

    def vector(self, name: str, size: int | None = None) -> int:
        shape = self.floats(name).shape
        if len(shape) != 1 or not shape[0] or size not in (None, shape[0]):
            _refuse("draft.shape", f"expected [{'n' if size is None else size}], found {list(shape)}", name)
        return shape[0]

    def matrix(self, name: str, rows: int | None = None, cols: int | None = None) -> tuple[int, int]:
        shape = self.floats(name).shape
        if len(shape) != 2 or not all(shape) or rows not in (None, shape[0]) or cols not in (None, shape[1]):
            expected = ", ".join(letter if size is None else str(size) for letter, size in (("m", rows), ("n", cols)))
            _refuse("draft.shape", f"expected [{expected}], found {list(shape)}", name)
        return shape[0], shape[1]

    def size(self, name: str, dtype: str, size: int | None = None) -> int:
        tensor = self.get(name)
        if tensor.dtype != dtype:
            _refuse("draft.dtype", f"expected {dtype}, found {tensor.dtype}", name)
        if len(tensor.shape) != 1 or size not in (None, tensor.shape[0]):
            _refuse("draft.shape", f"expected [{'n' if size is None else size}], found {list(tensor.shape)}", name)
        return tensor.shape[0]

    def layers(self) -> list[str]:
        """Return the prefixes of the layers' names: ``midlayer.``, or ``layers.0.``, ``layers.1.``, ..."""
        matches = [match for name in self._tensors if (match := _LAYER.fullmatch(name))]
        numbers = {int(match[1]) for match in matches if match[1] is not None}
        middle = any(match[1] is None for match in matches)
        if not matches:
            _refuse("draft.missing", "this draft head has no tensors of a layer", "midlayer")
        if (middle and numbers) or numbers - set(range(len(numbers))):
            stray = sorted(numbers)[:8]
            _refuse("draft.layers", f"expected midlayer, or layers from 0 on, found {stray}, midlayer: {middle}", None)
        return ["midlayer."] if middle else [f"layers.{number}." for number in range(len(numbers))]

    def layer(self, start: str, hidden: int, *, first: bool) -> tuple[int, int, int]:
        """Check one layer; return the widths of queries, of keys and of the feed-forward network.

        The inputs of the first layer are the embedding and the hidden state; later layers may have the hidden state
        only.
        """
        q, k, v, o, gate, up, down = (start + name for name in MATRICES)
        attention, inputs = self.matrix(q)
        if inputs not in ((2 * hidden,) if first else (hidden, 2 * hidden)):
            _refuse("draft.shape", f"expected {2 * hidden} columns, found {inputs}", q)
        kv, _ = self.matrix(k, cols=inputs)
        self.matrix(v, kv, inputs)
        self.matrix(o, hidden, attention)
        inner, _ = self.matrix(gate, cols=hidden)
        self.matrix(up, inner, hidden)
        self.matrix(down, hidden, inner)
        for name in NORMS:
            if start + name in self._tensors:
                self.vector(start + name, hidden)
        return attention, kv, inner

    def mapped(self) -> bool:
        present = [name for name in (TO_TARGET, IN_DRAFT) if name in self._tensors]
        if len(present) == 1:
            _refuse("draft.mapping", f"expected both {TO_TARGET} and {IN_DRAFT}, or neither, found one", present[0])
        return bool(present)


def _check_mapping(to_target: Tensor, in_draft: Tensor, draft_vocab: int, vocab: int) -> None:
    """Check that the target tokens ``i + d2t[i]`` are in the vocabulary, ascend, and equal the tokens of the mask."""
    draft_tokens = np.arange(draft_vocab, dtype=np.int64)
    offsets = to_target.numpy()
    mask = in_draft.numpy()
    outside = np.flatnonzero((offsets < -draft_tokens) | (offsets >= vocab - draft_tokens))
    if len(outside):
        token = int(outside[0])
        _refuse(
            "draft.range",
            f"expected target tokens below {vocab}, found {token + int(offsets[token])} for draft token {token}",
            TO_TARGET,
        )
    targets = draft_tokens + offsets
    not_ascending = np.flatnonzero(np.diff(targets) <= 0)
    if len(not_ascending):
        token = int(not_ascending[0])
        _refuse(
            "draft.order",
            f"expected ascending target tokens, found {targets[token]} and then {targets[token + 1]} at draft token "
            f"{token}",
            TO_TARGET,
        )
    if int(np.count_nonzero(mask)) != draft_vocab or not mask[targets].all():
        _refuse(
            "draft.mask",
            f"expected the {draft_vocab} tokens that {TO_TARGET} names, found {np.count_nonzero(mask)} set, "
            f"{np.count_nonzero(mask[targets])} of them named",
            IN_DRAFT,
        )


def _refuse(rule: str, message: str, location: str | None) -> NoReturn:
    raise FormatError(rule, message, where=location)
