"""The order of a writer's calls, checked in one place for all formats."""

from __future__ import annotations

from collections.abc import Sequence

from ingot.errors import UsageError
from ingot.model.spec import TensorSpec


class Order:
    """Tensors come once each, in the order of the specs; parts' bytes between ``begin`` and ``end``, as announced.

    A writer asks it before it acts. Its own state follows what is answered: ``current``, ``done``.

    Parameters
    ----------
    specs : sequence of TensorSpec or None
        The tensors to come, which may not change; None where any tensor of a new name may come next.
    file : str
        What messages call the file.

    Raises
    ------
    UsageError
        ``writer.duplicate``: two specs of one name.
    """

    def __init__(self, specs: Sequence[TensorSpec] | None, file: str = "") -> None:
        self.specs = specs
        self.current: TensorSpec | None = None
        self.done = 0
        """Number of tensors that are complete."""
        self._file = file
        self._expected = None if specs is None else [spec.name for spec in specs]
        self._names: set[str] | None = set() if specs is None else None  # where no specs tell what comes
        self._written: dict[str, int] = {}
        if self._expected is not None and len(set(self._expected)) != len(self._expected):
            raise UsageError("expected each tensor name once", rule="writer.duplicate", where=file or None)

    def expect(self, name: str) -> TensorSpec:
        """Return the next spec, of a tensor that is to be written or was written by an earlier run.

        Raises ``UsageError`` ``writer.order``: a tensor is open, none is left, or the next one is another.
        """
        self._require_next(name)
        assert self.specs is not None
        return self.specs[self.done]

    def begin(self, spec: TensorSpec) -> None:
        """Open a tensor. Its parts are those of ``spec``, which may know more than the one announced.

        Raises ``UsageError`` ``writer.order``; ``writer.duplicate`` where no specs tell what comes.
        """
        self._next(spec.name)
        self.current = spec
        self._written = dict.fromkeys((part.role for part in spec.parts), 0)

    def write(self, role: str, nbytes: int) -> int:
        """Count bytes of a part and return where in it they begin.

        Raises ``UsageError`` ``writer.role``: no tensor is open, or it has no such part; ``writer.length``.
        """
        spec = self._opened(f"expected bytes of a part of an open tensor, found {role!r}")
        if role not in self._written:
            wanted = " or ".join(repr(known) for known in self._written) or "none"
            raise self._misuse("writer.role", f"expected bytes of {wanted}, found {role!r}", spec.name)
        position, length = self._written[role], spec.part(role).length
        if length is not None and position + nbytes > length:
            raise self._misuse(
                "writer.length", f"expected {length} bytes of {role!r}, found {position + nbytes}", spec.name
            )
        self._written[role] = position + nbytes
        return position

    def end(self) -> TensorSpec:
        """Close the tensor and return its spec.

        Raises ``UsageError`` ``writer.role``: none is open; ``writer.length``: bytes are missing.
        """
        spec = self._opened("no tensor is open")
        for part in spec.parts:
            if part.length not in (None, self._written[part.role]):
                message = f"expected {part.length} bytes of {part.role!r}, found {self._written[part.role]}"
                raise self._misuse("writer.length", message, spec.name)
        self.current = None
        self._complete(spec.name)
        return spec

    def restored(self, name: str) -> None:
        """Count a tensor that an earlier run wrote; errors as ``expect``."""
        self._complete(self.expect(name).name)

    def finish(self) -> None:
        """Raise ``UsageError`` ``writer.incomplete`` where a tensor is open or missing."""
        if self.current is not None:
            raise self._misuse("writer.incomplete", "expected the end of the tensor", self.current.name)
        if self.specs is not None and self.done != len(self.specs):
            raise self._misuse("writer.incomplete", f"expected {len(self.specs)} tensors, found {self.done}", "")

    def _require_next(self, name: str) -> None:
        if self.current is not None:
            raise self._misuse("writer.order", f"expected the end of {self.current.name!r} first", name)
        if self._expected is None:
            raise self._misuse("writer.order", "expected to know which tensors come, found no specs", name)
        wanted = self._expected[self.done] if self.done < len(self._expected) else None
        if wanted is None or wanted != name:
            text = "no more tensors" if wanted is None else f"{wanted!r} next"
            raise self._misuse("writer.order", f"expected {text}", name)

    def _next(self, name: str) -> None:
        if self._expected is not None or self.current is not None:
            self._require_next(name)
        elif self._names is not None and name in self._names:
            raise self._misuse("writer.duplicate", "expected each tensor name once", name)

    def _complete(self, name: str) -> None:
        self.done += 1
        if self._names is not None:
            self._names.add(name)

    def _opened(self, message: str) -> TensorSpec:
        if self.current is None:
            raise self._misuse("writer.role", message, "")
        return self.current

    def _misuse(self, rule: str, message: str, name: str) -> UsageError:
        where = ": ".join(filter(None, (self._file, name)))
        return UsageError(message, rule=rule, where=where or None)
