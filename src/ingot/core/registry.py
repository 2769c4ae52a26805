"""Tables from names to lazily imported objects, which installed distributions extend by entry points.

A table contains Ingot's own entries, then those of the extensions that ship with it (``core.extensions``), then those
of plugins: distributions that declare entry points in the table's group (``docs/developing/plugin.md``). Metadata of
plugins is read if a name is not Ingot's own or if the table is listed. Code of a plugin is imported if its entry is
used. No name in a file selects code that is not in a table.
"""

from __future__ import annotations

import difflib
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from importlib import import_module
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from ingot.core.extensions import EXTENSIONS
from ingot.errors import DISTRIBUTION, PluginError, UsageError, printable

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


def did_you_mean(name: str, valid_names: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` if a valid name is similar to ``name``, else empty text."""
    close = difflib.get_close_matches(name, list(valid_names), 1)
    return f" (did you mean {close[0]!r}?)" if close else ""


T = TypeVar("T")


class Plugin:
    """An entry point of an installed distribution."""

    def __init__(self, entry: EntryPoint) -> None:
        self._entry = entry
        self.name = entry.name

    @property
    def distribution(self) -> str:
        """The name and version of the distribution, for messages."""
        return printable(f"{_distribution_name(self._entry)} {getattr(self._entry.dist, 'version', '')}".strip())

    @property
    def summary(self) -> str:
        """The summary in the distribution's metadata, on one line; empty if it has none."""
        metadata = None if self._entry.dist is None else self._entry.dist.metadata
        text = metadata["Summary"] if metadata is not None and "Summary" in metadata else ""
        return printable(" ".join(text.split()))

    def load(self) -> Any:
        """Import and return the object; raise the errors of the import."""
        return self._entry.load()


class Registry(Mapping[str, T], Generic[T]):
    """Maps a name to the object at ``"module:attribute"``, imported on first use.

    Parameters
    ----------
    noun : str
        The category that names belong to; part of messages and of the rule ``NOUN.unknown``.
    entries : sequence of (name, "module:attribute")
        Ingot's own entries. A repeated name is an error.
    group : str, optional
        The group of entry points that extends the table. Without it the table has no plugins.
    contract : type, optional
        A class whose public members each value of a plugin must have.
    identifier : str, optional
        The member of a value that equals its name in the table.
    """

    def __init__(
        self,
        noun: str,
        entries: tuple[tuple[str, str], ...] = (),
        *,
        group: str = "",
        contract: type[Any] | None = None,
        identifier: str = "",
    ) -> None:
        self._noun = noun
        self._group = group
        self._contract = contract
        self._identifier = identifier
        self._targets: dict[str, str] = {}
        self._loaded: dict[str, T] = {}
        self._plugins: dict[str, Plugin] | None = None
        self._unusable: set[str] = set()
        for name, target in (*entries, *EXTENSIONS.get(group, {}).items()):
            self.add(name, target)

    def add(self, name: str, target: str) -> None:
        """Add one entry; raise ``UsageError`` if the name is taken."""
        if name in self._targets:
            raise UsageError(
                f"{self._noun} {name!r} is already registered as {self._targets[name]}", rule="registry.duplicate"
            )
        self._targets[name] = target

    def __getitem__(self, name: str) -> T:
        if name not in self._loaded:
            target = self._targets.get(name)
            if target is None:
                self._loaded[name] = self._load_plugin(name)
            else:
                module, _, attribute = target.partition(":")
                self._loaded[name] = self._make(name, getattr(import_module(module), attribute))
        return self._loaded[name]

    def _make(self, name: str, target: Any) -> T:
        """Return the entry's value for the imported attribute."""
        value: T = target
        return value

    def __contains__(self, name: object) -> bool:
        return name in self._targets or name in self.plugins()

    def __iter__(self) -> Iterator[str]:
        yield from self._targets
        yield from self.plugins()

    def __len__(self) -> int:
        return len(self._targets) + len(self.plugins())

    def get_or_refuse(self, name: str) -> T:
        """Return the value of a name; raise a ``UsageError`` that lists all names if the name is unknown."""
        if name not in self:
            raise UsageError(
                f"unknown {self._noun} {name!r}{did_you_mean(name, self)}; known: {', '.join(self)}",
                rule=f"{self._noun}.unknown",
            )
        return self[name]

    def plugins(self) -> Mapping[str, Plugin]:
        """Return the plugins' entries by name; reads metadata once and imports no plugin.

        An entry is left out if Ingot itself, or another distribution, has an entry of the same name. A warning then
        names the distributions.
        """
        if self._plugins is None:
            self._plugins = {}
            by_name: dict[str, list[Plugin]] = {}
            for plugin in read_plugins(self._group) if self._group else ():
                by_name.setdefault(plugin.name, []).append(plugin)
            for name, same in sorted(by_name.items()):
                sources = " and ".join(sorted(plugin.distribution for plugin in same))
                if name in self._targets:
                    warnings.warn(
                        f"{self._noun} {name!r} of {sources} is ignored: Ingot has its own; rename the entry point or "
                        f"uninstall the distribution [plugin.name]",
                        stacklevel=2,
                    )
                elif len(same) > 1:
                    warnings.warn(
                        f"{self._noun} {name!r} is ignored: {sources} both register it; uninstall one of them "
                        f"[plugin.name]",
                        stacklevel=2,
                    )
                else:
                    self._plugins[name] = same[0]
        return self._plugins

    def available(self) -> Iterator[tuple[str, T]]:
        """Yield names and values of all entries; a plugin's entry that cannot be used is a warning, once."""
        yield from ((name, self[name]) for name in tuple(self._targets))
        yield from self.available_plugins()

    def available_plugins(self) -> Iterator[tuple[str, T]]:
        """Yield names and values of the plugins' entries; one that cannot be used is a warning, once."""
        for name in self.plugins():
            if name in self._unusable:
                continue
            try:
                value = self[name]
            except PluginError as error:
                self._unusable.add(name)
                warnings.warn(str(error), stacklevel=2)
                continue
            yield name, value

    def _load_plugin(self, name: str) -> T:
        plugin = self.plugins()[name]
        try:
            target = plugin.load()
        except (Exception, SystemExit) as error:
            raise self._plugin_error("plugin.import", plugin, f"cannot be imported: {_one_line(error)}") from error
        try:
            value = self._make(name, target)
        except (Exception, SystemExit) as error:
            raise self._plugin_error("plugin.type", plugin, f"cannot be created: {_one_line(error)}") from error
        missing = sorted(name for name in public_members(self._contract) if not hasattr(value, name))
        if missing:
            raise self._plugin_error("plugin.type", plugin, f"lacks {', '.join(missing)}")
        declared = getattr(value, self._identifier, name) if self._identifier else name
        if declared != name:
            problem = f"has the {self._identifier} {declared!r}, expected the name of its entry point"
            raise self._plugin_error("plugin.type", plugin, problem)
        return value

    def _plugin_error(self, rule: str, plugin: Plugin, problem: str) -> PluginError:
        return PluginError(
            f"{self._noun} {plugin.name!r} of the distribution {plugin.distribution} {problem}; update or uninstall "
            "the distribution",
            rule=rule,
        )


class Instances(Registry[T]):
    """A registry of classes without state: threads share one object of each class."""

    def _make(self, name: str, target: Any) -> T:
        value: T = target()
        return value


def read_plugins(group: str) -> list[Plugin]:
    """Return the entry points that installed distributions other than Ingot declare in a group."""
    if not _may_have_plugins(tuple(sys.path)):
        return []
    from importlib.metadata import entry_points  # noqa: PLC0415 - its import takes longer than opening a file

    return [Plugin(entry) for entry in entry_points(group=group) if _distribution_name(entry) != DISTRIBUTION]


def public_members(contract: type[Any] | None) -> set[str]:
    """Return the names of a contract's public attributes and methods."""
    classes = [cls for cls in getattr(contract, "__mro__", ()) if cls not in (object, Protocol, Generic)]
    names = {name for cls in classes for name in (*vars(cls), *vars(cls).get("__annotations__", {}))}
    return {name for name in names if not name.startswith("_")}


@lru_cache(maxsize=8)
def _may_have_plugins(folders: tuple[str, ...]) -> bool:
    """Return whether a distribution other than Ingot may declare entry points for Ingot.

    Reads ``entry_points.txt`` of each distribution in the folders of ``sys.path``, in a fraction of the time that
    ``importlib.metadata`` takes. Returns True if archives or other finders may contain distributions.
    """
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        return True
    for folder in folders:
        try:
            names = os.listdir(folder or os.curdir)  # noqa: PTH208 - objects for thousands of paths take milliseconds
        except NotADirectoryError:
            return True
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")) and name.partition("-")[0] != DISTRIBUTION:
                try:
                    text = Path(folder, name, "entry_points.txt").read_bytes()
                except OSError:
                    continue
                if f"{DISTRIBUTION}.".encode() in text:
                    return True
    return False


def _distribution_name(entry: EntryPoint) -> str:
    return getattr(entry.dist, "name", None) or "an unnamed distribution"


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]
