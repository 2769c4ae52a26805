"""Build a model of transformers around weights that Ingot holds, and refuse what does not fit before it costs memory.

The skeleton, the renaming and merging of keys, tied weights and the buffers that no checkpoint has are transformers'
own work (``PreTrainedModel.from_pretrained`` with a config and a state dict). Between its loading and its filling-in of
what is missing stands ``check``: transformers would give missing weights random values, Ingot refuses.
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
    kind: Any,
    config: Any,
    weights: Mapping[str, Weight],
    loading: Loading,
    options: Mapping[str, Any],
    *,
    strict: bool,
    where: str,
) -> Any:
    """Return a model of class ``kind`` with these weights, in evaluation mode.

    Parameters
    ----------
    kind : type
        A class of transformers.
    weights : mapping
        By the names of the checkpoint.
    options : mapping
        Further arguments of ``from_pretrained``, the ``dtype`` of the parameters among them.
    strict : bool
        Refuse weights that the architecture has no place for.
    where : str
        For messages.

    Raises
    ------
    FormatError
        ``model.config``, ``model.missing``, ``model.unexpected``, ``model.shape``, ``model.rearrange``.
    UnsupportedError
        ``model.unchecked``: this transformers loads in another way, and nothing would be known of missing weights.
    IngotError
        What decoding a weight raised.
    """
    checks = _Checks(loading, strict, where)
    hooked = _with_check(kind, checks)
    try:
        with _quiet():
            model = hooked.from_pretrained(None, config=config, state_dict=dict(weights), **options)
    except IngotError:
        raise
    except Exception as error:
        if loading.failures:
            raise loading.failures[0] from error
        raise FormatError(
            "model.config", f"transformers cannot build {kind.__name__} from it: {one_line(error)}", where=where
        ) from error
    if not checks.done:
        raise UnsupportedError(
            f"expected a transformers whose loading Ingot can check, found {version()}, which may have made up what is "
            "missing; install a release that Ingot's extra 'transformers' names",
            rule="model.unchecked",
            where=where,
        )
    model.__class__ = kind
    return model


@dataclass
class _Checks:
    """What is looked at once all weights are in; ``done`` tells whether transformers came by."""

    loading: Loading
    strict: bool
    where: str
    done: bool = False

    def __call__(self, model: Any, info: Any) -> None:
        if self.loading.failures:
            raise self.loading.failures[0]
        _check_shapes(info, self.where)
        _check_rearranged(info, self.where)
        _check_missing(model, info, self.where)
        if self.strict:
            _check_unexpected(model, info, self.where)
        _check_buffers(model)
        self.done = True


def _with_check(kind: Any, check: Callable[[Any, Any], None]) -> Any:
    """Return a subclass of ``kind`` for the time of loading that calls ``check(model, loading_info)`` once all weights
    are in and nothing has been filled in yet.

    The method that it overrides is transformers' own business (5.1 brought it) and may go: whoever calls this has to
    see that ``check`` was called.
    """

    def finalize(model: Any, *args: Any, **kwargs: Any) -> Any:
        check(model, next(item for item in (*args, *kwargs.values()) if hasattr(item, "missing_keys")))
        return kind._finalize_model_loading(model, *args, **kwargs)

    names = {"_finalize_model_loading": staticmethod(finalize), "__module__": kind.__module__}
    return type(kind)(kind.__name__, (kind,), names)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bar and load report to itself: Ingot says what is wrong, and nothing when all is
    right."""
    logs = require("transformers.utils.logging", EXTRA)
    bar, level = logs.is_progress_bar_enabled(), logs.get_verbosity()
    logs.disable_progress_bar()
    logs.set_verbosity(max(level, logging.ERROR))
    try:
        yield
    finally:
        logs.set_verbosity(level)
        if bar:
            logs.enable_progress_bar()


def _check_shapes(info: Any, where: str) -> None:
    wrong = [
        f"{name} expected {list(expected)}, found {list(shape)}"
        for name, shape, expected in sorted(info.mismatched_keys, key=lambda item: str(item[0]))
    ]
    if wrong:
        raise FormatError(
            "model.shape",
            f"config.json disagrees with the weights in {len(wrong)} shapes: {_listed(wrong, '; ')}",
            where=where,
        )


def _check_rearranged(info: Any, where: str) -> None:
    errors = dict(info.conversion_errors or {})
    if errors:
        name, text = next(iter(sorted(errors.items())))
        last = str(text).strip().splitlines()[-1]
        raise FormatError(
            "model.rearrange",
            f"transformers cannot rearrange {len(errors)} weights: {str(name)[:200]}: {last[:200]}",
            where=where,
        )


def _check_missing(model: Any, info: Any, where: str) -> None:
    missing = set(info.missing_keys)
    absent = missing - _tied_to_present(model, missing)
    left = _unmatched(absent, getattr(model, "_keys_to_ignore_on_load_missing", None))
    if left:
        raise FormatError(
            "model.missing",
            f"expected {len(left)} weights that {type(model).__name__} needs, found none: {_listed(left)}",
            where=where,
        )


def _check_unexpected(model: Any, info: Any, where: str) -> None:
    patterns = set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    # What once was stored with every layer and is now computed; transformers forgives the same two.
    buffers = [name for name, _ in model.named_buffers()]
    if any(name.endswith("rotary_emb.inv_freq") for name in buffers):
        patterns.add(r"rotary_emb\.inv_freq")
    if any(name.endswith("position_ids") for name in buffers):
        patterns.add(r"(^|\.)position_ids$")
    left = _unmatched(info.unexpected_keys, patterns)
    if left:
        raise FormatError(
            "model.unexpected",
            f"found {len(left)} weights that {type(model).__name__} has no place for: {_listed(left)}; strict=False "
            "leaves them out",
            where=where,
        )


def _check_buffers(model: Any) -> None:
    """Refuse tables (of positions, say) that are larger than memory: config.json alone says how large they are."""
    nbytes = sum(buffer.nbytes for buffer in model.buffers() if buffer.is_meta)
    require_ram(nbytes, "tables that config.json asks for", "make its positions fewer")


def _tied_to_present(model: Any, missing: set[str]) -> set[str]:
    """Return the missing names that share a parameter with one that is there."""
    groups: dict[str, set[str]] = {}
    for target, source in dict(getattr(model, "all_tied_weights_keys", None) or {}).items():
        groups.setdefault(source, {source}).add(target)
    return {name for group in groups.values() if group - missing for name in group & missing}


def _unmatched(names: Iterable[str], patterns: Iterable[str] | None) -> list[str]:
    ignored = [re.compile(pattern) for pattern in patterns or ()]
    return sorted(name for name in names if not any(pattern.search(name) for pattern in ignored))


def _listed(items: list[str], separator: str = ", ") -> str:
    shown = separator.join(item[:200] for item in items[:_SHOWN])
    return shown if len(items) <= _SHOWN else f"{shown}{separator}..."
