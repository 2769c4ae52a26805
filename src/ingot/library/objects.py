"""The objects of a library: bytes named by their BLAKE3 digest, each a ``.zt`` file with one tensor.

``objects/ID.zt`` stores the bytes without a base: raw, in zstd, or as ``float_entropy``. ``objects/ID-BASE.zt`` is a
``delta_exact`` to the object ``BASE``. A listing of the folder thus shows sizes and dependencies.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ingot.codecs.delta.exact import ID as DELTA
from ingot.codecs.delta.exact_chunks import params_of, unpack
from ingot.codecs.lossless.float_entropy import EntropyCodec
from ingot.codecs.table import CODECS
from ingot.core.bytes.checksums import Blake3, hex_of
from ingot.core.numeric.dtypes import DTYPES, file_bytes, numpy_dtype
from ingot.core.registry import did_you_mean
from ingot.errors import FormatError, IngotError, IntegrityError, UsageError
from ingot.formats.detect import FORMATS
from ingot.model.layouts.dense import DenseLayout
from ingot.model.reading.limits import decoded_bytes, require_room
from ingot.model.tensor import Array, Tensor
from ingot.stores.shared import SharedFolder

FOLDER = "objects"
MAX_DELTAS = 4
"""Maximum number of deltas between an object and an object stored without a base."""

_CODECS = (DenseLayout.codec, EntropyCodec.id, DELTA)
_NAME = re.compile(r"([0-9a-f]{64})(?:-([0-9a-f]{64}))?\.zt")


@dataclass(frozen=True, slots=True)
class StorageForm:
    """One way in which an object is stored: as a delta to the object ``base`` or, if ``base`` is empty, in full."""

    id: str
    base: str = ""

    @property
    def file(self) -> str:
        """The name of the variant's file in ``objects/``."""
        return f"{FOLDER}/{self.id}{f'-{self.base}' if self.base else ''}.zt"


def id_of(data: memoryview) -> str:
    """Return the name of an object: the BLAKE3 of its bytes in hex."""
    hasher = Blake3()
    hasher.update(data)
    return hex_of(hasher)


class Objects:
    """The objects of a library at the latest listing, and the objects added since.

    Parameters
    ----------
    folder : SharedFolder
    """

    def __init__(self, folder: SharedFolder) -> None:
        self._folder = folder
        self._sizes: dict[StorageForm, int] = {}
        self._bases: dict[str, list[str]] = {}
        self._deltas_to: set[str] = set()
        self._decodable: dict[str, tuple[int, str]] | None = None
        self.strays: list[str] = []
        self.refresh()

    def refresh(self) -> None:
        """List the folder again; files whose names are not those of objects go to ``strays``."""
        self._sizes = {}
        self._bases = {}
        self._deltas_to = set()
        self._decodable = None
        self.strays = []
        for name, size in self._folder.sizes(FOLDER).items():
            match = _NAME.fullmatch(name)
            if match is None:
                self.strays.append(f"{FOLDER}/{name}")
            else:
                self.add(StorageForm(match[1], match[2] or ""), size)

    def add(self, variant: StorageForm, size: int) -> None:
        """Record an object that was written."""
        self._sizes[variant] = size
        self._bases[variant.id] = sorted({*self._bases.get(variant.id, ()), variant.base})
        self._deltas_to.add(variant.base)
        if self._decodable is not None and variant.id not in self._decodable and variant.id not in self._deltas_to:
            level = (
                self._decodable[variant.base][0] + 1
                if variant.base in self._decodable
                else 0
                if not variant.base
                else MAX_DELTAS + 1
            )
            if level <= MAX_DELTAS:
                self._decodable[variant.id] = level, variant.base
        else:
            self._decodable = None  # other objects may depend on it, so the levels must be computed again

    def __contains__(self, id: object) -> bool:
        return id in self._bases

    def variants(self) -> Mapping[StorageForm, int]:
        """Return all variants of all objects, with the sizes of their files in bytes."""
        return self._sizes

    def chain(self, id: str) -> list[StorageForm]:
        """Return the stored variants from which an object is decoded.

        The first variant has no base, each further one is a delta to the variant before it, and the last one is of the
        object. If an object has several variants, the one without a base is used, else the delta with the shortest
        chain.

        Raises
        ------
        IntegrityError
            ``library.missing``: the object, or an object in its chain, does not exist.
        FormatError
            ``library.chain``: more deltas than ``MAX_DELTAS``, or a cycle.
        """
        levels = self._levels()
        if id in levels:
            variants = [StorageForm(id, levels[id][1])]
            while variants[0].base:
                base = variants[0].base
                variants.insert(0, StorageForm(base, levels[base][1]))
            return variants
        location = self._folder.store.location_of(FOLDER)
        missing = self._missing(id)
        if missing:
            needed = "does" if missing == id else f"{id} depends on but does"
            raise IntegrityError(
                "library.missing",
                f"expected object {missing}, which {needed} not exist: restore it from a copy of the library, or add "
                "the artifact again",
                where=location,
            )
        raise FormatError(
            "library.chain",
            f"expected at most {MAX_DELTAS} deltas between {id} and an object without a base; there are more, or a "
            "cycle",
            where=location,
        )

    def _levels(self) -> dict[str, tuple[int, str]]:
        """Return, for each object that can be decoded, the number of deltas in its shortest chain, and its base.

        The keys are ids of objects. The base is the id from which the last delta of the chain is stored, or empty.
        """
        if self._decodable is None:
            self._decodable = {variant.id: (0, "") for variant in self._sizes if not variant.base}
            for level in range(1, MAX_DELTAS + 1):
                deltas = [
                    variant
                    for variant in self._sizes
                    if variant.id not in self._decodable and variant.base in self._decodable
                ]
                for variant in sorted(deltas, key=lambda variant: variant.base, reverse=True):
                    if self._decodable[variant.base][0] == level - 1:
                        self._decodable[variant.id] = (level, variant.base)
        return self._decodable

    def _missing(self, id: str) -> str:
        """Return the id of the first missing object in the chain of ``id``; empty if the chain is too long."""
        for _ in range(MAX_DELTAS + 1):
            if id not in self._bases:
                return id
            id = self._bases[id][0]
        return ""

    def needed(self, ids: Iterable[str]) -> set[StorageForm]:
        """Return all variants from which these objects are decoded. Raises the errors of ``chain``."""
        return {variant for id in ids for variant in self.chain(id)}

    def stored(self, variants: Iterable[StorageForm]) -> int:
        """Return the number of bytes of the files of these variants."""
        return sum(self._sizes[variant] for variant in variants)

    def values(self, id: str, size: int | None = None) -> memoryview:
        """Return an object's contents after comparing the digest. Memory contains at most them and one delta.

        Parameters
        ----------
        id : str
        size : int, optional
            The expected number of bytes.

        Raises
        ------
        IntegrityError
            ``library.digest``: the bytes do not match the object's name; ``library.missing``.
        FormatError
            ``library.object``: the file is not an object; ``library.chain``.
        """
        return self._values(self.chain(id), size)

    def check(self, variant: StorageForm) -> None:
        """Decode this variant and compare the digest with the object's name. Raises the errors of ``values``."""
        self._values([*(self.chain(variant.base) if variant.base else ()), variant], None)

    def _values(self, chain: Sequence[StorageForm], size: int | None) -> memoryview:
        id = chain[-1].id
        data = np.empty(0, np.uint8)
        for variant in chain:
            with self.opened(variant) as tensor:
                self._check_size(variant, tensor, size)
                data = _apply(tensor, data, variant) if variant.base else _decode(tensor, writable=len(chain) > 1)
        view = file_bytes(data)
        if id_of(view) != id:
            raise IntegrityError(
                "library.digest",
                "the bytes do not match the digest in the object's name: the object or one in its chain is damaged; "
                "restore it from a copy of the library",
                where=self._folder.store.location_of(chain[-1].file),
            )
        return view

    @contextmanager
    def opened(self, variant: StorageForm) -> Iterator[Tensor]:
        """Yield the tensor in an object's file. Raises ``FormatError`` ``library.object``."""
        store = self._folder.store
        location = self._folder.store.location_of(variant.file)
        try:
            catalog = FORMATS["zt"].read(store, variant.file, verify=True)
        except IngotError as error:
            raise error if location in (error.where or "") else error.add_location(location) from None
        try:
            tensor = catalog.tensors.get(variant.id)
            sound = tensor is not None and len(catalog.tensors) == 1 and tensor.codec in _CODECS
            if (
                tensor is None
                or not sound
                or (tensor.codec == DELTA) != bool(variant.base)
                or tensor.dtype not in DTYPES
            ):
                raise FormatError(
                    "library.object",
                    f"expected one tensor with the name of the file and codec {', '.join(_CODECS)} (the last only for "
                    "deltas)",
                    where=location,
                )
            CODECS[tensor.codec].check(tensor)
            tensor.decoder = CODECS[tensor.codec]
            yield tensor
        except IngotError as error:
            raise error if location in (error.where or "") else error.add_location(location) from None
        finally:
            for source in catalog.sources:
                source.close()

    def _check_size(self, variant: StorageForm, tensor: Tensor, size: int | None) -> None:
        """Raise an error if an object's size is not ``size``, or if its parts are too large for its size.

        Nothing is decoded. If ``size`` is None, any size is accepted.
        """
        nbytes = DTYPES[tensor.dtype].nbytes(tensor.size)
        if size is not None and nbytes != size:
            raise FormatError("library.object", f"expected an object of {size} bytes, found {nbytes} bytes")
        if decoded_bytes(tensor) > max(nbytes, 1) * 2 + (1 << 16):
            raise FormatError("library.object", f"the stored parts are too large for an object of {nbytes} bytes")
        require_room([tensor], tensor.name)


def _decode(tensor: Tensor, *, writable: bool) -> Array:
    return tensor.numpy(copy=writable).reshape(-1)


def _apply(tensor: Tensor, data: Array, variant: StorageForm) -> Array:
    """Apply a delta to ``data``, the contents of the base object, in place; return the result."""
    params = params_of(tensor)
    row = DTYPES[tensor.dtype]
    if data.nbytes != row.nbytes(tensor.size):
        raise FormatError(
            "library.object",
            f"the base {variant.base} has {data.nbytes} bytes, but the delta expects {row.nbytes(tensor.size)}",
        )
    values = data.view(np.uint8).view(numpy_dtype(params.dtype))
    parts = {role: tensor.parts[role].array() for role in ("sizes", "planes")}
    unpack(parts, values, values, chunk=params.chunk)
    return values


def require_id(text: object, rule: str, location: str) -> str:
    """Return ``text`` if it is an object's id; raise ``FormatError`` with ``rule`` otherwise."""
    if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{64}", text):
        raise FormatError(
            rule, f"expected an object's id, 64 hexadecimal digits; found {str(text)[:80]!r}", where=location
        )
    return text


def require_known(name: str, names: Iterable[str], location: str) -> None:
    """Raise ``UsageError`` ``library.unknown`` if the library has no artifact of this name."""
    known_names = list(names)
    if name not in known_names:
        raise UsageError(
            f"no artifact {name!r} in this library{did_you_mean(name, known_names)}; `ingot store ls` lists them",
            rule="library.unknown",
            where=location,
        )
