"""Views that add and remove attachments: draft head, Core ML package, program (``spec/attachments.md``)."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

from ingot.artifacts.attachments import located, no_attachment, pack_package
from ingot.artifacts.draft_head import CONFIG_KEY, check_head_or_none, config_of_draft
from ingot.artifacts.open import Source, open_source
from ingot.model.artifact import Attachments
from ingot.model.checkpoint import Checkpoint
from ingot.model.part import Part
from ingot.model.reading.lazy import LazyMap
from ingot.model.reading.view import derive_checkpoint
from ingot.stores.location import AnyPath, Location


def attach(
    checkpoint: Checkpoint,
    *,
    draft: AnyPath | None = None,
    coreml: AnyPath | None = None,
    program: AnyPath | None = None,
) -> Checkpoint:
    """Return the checkpoint with attachments, which replace existing ones of the same type.

    Parameters
    ----------
    checkpoint : Checkpoint
    draft : path, optional
        A published EAGLE-3 draft head: a file or folder that ``ingot.open`` opens.
    coreml : path, optional
        A Core ML package, a folder ``X.mlpackage``. It is packed into an unnamed temporary file, which is deleted when
        the view is closed.
    program : path, optional
        A Core ML package into whose program the tensors will be written.

    Raises
    ------
    FormatError
        ``draft.*``, ``attachments.coreml-package``, ``archive.*``; and the errors of ``ingot.open``.
    UsageError
        ``attachments.none``: the path for ``program`` is no Core ML package.

    Examples
    --------
    >>> view = ingot.views.attach(ingot.open("model"), draft="head.safetensors")
    >>> len(view.attachments.draft)
    15
    """
    paths = {"draft": draft, "coreml": coreml, "program": program}
    return _attach(checkpoint, {name: Location.parse(path) for name, path in paths.items() if path is not None})


def detach(checkpoint: Checkpoint, kinds: Collection[str]) -> Checkpoint:
    """Return the checkpoint without the given types of attachments: ``draft``, ``coreml``, ``program``.

    Examples
    --------
    >>> view = ingot.views.detach(ingot.open("model"), ["draft"])
    """
    tensors = LazyMap(checkpoint, checkpoint.__getitem__)
    names = sorted(kinds)
    removed: dict[str, Any] = dict.fromkeys(names)
    attachments = replace(checkpoint.attachments, **removed)
    metadata = checkpoint.metadata
    if "draft" in names:
        metadata = {key: value for key, value in metadata.items() if key != CONFIG_KEY}
    return derive_checkpoint(checkpoint, tensors, detach, names, names, attachments=attachments, metadata=metadata)


def describe(checkpoint: Checkpoint, metadata: Mapping[str, Any]) -> Checkpoint:
    """Return the checkpoint with additional metadata, which replaces entries with the same keys.

    Examples
    --------
    >>> ingot.views.describe(ingot.open("model"), {"author": "me"}).metadata["author"]
    'me'
    """
    tensors = LazyMap(checkpoint, checkpoint.__getitem__)
    added = dict(sorted(metadata.items()))
    return derive_checkpoint(checkpoint, tensors, describe, added, added, metadata={**checkpoint.metadata, **added})


def _attach(checkpoint: Checkpoint, locations: Mapping[str, Location]) -> Checkpoint:
    with ExitStack() as stack:
        opened = _Opened(stack, checkpoint.attachments)
        for attachment_type, location in locations.items():
            opened.add(attachment_type, location)
        metadata = checkpoint.metadata
        if "draft" in locations:
            metadata = {key: value for key, value in metadata.items() if key != CONFIG_KEY} | opened.metadata
        return derive_checkpoint(
            checkpoint,
            LazyMap(checkpoint, checkpoint.__getitem__),
            _attach,
            dict(locations),
            opened.identity,
            opened=opened.sources,
            also_close=stack.pop_all().close,
            attachments=opened.attachments,
            metadata=metadata,
        )


class _Opened:
    """Files that were opened or packed for a view, and their identity; closing ``stack`` closes them."""

    def __init__(self, stack: ExitStack, attachments: Attachments) -> None:
        self._stack = stack
        self.attachments = attachments
        self.sources = list[Source]()
        self.identity: dict[str, Any] = {}
        self.metadata: dict[str, str] = {}

    def add(self, attachment_type: str, location: Location) -> None:
        if attachment_type == "coreml":
            package = pack_package(location)
            self._stack.callback(package.source.close)
            self.identity[attachment_type] = [package.length, package.digest]
            self.attachments = replace(self.attachments, coreml=package)
            return
        source = open_source(location, io="pread")
        self._stack.callback(source.close)
        self.sources.append(source)
        self.identity[attachment_type] = source.identity()
        if attachment_type == "draft":
            head = source.view()
            with located(location.display):
                check_head_or_none(head)
                config = config_of_draft(head)
            if config:
                self.metadata[CONFIG_KEY] = json.dumps(config, sort_keys=True)
            self.attachments = replace(self.attachments, draft=head)
        else:
            self.attachments = replace(self.attachments, program=_program(source, location))


def _program(source: Source, location: Location) -> Mapping[str, Part]:
    program = source.catalog.attachments.program
    if program is None:
        raise no_attachment("program", location)
    return program
