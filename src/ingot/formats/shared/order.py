"""Checks of the order of a writer's calls, for all formats."""

from __future__ import annotations

from collections.abc import Sequence

from ingot.errors import UsageError
from ingot.model.spec import TensorSpec


class Order:
    """A check of the order of a writer's calls: each tensor of the specs once, in order, each byte of its parts once.

    Each method of a writer calls this object first; the state is in ``current`` and ``done``.

    Parameters
    ----------
    specs : sequence of TensorSpec or None
        The tensors to write, which must not change. None if any tensor with a new name may come next.
    file : str
        Name of the file in error messages.

    Raises
    ------
    UsageError
        ``writer.duplicate``: two specs have the same name.
    """

    def __init__(self, specs: Sequence[TensorSpec] | None, file: str = "") -> None:
        self.specs = specs
        self.current: TensorSpec | None = None
        self.done = 0
        """Number of tensors that are complete."""
        self._file = file
        self._expected = None if specs is None else [spec.name for spec in specs]
        self._names: set[str] | None = (
            set() if specs is None else None
        )  # names of written tensors, if there are no specs
        self._written: dict[str, int] = {}
        if self._expected is not None and len(set(self._expected)) != len(self._expected):
            raise UsageError("expected each tensor name once", rule="writer.duplicate", where=file or None)

    def expect(self, name: str) -> TensorSpec:
        """Return the next spec, for a tensor that the caller will write or that an earlier run wrote.

        Raises ``UsageError`` ``writer.order``: a tensor is open, all specs are complete, or the next spec has another
        name.
        """
        self._require_next(name)
        assert self.specs is not None
        return self.specs[self.done]

    def begin(self, spec: TensorSpec) -> None:
        """Open a tensor with the parts of ``spec``, which may state lengths that the announced spec does not.

        Raises ``UsageError`` ``writer.order``; without specs also ``writer.duplicate``.
        """
        self._next(spec.name)
        self.current = spec
        self._written = dict.fromkeys((part.role for part in spec.parts), 0)

    def write(self, role: str, nbytes: int) -> int:
        """Count the next ``nbytes`` bytes of a part; return the offset in the part at which they begin.

        Raises ``UsageError`` ``writer.role``: no tensor is open, or the tensor has no part with this role;
        ``writer.length``: too many bytes.
        """
        spec = self._opened(f"expected bytes of a part of an open tensor, found {role!r}")
        if role not in self._written:
            roles = " or ".join(repr(role_name) for role_name in self._written) or "none"
            raise self._misuse("writer.role", f"expected bytes of {roles}, found {role!r}", spec.name)
        position = self._written[role]
        length = spec.part(role).length
        if length is not None and position + nbytes > length:
            raise self._misuse(
                "writer.length", f"expected {length} bytes of {role!r}, found {position + nbytes}", spec.name
            )
        self._written[role] = position + nbytes
        return position

    def end(self) -> TensorSpec:
        """Close the tensor and return its spec.

        Raises ``UsageError`` ``writer.role``: no tensor is open; ``writer.length``: bytes are missing.
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
        """Count a tensor that an earlier run wrote as written; raises the errors of ``expect``."""
        self._complete(self.expect(name).name)

    def finish(self) -> None:
        """Raise ``UsageError`` ``writer.incomplete`` if a tensor is open or missing."""
        if self.current is not None:
            raise self._misuse("writer.incomplete", "expected the end of the tensor", self.current.name)
        if self.specs is not None and self.done != len(self.specs):
            raise self._misuse("writer.incomplete", f"expected {len(self.specs)} tensors, found {self.done}", "")

    def _require_next(self, name: str) -> None:
        if self.current is not None:
            raise self._misuse("writer.order", f"expected the end of {self.current.name!r} first", name)
        if self._expected is None:
            raise self._misuse("writer.order", "expected the writer to have specs, found a writer without any", name)
        expected = self._expected[self.done] if self.done < len(self._expected) else None
        if expected is None or expected != name:
            text = "no more tensors" if expected is None else f"{expected!r} next"
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
        location = ": ".join(filter(None, (self._file, name)))
        return UsageError(message, rule=rule, where=location or None)
