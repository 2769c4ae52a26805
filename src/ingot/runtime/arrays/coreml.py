"""coremltools: the Core ML package that an artifact carries, as a model that runs (macOS alone)."""

from __future__ import annotations

import warnings
from importlib import import_module
from os import fspath
from typing import Any

from ingot.artifacts.attachments import extract_package
from ingot.errors import IngotError, UnsupportedError
from ingot.model.part import Part
from ingot.runtime.loading.transformers_config import one_line


def load_package(part: Part) -> Any:
    """Return the ``coremltools.models.MLModel`` of a zipped Core ML package, unpacked into the cache.

    Raises
    ------
    UnsupportedError
        ``model.coreml``: coremltools is not there, does not take the package, or takes it and cannot run it.
    FormatError, IntegrityError, ResourceError
        As ``extract_package``.
    """
    folder = fspath(extract_package(part))
    try:
        with warnings.catch_warnings():
            # A package that Core ML does not load is a warning to coremltools, and an error of the first prediction.
            warnings.simplefilter("error", RuntimeWarning)
            model = import_module("coremltools").models.MLModel(folder)
    except IngotError:
        raise
    except Exception as error:  # whatever coremltools, its protobuf or the system's compiler raise
        raise UnsupportedError(
            f"expected a package that coremltools loads: {one_line(error)}", rule="model.coreml", where=folder
        ) from error
    if getattr(model, "__proxy__", None) is None:
        raise UnsupportedError(
            "expected a package that this system runs, found one that coremltools only describes",
            rule="model.coreml",
            where=folder,
        )
    return model
