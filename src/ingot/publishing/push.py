"""Push a model to a registry or to the Hub."""

from __future__ import annotations

from dataclasses import dataclass

from ingot.core.options import takes
from ingot.core.runtime.memory import format_size
from ingot.errors import UsageError
from ingot.publishing.hub import card_of, push_to_hub
from ingot.publishing.model import model_to_push
from ingot.publishing.options import PushOptions
from ingot.publishing.registry import push_to_registry
from ingot.reporting.report import Bytes, Count, Line, Report, Texts, figures_of
from ingot.reporting.reportable import Reportable
from ingot.stores.location import Location


@dataclass(frozen=True, slots=True)
class Pushed(Reportable):
    """The result of pushing.

    ``size`` is the total size of the files in bytes, ``sent`` the size of the files that were new. ``version`` is the
    digest in the registry, or the commit of the Hub. After a dry run, it is empty, and ``listed`` contains the files.
    ``card`` is the model card that Ingot adds on the Hub; empty if it adds none.
    """

    source: str
    destination: str
    files: Count
    size: Bytes
    sent: Bytes
    version: str
    listed: Texts = ()
    card: str = ""
    notes: Texts = ()

    def report(self) -> Report:
        """Return the figures and lines as a ``Report``."""
        if self.version:
            lines = [Line("{destination}: {files} files of {size} pushed, {sent} sent"), Line("{version}", "version")]
        else:
            lines = [Line("{destination}: would push {files} files of {size}"), Line("  {item}", items="listed")]
        return Report(figures_of(self), [*lines, Line("note: {item}", items="notes")])


@takes(PushOptions, "push")
def push(options: PushOptions) -> Pushed:
    """Copy a model's files to ``oci://HOST/NAME:TAG``, a registry of OCI artifacts, or to ``hf://ORG/NAME``, the Hub.

    A registry gets a ModelPack artifact with one layer per file; layers that the repository has are not sent again. The
    Hub gets one commit, and a model card if there is none.

    Returns
    -------
    Pushed

    Raises
    ------
    UsageError
        ``push.address``, ``push.none``; ``target.exists``: there is another model, and ``overwrite`` is not set.
    FormatError, IntegrityError
        The model is damaged, or changed meanwhile; ``registry.*``.
    ResourceError
        ``store.denied``, ``registry.*``, ``hub.*``, ``remote.*``.

    Examples
    --------
    >>> planned = ingot.push("int4.zt", "hf://me/llama", dry_run=True)
    >>> planned.files, planned.card.splitlines()[4]
    (1, '# int4.zt')
    """
    target = Location.parse(options.dst)
    if target.scheme not in ("oci", "hf"):
        raise UsageError(
            "expected oci://HOST/NAME:TAG or hf://ORG/NAME; `ingot convert` writes to other places",
            rule="push.address",
            where=target.display,
        )
    model = model_to_push(Location.parse(options.src))
    card = card_of(model, options) if target.scheme == "hf" else ""
    version = ""
    sent = 0
    listed: list[str] = []
    if options.dry_run:
        sizes = {name: model.store.stat(stored).size for name, stored in model.files.items()}
        listed = [f"{name}  {format_size(size)}" for name, size in sorted(sizes.items())]
    elif target.scheme == "oci":
        version, sent = push_to_registry(model, options)
    else:
        version, sent = push_to_hub(model, card, options)
    return Pushed(
        source=model.location,
        destination=target.display,
        files=len(model.files),
        size=model.size,
        sent=sent,
        version=version,
        listed=listed,
        card=card,
        notes=model.notes,
    )
