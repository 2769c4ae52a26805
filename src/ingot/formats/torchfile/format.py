"""``.bin`` and ``.pt`` checkpoints of torch, one file or shards under an index; read only.

The pickle inside is read by torch's own restricted unpickler (``weights_only=True``), which makes tensors and plain
containers and runs nothing; what it refuses is refused. Ingot has no unpickler.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ingot.core.strictjson import strict_json
from ingot.errors import FormatError, UnsupportedError, UsageError
from ingot.formats.base import Catalog, Format, FormatTraits, WriteOptions
from ingot.formats.foreign import LEGACY_TORCH, TORCH_SUFFIXES, ZIP
from ingot.formats.torchfile.reader import File, open_file, tensors_of
from ingot.model.artifact import Artifact
from ingot.model.bytesource import Target
from ingot.model.spec import TensorSpec
from ingot.model.store import Store

INDEX_SUFFIX = ".bin.index.json"
MAX_INDEX = 100_000_000
_USUAL = ("pytorch_model.bin", f"pytorch_model{INDEX_SUFFIX}", *(f"model{suffix}" for suffix in TORCH_SUFFIXES))
# What trainers put beside the weights.
_OTHERS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "scaler.pt")
_UNREAD = "it lies outside of the state dict, or deeper in it"
_WHY = "torch's own files are only read: safetensors holds the same and runs nothing"


class TorchFormat(Format):
    """Dense tensors as ``torch.save`` writes them."""

    name = "torch"
    suffixes: tuple[str, ...] = (*TORCH_SUFFIXES, INDEX_SUFFIX)
    summary = "dense tensors that torch.save wrote (.bin, .pt), one file or shards; read only, by torch itself"
    traits = FormatTraits(
        last_resort=True,
    )

    def claims(self, name: str, head: bytes) -> bool:
        """By the suffix, of a zip archive or of what torch wrote before it wrote zips; or an index."""
        lower = name.lower()
        return lower.endswith(INDEX_SUFFIX) or (lower.endswith(TORCH_SUFFIXES) and head.startswith((ZIP, LEGACY_TORCH)))

    def entry(self, names: Sequence[str]) -> str | None:
        """Return the usual file or index, else the only file that may be one."""
        usual = next((name for name in _USUAL if name in names), None)
        if usual is not None:
            return usual
        matching = [
            name
            for name in names
            if name.lower().endswith(self.suffixes) and name not in _OTHERS and not name.startswith((".", "rng_state"))
        ]
        return matching[0] if len(matching) == 1 else None

    def why_unsupported(self, spec: TensorSpec) -> str | None:
        """Everything: there is no writer."""
        return _WHY

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Have torch map the file, or all shards of an index, and take its tensors.

        Raises ``MissingExtraError`` where torch is not installed, ``UnsupportedError`` ``torchfile.*``, ``FormatError``
        ``torchfile.*``.
        """
        headers: dict[str, bytes] = {}
        wanted: Mapping[str, str] | None = None
        shards = [name]
        if name.lower().endswith(INDEX_SUFFIX):
            headers[name] = store.read(name, MAX_INDEX, "torchfile.index")
            wanted = _weight_map(headers[name], name)
            shards = sorted(set(wanted.values()))
        files: list[File] = []
        try:
            files.extend(_open(store, shard, name if wanted is not None else "") for shard in shards)
            tensors = tensors_of(files)
            _check(wanted, files, name)
        except BaseException:
            for file in files:
                file.source.close()
            raise
        return Catalog(
            tensors,
            metadata={"format": "pt"},
            headers={**headers, **{file.name: file.header for file in files}},
            sources=tuple(file.source for file in files),
            remarks=[("torchfile.left-out", file.note) for file in files if file.note],
            unread={
                path if len(files) == 1 else f"{file.name}: {path}": _UNREAD for file in files for path in file.unread
            },
        )

    def metadata(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """There is no place for metadata."""
        return {}

    def size(self, artifact: Artifact, options: WriteOptions) -> int:
        """Nothing is written: raises ``UnsupportedError`` ``torchfile.read-only``."""
        _refuse()

    def writer(self, target: Target, name: str, artifact: Artifact, options: WriteOptions) -> NoReturn:
        """Raise ``UnsupportedError`` ``torchfile.read-only``."""
        _refuse()


def _refuse() -> NoReturn:
    raise UnsupportedError(_WHY, rule="torchfile.read-only")


def _open(store: Store, shard: str, index: str) -> File:
    try:
        return open_file(store, shard)
    except UsageError as error:
        if not index:
            raise
        raise FormatError("torchfile.index", f"expected {shard[:200]!r}: {error.message}", where=index) from error


def _weight_map(raw: bytes, where: str) -> dict[str, str]:
    found = strict_json(raw, "torchfile.index", "torchfile.index", where).get("weight_map")
    if not isinstance(found, dict) or not found or not all(isinstance(shard, str) for shard in found.values()):
        raise FormatError("torchfile.index", "expected an object 'weight_map' of file names", where=where)
    for shard in set(found.values()):
        if shard in ("", ".", "..") or any(character in shard for character in "/\\\0"):
            raise FormatError(
                "torchfile.index", f"expected the name of a file beside the index, found {shard[:200]!r}", where=where
            )
    return found


def _check(wanted: Mapping[str, str] | None, files: Sequence[File], where: str) -> None:
    if wanted is None:
        return
    shard_of = {name: file.name for file in files for name in file.tensors}
    missing = next((name for name, shard in wanted.items() if shard_of.get(name) != shard), None)
    if missing is not None:
        raise FormatError(
            "torchfile.index",
            f"expected {missing[:200]!r} in {wanted[missing]}, found no such tensor there",
            where=where,
        )
