"""Loading of an artifact's Core ML package as a coremltools model that can run (only on macOS)."""

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
        ``model.coreml``: coremltools is not installed, refuses the package, or cannot run it.
    FormatError, IntegrityError, ResourceError
        The errors of ``extract_package``.
    """
    folder = fspath(extract_package(part))
    try:
        with warnings.catch_warnings():
            # If Core ML cannot load a package, coremltools only warns, and the first prediction fails.
            warnings.simplefilter("error", RuntimeWarning)
            model = import_module("coremltools").models.MLModel(folder)
    except IngotError:
        raise
    except Exception as error:  # coremltools, its protobuf and the system's compiler raise various errors
        raise UnsupportedError(
            f"expected a package that coremltools loads: {one_line(error)}", rule="model.coreml", where=folder
        ) from error
    if getattr(model, "__proxy__", None) is None:
        raise UnsupportedError(
            "this system cannot run the package: coremltools can only read its description",
            rule="model.coreml",
            where=folder,
        )
    return model
