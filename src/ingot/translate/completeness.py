"""Completeness checks of a model folder, by headers: missing tensors, and stale duplicate weight files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ingot.artifacts.open import Source
from ingot.errors import UnsupportedError
from ingot.formats.safetensors.header import open_file
from ingot.formats.safetensors.index import INDEX_SUFFIX, SUFFIX
from ingot.model.account import list_names
from ingot.model.checkpoint import Checkpoint
from ingot.model.delta import KEY as DELTA
from ingot.model.layouts.dense import DenseLayout
from ingot.model.store import Store
from ingot.model.tensor import Tensor
from ingot.translate.expected import absent_tensors, expected_tensors
from ingot.translate.families import FAMILIES
from ingot.translate.mlx_tensors import from_mlx
from ingot.translate.text_models import text_config, with_class_names

MISSING = "model.missing-tensor"
SHAPE = "model.shape"
DUPLICATE = "model.stale-duplicate"
_OTHER_NAMES = ("gguf",)
"""Formats in which no tensor has the name that transformers uses."""
_EXPERTS = ".mlp.experts."


@dataclass(frozen=True, slots=True)
class Defect:
    """A reason why a model folder is incomplete or contradictory: the rule, the tensor or file, and a message."""

    rule: str
    name: str
    message: str


def defects_of(source: Source, checkpoint: Checkpoint) -> list[Defect]:
    """Return the defects of a model folder; none for single files, deltas and unsupported families.

    ``checkpoint`` is the source's checkpoint before any view.
    """
    if not source.is_folder or DELTA in checkpoint.metadata:
        return []
    return [*_missing(source, checkpoint), *_duplicates(source)]


def require_complete(source: Source, checkpoint: Checkpoint, accepts: Callable[[str], bool]) -> None:
    """Raise an error if the model has a defect, unless ``accepts`` returns True for the defect's name.

    Raises
    ------
    UnsupportedError
        ``model.missing-tensor``, ``model.shape``, ``model.stale-duplicate``.
    """
    defects = [defect for defect in defects_of(source, checkpoint) if not accepts(defect.name)]
    if not defects:
        return
    rule = defects[0].rule
    names = [f"{defect.name} ({defect.message})" for defect in defects if defect.rule == rule]
    advice = {
        MISSING: "get the complete model, or pass --drop PATTERN (drop=[...]) with their names to go on without",
        SHAPE: "get the complete model, or correct config.json, or leave the tensors out with --drop PATTERN",
        DUPLICATE: "remove the files of other models, or pass --trust-index to read only what the index lists",
    }[rule]
    problem = {
        MISSING: "the model lacks",
        SHAPE: "shapes are not those of the model:",
        DUPLICATE: "the folder has stale files:",
    }[rule]
    raise UnsupportedError(f"{problem} {list_names(names)}; {advice}", rule=rule, where=source.location)


def _missing(source: Source, checkpoint: Checkpoint) -> list[Defect]:
    config = source.config()
    text = text_config(config)
    if text is not None:
        config = {"tie_word_embeddings": True, **text}
    checkpoint = with_class_names(checkpoint, config).checkpoint
    empty = [name for name in checkpoint if config.get("model_type") and checkpoint[name].shape == (0,)]
    defects = [Defect(SHAPE, name, "no elements, as DeepSpeed ZeRO-3 leaves tensors in model files") for name in empty]
    if source.format.name in _OTHER_NAMES:
        return defects
    expected = expected_tensors(config)
    if expected is None:
        return [
            *defects,
            *(Defect(MISSING, name, "models of the family have it") for name in _absent(checkpoint, config)),
        ]
    checkpoint = from_mlx(checkpoint, config).checkpoint
    arranged = _layers_with_other_experts(checkpoint, expected)
    for name, shape in expected.items():
        if name not in checkpoint:
            if name.partition(_EXPERTS)[0] in arranged and _EXPERTS in name:
                continue
            defects.append(Defect(MISSING, name, "config.json implies it"))
        elif name not in empty and not _fits(checkpoint[name], shape):
            message = f"shape {list(checkpoint[name].shape)}, config.json implies {list(shape)}"
            defects.append(Defect(SHAPE, name, message))
    return defects


def _absent(checkpoint: Checkpoint, config: Mapping[str, Any]) -> list[str]:
    """Return the names of missing tensors: the family needs them, or other layers of the model have them."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None or config.get("architectures", [family.model_class]) != [family.model_class]:
        return []
    return absent_tensors(config, family, from_mlx(checkpoint, config).checkpoint)


def _layers_with_other_experts(checkpoint: Checkpoint, expected: Mapping[str, object]) -> set[str]:
    """Return the name prefixes of layers whose experts are stored under other names than ``config.json`` implies.

    Names differ if a program has stacked the matrices of all experts, split stacks, or split fused matrices.
    """
    matching = {name.partition(_EXPERTS)[0] for name in checkpoint if _EXPERTS in name and name in expected}
    all_layers = {
        name.partition(part)[0] for name in checkpoint for part in (_EXPERTS, ".mlp.switch_mlp.") if part in name
    }
    return all_layers - matching


def _fits(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Return whether a tensor has the shape; packed experts may have their last two dimensions transposed."""
    transposed = (*shape[:-2], *shape[-2:][::-1])
    return tensor.shape == shape or (tensor.codec != DenseLayout.codec and tensor.shape == transposed)


def _duplicates(source: Source) -> list[Defect]:
    """Return a defect for each weight file that the folder's index does not list and that repeats tensors."""
    used = source.catalog.headers
    names = source.store.names()
    files = [name for name in names if name.endswith(SUFFIX)]
    unused = [name for name in files if name not in used]
    indexed = any(name.endswith(INDEX_SUFFIX) for name in names)
    if not (unused and indexed and any(name.endswith(SUFFIX) for name in used)):
        return []
    read = {name for file in files if file in used for name in _names_in(source.store, file)}
    defects = []
    for file in unused:
        repeated = [name for name in _names_in(source.store, file) if name in read]
        if repeated:
            message = f"contains {list_names(repeated[:3])} too, and programs differ in which file they read"
            defects.append(Defect(DUPLICATE, file, message))
    return defects


def _names_in(store: Store, file: str) -> list[str]:
    opened = open_file(store, file, verify=False)
    opened.source.close()
    return list(opened.header.entries)
