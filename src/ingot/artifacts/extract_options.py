"""Options of ``ingot extract``, one class for each operation, from which the command is built without heavy imports."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from ingot.artifacts.destination import OVERWRITE, PROGRESS
from ingot.core.options import OUT, OUTPUT, about, source
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from ingot.core.runtime.progress import ProgressCallback

_PATH = source("Artifact with a draft head or a Core ML package; any artifact for --layer, --model.")
_PACKAGE = about("Package to write for --layer or --model: X.mlpackage.", *OUTPUT, aliases=OUT)
_OPSET = about("For --layer: iOS16, iOS17 or iOS18.")


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Options for extracting the draft head of an artifact."""

    path: AnyPath = field(metadata=_PATH)
    out: AnyPath = field(
        metadata=about("Write the draft head here: a file name with a format's suffix, or a folder.", "--draft")
    )
    _: KW_ONLY
    format: str | None = field(
        default=None, metadata=about("Format of the draft head; default: by the suffix.", "--format", "-f")
    )
    overwrite: bool = field(default=False, metadata=OVERWRITE)


@dataclass(frozen=True, slots=True)
class CoremlOptions:
    """Options for unpacking the Core ML package of an artifact."""

    path: AnyPath = field(metadata=_PATH)
    cache: AnyPath | None = field(
        default=None, metadata=about("Folder for packages; default: coreml in $INGOT_CACHE or the user's cache.")
    )


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """Options for writing a Core ML package of one layer."""

    path: AnyPath = field(metadata=_PATH)
    name: str = field(
        metadata=about("Make a Core ML package of the linear or convolution layer with this weight.", "--layer")
    )
    out: AnyPath = field(metadata=_PACKAGE)
    _: KW_ONLY
    opset: str = field(default="iOS16", metadata=_OPSET)
    overwrite: bool = field(default=False, metadata=OVERWRITE)


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options for writing a Core ML package of a full model."""

    path: AnyPath = field(metadata=_PATH)
    out: AnyPath = field(metadata=_PACKAGE)
    _: KW_ONLY
    context: int | None = field(
        default=None,
        metadata=about("For --model: tokens that the cache holds; default: the model's context length, at most 2048."),
    )
    max_ram: int | str | None = field(default=None, metadata=about("For --model: memory ceiling, such as 2GiB."))
    resume: bool = field(default=False, metadata=about("For --model: continue a killed run."))
    overwrite: bool = field(default=False, metadata=OVERWRITE)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)
