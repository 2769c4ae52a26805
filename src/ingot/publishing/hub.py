"""Push a model to the Hugging Face Hub: one commit with all files, and a model card if the model has none."""

from __future__ import annotations

import re
from collections.abc import Sequence
from os import fspath
from typing import Any

from ingot.core.border import require
from ingot.errors import IngotError, ResourceError, UsageError
from ingot.naming.config import CONFIG, MAX_CONFIG, parse_config
from ingot.publishing.card import card
from ingot.publishing.model import PushedModel, is_weights_file
from ingot.publishing.options import PushOptions
from ingot.stores.remote.hub import HUB_EXTRA, HubAddress, hub_address

CARD = "README.md"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def card_of(model: PushedModel, options: PushOptions) -> str:
    """Return the card that Ingot writes for a model; empty if the model has a card and ``options.card`` is not set."""
    if CARD in model.files and not options.card:
        return ""
    return card(model, options.base or _recorded_base(model))


def push_to_hub(model: PushedModel, text: str, options: PushOptions) -> tuple[str, int]:
    """Push the files and the card ``text`` in one commit; return the commit, and the total bytes of the files.

    A missing repository is created as private. Weights that are not part of the new model are removed by the same
    commit, because programs would load them too. The Hub's history keeps replaced files.

    Raises
    ------
    UsageError
        ``push.address``; ``target.exists``: the model on the Hub has weights, and ``overwrite`` is not set.
    UnsupportedError
        ``store.not-local``: the files are not on a local disk.
    MissingExtraError
        huggingface_hub is missing.
    ResourceError
        ``store.denied``, ``hub.offline``, ``hub.refused``.
    """
    address = hub_address(options.dst)
    if address.path:
        raise UsageError("expected hf://ORG/NAME, without a file", rule="push.address", where=options.dst[:200])
    hub = require("huggingface_hub", HUB_EXTRA)
    paths = {name: fspath(model.store.require_path(stored, "pushing")) for name, stored in model.files.items()}
    try:
        api = hub.HfApi(endpoint=str(require("huggingface_hub.constants", HUB_EXTRA).ENDPOINT))
        api.create_repo(address.model, private=True, exist_ok=True)
        present = _present(api, address)
        obsolete = [name for name in present if is_weights_file(name) and name not in paths]
        if not options.overwrite:
            _require_no_weights(present, address.within(""))
        operations = [hub.CommitOperationDelete(path_in_repo=name) for name in obsolete]
        operations += [hub.CommitOperationAdd(path_in_repo=name, path_or_fileobj=path) for name, path in paths.items()]
        if text and (CARD not in present or options.card):
            operations = [item for item in operations if item.path_in_repo != CARD]
            operations.append(hub.CommitOperationAdd(path_in_repo=CARD, path_or_fileobj=text.encode()))
        commit = api.create_commit(address.model, operations, commit_message="Push by Ingot", revision=address.revision)
    except IngotError:
        raise
    except Exception as error:
        raise _hub_error(error, address.within("")) from None
    return str(commit.oid), model.size


def _require_no_weights(present: Sequence[str], location: str) -> None:
    if any(map(is_weights_file, present)):
        raise UsageError(
            "the model on the Hub has weights: choose another name or revision, or pass --overwrite (overwrite=True)",
            rule="target.exists",
            where=location,
        )


def _present(api: Any, address: HubAddress) -> list[str]:
    """Return the names of the files at the revision; create its branch if it is missing."""
    if not api.revision_exists(address.model, address.revision):
        api.create_branch(address.model, branch=address.revision)
    return [str(name) for name in api.list_repo_files(address.model, revision=address.revision)]


def _recorded_base(model: PushedModel) -> str:
    """Return the Hub id that transformers recorded in ``config.json``; empty if there is none."""
    if CONFIG not in model.files:
        return ""
    try:
        raw = model.store.read(model.files[CONFIG], MAX_CONFIG, "companions.config")
        name = parse_config(raw, "companions.config", model.location).get("_name_or_path")
    except IngotError:
        return ""
    return name if isinstance(name, str) and _HUB_ID.fullmatch(name) else ""


def _hub_error(error: Exception, location: str) -> IngotError:
    """Return the Ingot error for an error of huggingface_hub, without the address of a request."""
    names = [cls.__name__ for cls in type(error).__mro__]
    status = getattr(getattr(error, "response", None), "status_code", 0)
    if "OfflineModeIsEnabled" in names:
        return ResourceError("HF_HUB_OFFLINE is set: unset it to push", rule="hub.offline", where=location)
    if status in (401, 403) or "LocalTokenNotFoundError" in names:
        message = "the Hub gives no access: log in with a token that may write (`hf auth login`), or check the name"
        return ResourceError(message, rule="store.denied", where=location)
    if status:
        message = f"the Hub refused with status {status}: check the name of the model, and try again later"
        return ResourceError(message, rule="hub.refused", where=location)
    return ResourceError(
        "the Hub cannot be reached, or the transfer broke off; check the network, and push again: files that arrived "
        "are not sent twice",
        rule="hub.refused",
        where=location,
    )
