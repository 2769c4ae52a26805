"""The options of ``compare``, ``verify``, ``seal`` and ``inspect``.

The command line imports this module for its help, so the module imports nothing heavy.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from ingot.artifacts.destination import ADDRESS, IO, MAX_DECOMPRESSED, PROGRESS, about_engine
from ingot.core.options import about, source
from ingot.core.parsing.strictjson import preload
from ingot.stores.location import AnyPath

if TYPE_CHECKING:
    from ingot.core.runtime.progress import ProgressCallback

ENGINE = about_engine("the report is the same.")


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """The options of ``ingot.compare`` and ``ingot compare``."""

    a: AnyPath = field(metadata=source("Reference checkpoint."))
    b: AnyPath = field(metadata=source("Checkpoint to compare with it."))
    _: KW_ONLY
    engine: str = field(default="local", metadata=ENGINE)
    address: str | None = field(default=None, metadata=ADDRESS)
    max_decompressed: int | str | None = field(default=None, metadata=MAX_DECOMPRESSED)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)


@dataclass(frozen=True, slots=True)
class VerifyOptions:
    """The options of ``ingot.verify`` and ``ingot verify``."""

    path: AnyPath = field(metadata=source("File or folder."))
    strict: bool = field(default=False, metadata=about("Treat what is allowed but not canonical as an error."))
    _: KW_ONLY
    canonical: bool = field(
        default=False,
        metadata=about("Also check that a .zt of container 2 is canonical: the same tensors always give its bytes."),
    )
    repair: bool = field(
        default=False, metadata=about("First replace chunks that differ from the seal (ingot seal) by those of --from.")
    )
    origin: AnyPath | None = field(
        default=None, metadata=about("Undamaged copy of the file or folder: a path or address.", "--from")
    )
    runtime: str | None = field(
        default=None,
        metadata=about(
            "Also check that this program would load it: llama.cpp, vllm, mlx, transformers and others "
            "(docs/runtimes.md).",
            "--for",
            metavar="RUNTIME",
        ),
    )
    base: AnyPath | None = field(
        default=None,
        metadata=about(
            "Base of an adapter: also check that it has every module of the adapter, with its shape. Or the "
            "model that an archive refers to."
        ),
    )
    signature: AnyPath | None = field(
        default=None,
        metadata=about("Also check this signature of all files (ingot seal --sign), by --public-key.", metavar="FILE"),
    )
    public_key: AnyPath | None = field(
        default=None, metadata=about("Public key of the signature's author: PEM.", metavar="KEY")
    )
    engine: str = field(default="local", metadata=ENGINE)
    address: str | None = field(default=None, metadata=ADDRESS)
    io: str = field(default="pread", metadata=IO)
    max_decompressed: int | str | None = field(default=None, metadata=MAX_DECOMPRESSED)
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)


@dataclass(frozen=True, slots=True)
class SealOptions:
    """The options of ``ingot.seal`` and ``ingot seal``."""

    path: AnyPath = field(metadata=source("File or folder."))
    _: KW_ONLY
    content_id: bool = field(
        default=True, metadata=about("Also write the content id, for which all tensors are decoded.")
    )
    sign: AnyPath | None = field(
        default=None,
        metadata=about("Then sign all files with this private key: PEM, elliptic curve.", metavar="KEY"),
    )
    signature: AnyPath | None = field(
        default=None,
        metadata=about("Signature to write; default: model.sig in the folder, X.sig beside a file X.", metavar="FILE"),
    )
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)


@dataclass(frozen=True, slots=True)
class InspectOptions:
    """The options of ``ingot inspect``."""

    path: AnyPath = field(metadata=source("File or folder."))
    _: KW_ONLY
    tensor: str | None = field(default=None, metadata=about("Show one tensor with its parts and parameters."))
    by: Literal["layer", "codec", "dtype", "role"] = field(
        default="layer", metadata=about("Totals by layer, codec, dtype or role.", metavar="KEY")
    )
    tensors: bool = field(default=True, metadata=about("List the tensors."))
    every: bool = field(default=False, metadata=about("Show every tensor, not one line for equal layers.", "--all"))
    content_id: bool = field(
        default=False, metadata=about("Hash all weights: the same id for the same tensors in any container.")
    )
    id: bool = field(
        default=False,
        metadata=about("Print an id of the stored contents by the digests in the manifest; reads no weights."),
    )
    progress: ProgressCallback | None = field(default=None, metadata=PROGRESS)


@preload
class CheckedFile(Struct, frozen=True, forbid_unknown_fields=True):
    """The file or folder to check, as sent to the workers of ``verify``."""

    path: str
    io: str
    max_decompressed: int | str | None


@preload
class ComparedFiles(Struct, frozen=True, forbid_unknown_fields=True):
    """The two artifacts to compare, as sent to the workers of ``compare``."""

    a: str
    b: str
    max_decompressed: int | str | None
