"""Build a model of transformers around weights from Ingot, and refuse weights that do not fit before they take memory.

transformers creates the model on device meta, renames and merges keys, ties weights and fills buffers that checkpoints
lack (``PreTrainedModel.from_pretrained`` with a config and a state dict). After it loads the weights it would fill
missing weights with random values. ``_Checks`` runs before that and refuses missing weights.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ingot.core.border import require
from ingot.core.runtime.memory import require_ram
from ingot.errors import FormatError, IngotError, UnsupportedError
from ingot.runtime.loading.transformers_config import EXTRA, one_line, version
from ingot.runtime.loading.transformers_weights import Loading, Weight

_SHOWN = 4


def build(
    model_cls: Any,
    config: Any,
    weights: Mapping[str, Weight],
    loading: Loading,
    options: Mapping[str, Any],
    *,
    strict: bool,
    location: str,
) -> Any:
    """Return a model of class ``model_cls`` with these weights, in evaluation mode.

    Parameters
    ----------
    model_cls : type
        A class of transformers.
    weights : mapping
        The weights by the names in the checkpoint.
    options : mapping
        Further arguments of ``from_pretrained``, such as the ``dtype`` of the parameters.
    strict : bool
        Refuse weights for which the architecture has no parameter.
    location : str
        The checkpoint's location, for messages.

    Raises
    ------
    FormatError
        ``model.config``, ``model.missing``, ``model.unexpected``, ``model.shape``, ``model.rearrange``.
    UnsupportedError
        ``model.unchecked``: the installed transformers loads in another way, so missing weights would go unnoticed.
    IngotError
        The first error of decoding a weight.
    """
    checks = _Checks(loading, strict, location)
    hooked = _with_check(model_cls, checks)
    try:
        with _quiet():
            model = hooked.from_pretrained(None, config=config, state_dict=dict(weights), **options)
    except IngotError:
        raise
    except Exception as error:
        if loading.failures:
            raise loading.failures[0] from error
        raise FormatError(
            "model.config", f"transformers cannot build {model_cls.__name__} from it: {one_line(error)}", where=location
        ) from error
    if not checks.have_run:
        raise UnsupportedError(
            f"expected a transformers whose loading Ingot can check, found {version()}, which may have made up missing "
            "weights; install a release that Ingot's extra 'transformers' names",
            rule="model.unchecked",
            where=location,
        )
    model.__class__ = model_cls
    return model


@dataclass
class _Checks:
    """The checks of a built model, which transformers calls when all weights are loaded.

    ``have_run`` becomes true when transformers has called them.
    """

    loading: Loading
    strict: bool
    location: str
    have_run: bool = False

    def __call__(self, model: Any, info: Any) -> None:
        if self.loading.failures:
            raise self.loading.failures[0]
        _check_shapes(info, self.location)
        _check_rearranged(info, self.location)
        _check_missing(model, info, self.location)
        if self.strict:
            _check_unexpected(model, info, self.location)
        _check_buffers(model)
        self.have_run = True


def _with_check(model_cls: Any, check: Callable[[Any, Any], None]) -> Any:
    """Return a subclass of ``model_cls`` that calls ``check(model, loading_info)`` before missing weights are filled.

    The overridden method is private to transformers (since 5.1) and may disappear. The caller must verify that
    ``check`` was called.
    """

    def finalize(model: Any, *args: Any, **kwargs: Any) -> Any:
        check(model, next(item for item in (*args, *kwargs.values()) if hasattr(item, "missing_keys")))
        return model_cls._finalize_model_loading(model, *args, **kwargs)

    names = {"_finalize_model_loading": staticmethod(finalize), "__module__": model_cls.__module__}
    return type(model_cls)(model_cls.__name__, (model_cls,), names)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bar and the load report of transformers in this context: Ingot reports errors itself."""
    logs = require("transformers.utils.logging", EXTRA)
    bar = logs.is_progress_bar_enabled()
    level = logs.get_verbosity()
    logs.disable_progress_bar()
    logs.set_verbosity(max(level, logging.ERROR))
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if bar:
            logs.enable_progress_bar()


def _check_shapes(info: Any, location: str) -> None:
    mismatches = [
        f"{name} expected {list(expected)}, found {list(shape)}"
        for name, shape, expected in sorted(info.mismatched_keys, key=lambda item: str(item[0]))
    ]
    if mismatches:
        raise FormatError(
            "model.shape",
            f"config.json disagrees with the weights in {len(mismatches)} shapes: {_joined(mismatches, '; ')}",
            where=location,
        )


def _check_rearranged(info: Any, location: str) -> None:
    errors = dict(info.conversion_errors or {})
    if errors:
        name, text = next(iter(sorted(errors.items())))
        last = str(text).strip().splitlines()[-1]
        raise FormatError(
            "model.rearrange",
            f"transformers cannot rearrange {len(errors)} weights: {str(name)[:200]}: {last[:200]}",
            where=location,
        )


def _check_missing(model: Any, info: Any, location: str) -> None:
    missing = set(info.missing_keys)
    absent = missing - _tied_to_present(model, missing)
    names = _unmatched(absent, getattr(model, "_keys_to_ignore_on_load_missing", None))
    if names:
        raise FormatError(
            "model.missing",
            f"expected {len(names)} weights that {type(model).__name__} needs, but the checkpoint lacks them: "
            f"{_joined(names)}",
            where=location,
        )


def _check_unexpected(model: Any, info: Any, location: str) -> None:
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    # Older checkpoints store these buffers per layer; they are computed now. transformers ignores the same two.
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    names = _unmatched(info.unexpected_keys, patterns)
    if names:
        raise FormatError(
            "model.unexpected",
            f"found {len(names)} weights for which {type(model).__name__} has no parameter: {_joined(names)}; "
            "strict=False ignores them",
            where=location,
        )


def _check_buffers(model: Any) -> None:
    """Raise if buffers, such as position tables, are larger than memory: config.json alone sets their sizes."""
    nbytes = sum(buffer.nbytes for buffer in model.buffers() if buffer.is_meta)
    require_ram(nbytes, "tables that config.json asks for", "make its positions fewer")


def _tied_to_present(model: Any, missing: set[str]) -> set[str]:
    """Return the names in ``missing`` whose parameter is tied to a name that is not missing."""
    groups: dict[str, set[str]] = {}
    for target, source in dict(getattr(model, "all_tied_weights_keys", None) or {}).items():
        groups.setdefault(source, {source}).add(target)
    return {name for group in groups.values() if group - missing for name in group & missing}


def _unmatched(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    ignored = [re.compile(pattern) for pattern in patterns or ()]
    return sorted(name for name in names if not any(pattern.search(name) for pattern in ignored))


def _joined(items: list[str], separator: str = ", ") -> str:
    shown = separator.join(item[:200] for item in items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown}{separator}..."
