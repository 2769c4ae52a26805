"""The format of torch's ``.bin`` and ``.pt`` checkpoints, one file or shards under an index; read only.

Torch's restricted unpickler (``weights_only=True``) reads the pickle inside. It creates only tensors and basic
containers, and runs no code. Ingot refuses each file that this unpickler refuses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ingot.core.parsing.strictjson import strict_json
from ingot.errors import FormatError, UsageError
from ingot.formats.base import Catalog, FormatTraits, ReadOnlyFormat
from ingot.formats.detect import LEGACY_TORCH, TORCH_SUFFIXES, ZIP
from ingot.formats.torch.reader import File, open_file, tensors_of
from ingot.model.store import Store

INDEX_SUFFIX = ".bin.index.json"
MAX_INDEX = 100_000_000
_USUAL = ("pytorch_model.bin", f"pytorch_model{INDEX_SUFFIX}", *(f"model{suffix}" for suffix in TORCH_SUFFIXES))
# Files that trainers write next to the weights.
_OTHERS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.bin", "scheduler.pt", "scaler.pt")
_UNREAD = "it is outside of the state dict, or nested in it"
_WHY = "Ingot only reads files of torch: write safetensors, which stores the same tensors and cannot run code"


class TorchFormat(ReadOnlyFormat):
    """The format of dense tensors that ``torch.save`` writes."""

    name = "torch"
    suffixes: tuple[str, ...] = (*TORCH_SUFFIXES, INDEX_SUFFIX)
    summary = "dense tensors that torch.save wrote (.bin, .pt), one file or shards; read only, by torch itself"
    why_read_only = _WHY
    read_only_rule = "torchfile.read-only"
    traits = FormatTraits(
        last_resort=True,
    )

    def claims(self, name: str, head: bytes) -> bool:
        """Return whether the file has torch's suffix and is a zip archive or torch's older format, or is an index."""
        lower = name.lower()
        return lower.endswith(INDEX_SUFFIX) or (lower.endswith(TORCH_SUFFIXES) and head.startswith((ZIP, LEGACY_TORCH)))

    def entry(self, names: Sequence[str]) -> str | None:
        """Return the file or index with the usual name, else the only candidate; None if ambiguous."""
        usual = next((name for name in _USUAL if name in names), None)
        if usual is not None:
            return usual
        matching = [
            name
            for name in names
            if name.lower().endswith(self.suffixes) and name not in _OTHERS and not name.startswith((".", "rng_state"))
        ]
        return matching[0] if len(matching) == 1 else None

    def read(self, store: Store, name: str, *, verify: bool = True) -> Catalog:
        """Return the catalog of the file, or of all shards of an index, which torch maps into memory.

        Raises ``MissingExtraError`` if torch is not installed, ``UnsupportedError`` ``torchfile.*``, ``FormatError``
        ``torchfile.*``.
        """
        headers: dict[str, bytes] = {}
        weight_map: Mapping[str, str] | None = None
        shards = [name]
        if name.lower().endswith(INDEX_SUFFIX):
            headers[name] = store.read(name, MAX_INDEX, "torchfile.index")
            weight_map = _weight_map(headers[name], name)
            shards = sorted(set(weight_map.values()))
        files: list[File] = []
        try:
            files.extend(_open(store, shard, name if weight_map is not None else "") for shard in shards)
            tensors = tensors_of(files)
            _check(weight_map, files, name)
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


def _open(store: Store, shard: str, index: str) -> File:
    try:
        return open_file(store, shard)
    except UsageError as error:
        if not index:
            raise
        raise FormatError("torchfile.index", f"expected {shard[:200]!r}: {error.message}", where=index) from error


def _weight_map(raw: bytes, location: str) -> dict[str, str]:
    weight_map = strict_json(raw, "torchfile.index", "torchfile.index", location).get("weight_map")
    if (
        not isinstance(weight_map, dict)
        or not weight_map
        or not all(isinstance(shard, str) for shard in weight_map.values())
    ):
        raise FormatError("torchfile.index", "expected an object 'weight_map' of file names", where=location)
    for shard in set(weight_map.values()):
        if shard in ("", ".", "..") or any(character in shard for character in "/\\\0"):
            raise FormatError(
                "torchfile.index",
                f"expected the name of a file in the folder of the index, found {shard[:200]!r}",
                where=location,
            )
    return weight_map


def _check(weight_map: Mapping[str, str] | None, files: Sequence[File], location: str) -> None:
    if weight_map is None:
        return
    shard_of = {name: file.name for file in files for name in file.tensors}
    missing = next((name for name, shard in weight_map.items() if shard_of.get(name) != shard), None)
    if missing is not None:
        raise FormatError(
            "torchfile.index",
            f"expected {missing[:200]!r} in {weight_map[missing]}, but that file has no tensor of this name",
            where=location,
        )
