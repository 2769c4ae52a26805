"""The objects of a library: bytes under their BLAKE3, each a ``.zt`` file of one tensor, whole or against another one.

``objects/ID.zt`` holds the bytes by themselves: as they are, in zstd, or as ``float_entropy``. ``objects/ID-BASE.zt``
is a ``delta_exact`` to the object ``BASE``. So a listing of the folder tells what needs what, and sizes.
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
MOST_DELTAS = 4
"""Deltas between an object and one that is stored whole."""

_CODECS = (DenseLayout.codec, EntropyCodec.id, DELTA)
_NAME = re.compile(r"([0-9a-f]{64})(?:-([0-9a-f]{64}))?\.zt")


@dataclass(frozen=True, slots=True)
class Form:
    """A way in which an object is stored: ``base`` is the object that it is a delta to; empty where it is whole."""

    id: str
    base: str = ""

    @property
    def file(self) -> str:
        """The name of the file."""
        return f"{FOLDER}/{self.id}{f'-{self.base}' if self.base else ''}.zt"


def id_of(data: memoryview) -> str:
    """Return the name of an object: the hex of the BLAKE3 of its bytes."""
    running = Blake3()
    running.update(data)
    return hex_of(running)


class Objects:
    """What lies in a library's folder of objects, as of its last listing, and what was added since.

    Parameters
    ----------
    folder : SharedFolder
    """

    def __init__(self, folder: SharedFolder) -> None:
        self._folder = folder
        self._sizes: dict[Form, int] = {}
        self._bases: dict[str, list[str]] = {}
        self._deltas_to: set[str] = set()
        self._made: dict[str, tuple[int, str]] | None = None
        self.strays: list[str] = []
        self.refresh()

    def refresh(self) -> None:
        """List the folder again. What has another name than an object's is in ``strays``."""
        self._sizes, self._bases, self._deltas_to, self._made, self.strays = {}, {}, set(), None, []
        for name, size in self._folder.sizes(FOLDER).items():
            match = _NAME.fullmatch(name)
            if match is None:
                self.strays.append(f"{FOLDER}/{name}")
            else:
                self.add(Form(match[1], match[2] or ""), size)

    def add(self, form: Form, size: int) -> None:
        """Take note of an object that was written."""
        self._sizes[form] = size
        self._bases[form.id] = sorted({*self._bases.get(form.id, ()), form.base})
        self._deltas_to.add(form.base)
        if self._made is not None and form.id not in self._made and form.id not in self._deltas_to:
            level = self._made[form.base][0] + 1 if form.base in self._made else 0 if not form.base else MOST_DELTAS + 1
            if level <= MOST_DELTAS:
                self._made[form.id] = level, form.base
        else:
            self._made = None  # what others are made of: they are looked at again

    def __contains__(self, id: object) -> bool:
        return id in self._bases

    def forms(self) -> Mapping[Form, int]:
        """Return all forms of all objects, and their bytes."""
        return self._sizes

    def chain(self, id: str) -> list[Form]:
        """Return the forms from which an object is made: one that is whole, then deltas, the object's own last.

        An object that is there in several forms is taken whole, else as the delta with the shortest chain.

        Raises
        ------
        IntegrityError
            ``library.missing``: the object, or one that it is a delta to, is not there.
        FormatError
            ``library.chain``: more deltas than ``MOST_DELTAS``, or deltas in a circle.
        """
        levels = self._levels()
        if id in levels:
            forms = [Form(id, levels[id][1])]
            while forms[0].base:
                base = forms[0].base
                forms.insert(0, Form(base, levels[base][1]))
            return forms
        where, gone = self._folder.store.location_of(FOLDER), self._gone(id)
        if gone:
            needed = "is" if gone == id else f"{id} is made of, but it is"
            raise IntegrityError(
                "library.missing",
                f"expected object {gone}, which {needed} not there: put it back from a copy of the library, or add "
                "what needs it again",
                where=where,
            )
        raise FormatError(
            "library.chain",
            f"expected at most {MOST_DELTAS} deltas between {id} and an object that is stored whole, found more, or a "
            "circle",
            where=where,
        )

    def _levels(self) -> dict[str, tuple[int, str]]:
        """Return for each object that can be made its number of deltas, and the base of the last of them."""
        if self._made is None:
            self._made = {form.id: (0, "") for form in self._sizes if not form.base}
            for level in range(1, MOST_DELTAS + 1):
                deltas = [form for form in self._sizes if form.id not in self._made and form.base in self._made]
                for form in sorted(deltas, key=lambda form: form.base, reverse=True):
                    if self._made[form.base][0] == level - 1:
                        self._made[form.id] = (level, form.base)
        return self._made

    def _gone(self, id: str) -> str:
        """Return the first object on the way to a whole one that is not there; empty for too many deltas."""
        for _ in range(MOST_DELTAS + 1):
            if id not in self._bases:
                return id
            id = self._bases[id][0]
        return ""

    def needed(self, ids: Iterable[str]) -> set[Form]:
        """Return all forms that these objects are made of; errors as ``chain``."""
        return {form for id in ids for form in self.chain(id)}

    def stored(self, forms: Iterable[Form]) -> int:
        """Return the bytes of the files of these forms."""
        return sum(self._sizes[form] for form in forms)

    def values(self, id: str, size: int | None = None) -> memoryview:
        """Return an object's bytes, compared with its name; in memory are these, and those of one delta.

        Parameters
        ----------
        id : str
        size : int, optional
            How many bytes there should be.

        Raises
        ------
        IntegrityError
            ``library.digest``: the bytes are others than the name says; ``library.missing``.
        FormatError
            ``library.object``: the file is no object; ``library.chain``.
        """
        return self._values(self.chain(id), size)

    def check(self, form: Form) -> None:
        """Compare what is stored in this form with the object's name; errors as ``values``."""
        self._values([*(self.chain(form.base) if form.base else ()), form], None)

    def _values(self, chain: Sequence[Form], size: int | None) -> memoryview:
        id, data = chain[-1].id, np.empty(0, np.uint8)
        for form in chain:
            with self.opened(form) as tensor:
                self._check_size(form, tensor, size)
                data = _applied(tensor, data, form) if form.base else _decoded(tensor, writable=len(chain) > 1)
        view = file_bytes(data)
        if id_of(view) != id:
            raise IntegrityError(
                "library.digest",
                "expected the bytes that the object's name is the digest of, found others: it is damaged, or one that "
                "it is made of; put it back from a copy of the library",
                where=self._folder.store.location_of(chain[-1].file),
            )
        return view

    @contextmanager
    def opened(self, form: Form) -> Iterator[Tensor]:
        """Lend the tensor that a file of an object holds; raises ``FormatError`` ``library.object``."""
        store, where = self._folder.store, self._folder.store.location_of(form.file)
        try:
            catalog = FORMATS["zt"].read(store, form.file, verify=True)
        except IngotError as error:
            raise error if where in (error.where or "") else error.at(where) from None
        try:
            tensor = catalog.tensors.get(form.id)
            sound = tensor is not None and len(catalog.tensors) == 1 and tensor.codec in _CODECS
            if tensor is None or not sound or (tensor.codec == DELTA) != bool(form.base) or tensor.dtype not in DTYPES:
                raise FormatError(
                    "library.object",
                    f"expected one tensor, called as the file and of codec {', '.join(_CODECS)}, the last in deltas "
                    "only; found another",
                    where=where,
                )
            CODECS[tensor.codec].check(tensor)
            tensor.decoder = CODECS[tensor.codec]
            yield tensor
        except IngotError as error:
            raise error if where in (error.where or "") else error.at(where) from None
        finally:
            for source in catalog.sources:
                source.close()

    def _check_size(self, form: Form, tensor: Tensor, size: int | None) -> None:
        """Refuse an object of another size than expected, or of too many bytes for what is stored, undecoded."""
        nbytes = DTYPES[tensor.dtype].nbytes(tensor.size)
        if size is not None and nbytes != size:
            raise FormatError("library.object", f"expected an object of {size} bytes, found one of {nbytes}")
        if decoded_bytes(tensor) > max(nbytes, 1) * 2 + (1 << 16):
            raise FormatError("library.object", f"expected parts no larger than the {nbytes} bytes that they stand for")
        require_room([tensor], tensor.name)


def _decoded(tensor: Tensor, *, writable: bool) -> Array:
    return tensor.numpy(copy=writable).reshape(-1)


def _applied(tensor: Tensor, data: Array, form: Form) -> Array:
    """Apply a delta to the bytes of its base, in place."""
    params, row = params_of(tensor), DTYPES[tensor.dtype]
    if data.nbytes != row.nbytes(tensor.size):
        raise FormatError(
            "library.object",
            f"expected a delta to the {data.nbytes} bytes of object {form.base}, found one to "
            f"{row.nbytes(tensor.size)}",
        )
    words = data.view(np.uint8).view(numpy_dtype(params.dtype))
    parts = {role: tensor.parts[role].array() for role in ("sizes", "planes")}
    unpack(parts, words, words, chunk=params.chunk)
    return words


def require_id(text: object, rule: str, where: str) -> str:
    """Return an object's id; raises ``FormatError`` with ``rule`` for anything else."""
    if not isinstance(text, str) or not re.fullmatch("[0-9a-f]{64}", text):
        raise FormatError(
            rule, f"expected an object's id, 64 hexadecimal digits; found {str(text)[:80]!r}", where=where
        )
    return text


def require_known(name: str, known: Iterable[str], where: str) -> None:
    """Refuse the name of an artifact that is not there: ``UsageError`` ``library.unknown``."""
    every = list(known)
    if name not in every:
        raise UsageError(
            f"no artifact {name!r} in this library{did_you_mean(name, every)}; `ingot store ls` lists them",
            rule="library.unknown",
            where=where,
        )
