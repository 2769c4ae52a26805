"""The options of ``extract``, a struct per operation. The command is made from them: nothing heavy is imported."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

from ingot.artifacts.options import OVERWRITE, PROGRESS
from ingot.core.options import about
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from ingot.core.runtime.progress import ProgressCallback

_PATH = about("Artifact that carries a draft head or a Core ML package; any for --layer, --model.", argument=True)
_PACKAGE = about("Package to write for --layer or --model: X.mlpackage.", "--out", "-o")
_OPSET = about("For --layer and --model: iOS16, iOS17 or iOS18.")


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """The draft head of an artifact: of which, and where to."""

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
    """The Core ML package of an artifact: of which, and where it is unpacked."""

    path: AnyPath = field(metadata=_PATH)
    cache: AnyPath | None = field(
        default=None, metadata=about("Folder for packages; default: coreml in $INGOT_CACHE or the user's cache.")
    )


@dataclass(frozen=True, slots=True)
class LayerOptions:
    """A package of one layer: of which, and where to."""

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
    """A package of a whole model: of which, where to, and how."""

    path: AnyPath = field(metadata=_PATH)
    out: AnyPath = field(metadata=_PACKAGE)
    _: KW_ONLY
    opset: str = field(default="iOS16", metadata=_OPSET)
    context: int | None = field(
        default=None, metadata=about("For --model: tokens at once; default: the model's own, at most 512.")
    )
    max_ram: int | str | None = field(default=None, metadata=about("For --model: memory ceiling, such as 2GiB."))
    resume: bool = field(default=False, metadata=about("For --model: go on where a killed run stopped."))
    overwrite: bool = field(default=False, metadata=OVERWRITE)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)
