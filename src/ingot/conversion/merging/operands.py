"""Opening of the models of a merge: checkpoints, exact or lossy deltas of the base, and adapters of the base."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from ingot.adapters.options import AdapterRef
from ingot.adapters.view import with_adapters
from ingot.artifacts.adapter_files import adapter_of
from ingot.artifacts.companions import has_model_metadata
from ingot.artifacts.identity import content_id, equal_values, same_type
from ingot.artifacts.open import Source, open_delta
from ingot.conversion.merging.delta_tensors import delta_tensors
from ingot.conversion.merging.methods import is_mergeable
from ingot.engine.delta_chain import link_of
from ingot.errors import IntegrityError, UnsupportedError
from ingot.model.checkpoint import Checkpoint, CheckpointSource
from ingot.model.delta import KEY
from ingot.model.layouts.dense import DenseLayout
from ingot.model.tensor import Tensor
from ingot.naming.names import role_of
from ingot.recipes.recipe import Patterns
from ingot.stores.location import Location
from ingot.translate.view import to_gguf, to_model

TENSORS = "merge.tensors"
_DELTA = "delta"
_ADAPTER = "adapter"
_MODEL = "model"
_HEADS = ("lm_head.weight", "output.weight")
_MAX_NAMED = 3


@dataclass(frozen=True, slots=True)
class Operand:
    """An opened model of a merge, whose tensors have the names of the base.

    ``category`` is ``model``, ``delta`` or ``adapter``. ``codecs`` are the codecs of its quantized tensors.
    """

    location: str
    category: str
    tensors: Mapping[str, Tensor]
    checkpoint: Checkpoint
    source: CheckpointSource
    close: Callable[[], None]
    codecs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def open_operand(
    reference: AdapterRef, base: Checkpoint, drop: Sequence[str], io: str, max_decompressed: int | str | None
) -> Operand:
    """Open a model of a merge and check that it has the tensors of the base.

    Raises
    ------
    UnsupportedError
        ``merge.tensors``: names, shapes or element types differ from those of the base, or tensors differ that cannot
        be merged.
    IntegrityError
        ``delta.base``: a delta of another base.
    IngotError
        The errors of opening.
    """
    source = open_delta(Location.parse(reference.path), io=io, max_decompressed=max_decompressed)
    try:
        operand = _opened(source, base)
        with_all = _with_tensors_of(base, operand, Patterns(tuple(drop)))
    except BaseException:
        source.close()
        raise
    return with_all


def _opened(source: Source, base: Checkpoint) -> Operand:
    checkpoint = source.view()
    if KEY in checkpoint.metadata:
        tensors = delta_tensors(base, link_of(checkpoint))
        return Operand(source.location, _DELTA, tensors, checkpoint, source, source.close)
    if adapter_of(source) is not None:
        source.close()
        view = with_adapters(base, [source.location], exact=True)
        return Operand(source.location, _ADAPTER, view, base, view.source, view.close)
    packer = source.packer()
    if packer is not None:
        raise packer.refusal()
    view = checkpoint
    if has_model_metadata(base.format) != has_model_metadata(checkpoint.format) and not set(base) & set(checkpoint):
        translate = to_gguf if has_model_metadata(base.format) else to_model
        view = translate(checkpoint, no_tokenizer=True).checkpoint
    codecs = sorted({tensor.codec for tensor in checkpoint.values() if tensor.codec != DenseLayout.codec})
    return Operand(source.location, _MODEL, view, view, source, source.close, tuple(codecs))


def require_base_of_deltas(base: Checkpoint, operands: Sequence[Operand]) -> None:
    """Raise ``IntegrityError`` ``delta.base`` unless the base has the content digest that each delta declares.

    Reads the full base if there is a delta.
    """
    deltas = [item for item in operands if item.category == _DELTA]
    content = content_id(base) if deltas else ""
    for item in deltas:
        expected = link_of(item.checkpoint).info.base.content
        if expected is None:
            raise UnsupportedError(
                "the delta does not state the content of its base; apply it with `ingot patch`, and merge the result",
                rule=TENSORS,
                where=item.location,
            )
        if expected != content:
            raise IntegrityError(
                "delta.base",
                f"this delta belongs to another base: expected {expected[:23]}..., found {content[:23]}...",
                where=item.location,
            )


def _with_tensors_of(base: Checkpoint, operand: Operand, dropped: Patterns) -> Operand:
    """Return the operand with exactly the tensors of the base; a tied head on one side is resolved."""
    names = [name for name in base if not dropped(name)]
    missing = [name for name in names if name not in operand.tensors]
    extra = [name for name in operand.tensors if name not in base and not dropped(name)]
    tied = {name: embedding for name in missing if (embedding := _tied_embedding(name, operand)) is not None}
    extra = [name for name in extra if not _repeats_embedding(name, operand, base)]
    missing = [name for name in missing if name not in tied]
    if missing or extra:
        raise _names_error(base, operand, missing, extra)
    for name in names:
        tensor = tied.get(name, operand.tensors[name] if name not in tied else None)
        assert tensor is not None
        _require_same(base[name], tensor, operand.location)
    notes = [f"{operand.location} ties {name} to its embeddings, which are merged into it" for name in tied]
    tensors = {name: tied[name] if name in tied else operand.tensors[name] for name in names}
    return replace(operand, tensors=tensors, notes=(*operand.notes, *notes))


def _is_head(name: str) -> bool:
    return any(name == head or name.endswith(f".{head}") for head in _HEADS)


def _embeddings(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    return [tensors[name] for name in tensors if role_of(name) == "embedding" and len(tensors[name].shape) == 2]


def _tied_embedding(name: str, operand: Operand) -> Tensor | None:
    """Return the embeddings that replace a missing head; None if it is no head, or there is no single embedding."""
    if not _is_head(name) or operand.category != _MODEL:
        return None
    embeddings = _embeddings(operand.tensors)
    return embeddings[0] if len(embeddings) == 1 else None


def _repeats_embedding(name: str, operand: Operand, base: Checkpoint) -> bool:
    """Return whether a tensor is a head whose values equal the embeddings, while the base has no head."""
    if not _is_head(name) or any(_is_head(item) for item in base):
        return False
    head = operand.tensors[name]
    return any(same_type(item, head) and equal_values(item, head) for item in _embeddings(operand.tensors))


def _names_error(base: Checkpoint, operand: Operand, missing: list[str], extra: list[str]) -> UnsupportedError:
    if extra and not missing and any(map(_is_head, extra)):
        advice = f"the base ties its head to the embeddings; use {operand.location} as the base, or --drop {extra[0]}"
    else:
        advice = "only models with the same tensors can be merged; --drop leaves tensors out"
    parts = [
        f"{text} {len(names)} ({', '.join(name[:80] for name in names[:_MAX_NAMED])})"
        for text, names in (("lacks", missing), ("has in addition", extra))
        if names
    ]
    return UnsupportedError(
        f"expected the tensors of {base.location}, but the model {' and '.join(parts)}; {advice}",
        rule=TENSORS,
        where=operand.location,
    )


def _require_same(base: Tensor, tensor: Tensor, location: str) -> None:
    name = base.name[:200]
    if base.shape != tensor.shape:
        problem = "; the models have different vocabularies" if role_of(name) in ("embedding", "head") else ""
        raise UnsupportedError(
            f"expected {name} with shape {list(base.shape)} as in the base, found {list(tensor.shape)}{problem}",
            rule=TENSORS,
            where=location,
        )
    if is_mergeable(base.dtype) and is_mergeable(tensor.dtype):
        if base.decoder is None or tensor.decoder is None:
            raise UnsupportedError(f"{name} cannot be decoded", rule=TENSORS, where=location)
        return
    if base.dtype != tensor.dtype or not equal_values(base, tensor):
        raise UnsupportedError(
            f"expected {name}, which has {base.dtype} values that cannot be merged, to be equal in all models",
            rule=TENSORS,
            where=location,
        )
