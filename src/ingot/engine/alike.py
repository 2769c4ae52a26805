"""Steps of which many differ in the name of their tensor alone: such are kept as one, and made again when asked for."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, overload

from ingot.core.stats import NO_ERROR, ErrorStats
from ingot.engine.data import step_data
from ingot.engine.done import Done
from ingot.engine.work import Step
from ingot.model.lazy import Many
from ingot.model.spec import ManySpecs, TensorSpec

Found = TypeVar("Found")

_PLANNED: Mapping[str, Any] = {"digests": {}}
_TOGETHER = 1 << 12  # names that a fingerprint takes at once


class Steps(Sequence[Step]):
    """The steps of a plan, in order.

    ``sources`` has what ``Step.like`` takes of a name, a tensor or several; they have to stay as they are.
    """

    def __init__(self, sources: Many[Any]) -> None:
        self._sources = sources
        self._kinds: list[Step] = []
        self.numbers = array("I")
        """The number of each step's kind."""
        self.names: list[str] = []
        """The names of what is read."""

    def add(self, step: Step) -> int:
        """Append a step; return the number of its kind, for ``repeat``."""
        self._kinds.append(step)
        self.numbers.append(len(self._kinds) - 1)
        self.names.append(step.tensor.name)
        return len(self._kinds) - 1

    def repeat(self, name: str, kind: int) -> None:
        """Append a step like the first of a kind, which has ``like``, for the tensor of that name."""
        self.numbers.append(kind)
        self.names.append(name)

    def first(self, kind: int) -> Step:
        """Return the step that a kind is of."""
        return self._kinds[kind]

    def chosen(self, order: Iterable[int]) -> Steps:
        """Return these steps of it, in that order."""
        found = Steps(self._sources)
        found._kinds = self._kinds
        for index in order:
            found.repeat(self.names[index], self.numbers[index])
        return found

    @property
    def specs(self) -> Sequence[TensorSpec]:
        """What is written, each spec made when it is asked for."""
        return _Specs(self)

    @property
    def written(self) -> Sequence[str]:
        """The names of what is written."""
        if all(step.spec.name == step.tensor.name for step in self._kinds):
            return self.names
        return [self.spec(index).name for index in range(len(self))]

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Step]:
        kinds, passing = self._kinds, self._sources.passing
        for name, number in zip(self.names, self.numbers, strict=True):
            first = kinds[number]
            yield first if first.tensor.name == name else first.like(passing(name))

    @overload
    def __getitem__(self, index: int) -> Step: ...

    @overload
    def __getitem__(self, index: slice) -> Steps: ...

    def __getitem__(self, index: int | slice) -> Step | Steps:
        if isinstance(index, slice):
            return self.chosen(range(len(self))[index])
        name, first = self.names[index], self._kinds[self.numbers[index]]
        return first if first.tensor.name == name else first.like(self._sources.passing(name))

    def spec(self, index: int) -> TensorSpec:
        """Return what one step writes."""
        name, first = self.names[index], self._kinds[self.numbers[index]]
        return first.spec if first.tensor.name == name else first.spec.named(name)


class _Specs(ManySpecs):
    """The specs of steps."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps

    @property
    def names(self) -> Sequence[str]:
        return self._steps.written

    @property
    def numbers(self) -> Sequence[int]:
        return self._steps.numbers

    def of_kind(self, number: int) -> TensorSpec:
        return self._steps.first(number).spec

    def __len__(self) -> int:
        return len(self._steps)

    @overload
    def __getitem__(self, index: int) -> TensorSpec: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[TensorSpec]: ...

    def __getitem__(self, index: int | slice) -> TensorSpec | Sequence[TensorSpec]:
        return self._steps[index].specs if isinstance(index, slice) else self._steps.spec(index)


def specs_of(steps: Sequence[Step]) -> Sequence[TensorSpec]:
    """Return what steps write, in order."""
    return steps.specs if isinstance(steps, Steps) else [step.spec for step in steps]


def names_read(steps: Sequence[Step]) -> Sequence[str]:
    """Return the name of the tensor that each step reads."""
    return steps.names if isinstance(steps, Steps) else [step.tensor.name for step in steps]


def by_kind(steps: Sequence[Step]) -> Iterator[tuple[Step, int]]:
    """Yield a step of each kind, and how many there are of it."""
    if not isinstance(steps, Steps):
        yield from ((step, 1) for step in steps)
        return
    counts: dict[int, int] = {}
    for number in steps.numbers:
        counts[number] = counts.get(number, 0) + 1
    yield from ((steps.first(number), count) for number, count in counts.items())


def named(steps: Sequence[Step]) -> Iterator[tuple[str, Step]]:
    """Yield what each step writes, and a step of its kind."""
    if isinstance(steps, Steps):
        yield from zip(steps.written, map(steps.first, steps.numbers), strict=True)
    else:
        yield from ((step.spec.name, step) for step in steps)


def of_each(steps: Sequence[Step], ask: Callable[[Step], Found]) -> list[Found]:
    """Return what ``ask`` gives of each step, which is asked once of those of a kind."""
    if not isinstance(steps, Steps):
        return [ask(step) for step in steps]
    found: dict[int, Found] = {}
    for number in steps.numbers:
        if number not in found:
            found[number] = ask(steps.first(number))
    return [found[number] for number in steps.numbers]


def steps_data(steps: Sequence[Step]) -> Iterator[Mapping[str, Any]]:
    """Yield all that determines what steps write, as JSON takes it."""
    if not isinstance(steps, Steps):
        yield from map(step_data, steps)
        return
    yield from (step_data(step) for step, _ in by_kind(steps))
    for start in range(0, len(steps), _TOGETHER):
        part = slice(start, start + _TOGETHER)
        yield {"names": steps.names[part], "kinds": list(steps.numbers[part])}


class Finished(Sequence[Done]):
    """Steps that are written, in order; of those that went as planned nothing is kept."""

    def __init__(self, steps: Sequence[Step]) -> None:
        self._steps, self._count = steps, 0
        self._told: dict[int, Done] = {}
        self._figures: dict[int, tuple[int, ErrorStats, Mapping[str, Any]]] = {}  # of steps that are made again
        self._plain: dict[tuple[str, ...], Mapping[str, Any]] = {}

    def append(self, done: Done) -> None:
        """Add the next step as it was done; where nothing was learnt of many, they share what says so."""
        error, notes, steps = done.error, done.notes, self._steps
        if error == NO_ERROR and not any(notes.values()):
            plain = self._plain.setdefault(tuple(notes), notes)
            error, notes = NO_ERROR, plain if plain == notes else notes
        if isinstance(steps, Steps) and steps.first(steps.numbers[self._count]).repeats:
            self._figures[self._count] = done.nbytes, error, notes
        else:
            self._told[self._count] = Done(done.step, done.nbytes, error, notes)
        self._count += 1

    def as_planned(self, nbytes: int, error: ErrorStats, notes: Mapping[str, Any]) -> bool:
        """Add the next step if it is one of a kind, and nothing was learnt of it."""
        steps = self._steps
        if not isinstance(steps, Steps) or error.count or any(notes.values()):
            return False
        first = steps.first(steps.numbers[self._count])
        if not first.repeats or first.out_bytes != nbytes:
            return False
        self._count += 1
        return True

    def planned(self, index: int) -> tuple[str, int | None]:
        """Return the name and the kind of a step that went as planned; None for a kind of others."""
        steps = self._steps
        if index in self._told or index in self._figures or not isinstance(steps, Steps):
            return "", None
        return steps.names[index], steps.numbers[index]

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Done: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Done]: ...

    def __getitem__(self, index: int | slice) -> Done | Sequence[Done]:
        if isinstance(index, slice):
            return [self[number] for number in range(self._count)[index]]
        number = range(self._count)[index]
        told = self._told.get(number)
        if told is not None:
            return told
        step = self._steps[number]
        return Done(step, *self._figures.get(number, (step.out_bytes, NO_ERROR, _PLANNED)))
