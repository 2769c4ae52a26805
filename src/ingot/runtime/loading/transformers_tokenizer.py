"""The tokenizer beside a model's weights, as transformers has it."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping
from os import fspath
from typing import Any

from ingot.artifacts.companions import is_weights
from ingot.core.border import require
from ingot.errors import FormatError, IngotError, printable
from ingot.model.store import Store
from ingot.naming.config import MAX_CONFIG
from ingot.runtime.evaluation.special_tokens import surrounding_tokens
from ingot.runtime.loading.model_source import companions_folder
from ingot.runtime.loading.transformers_config import EXTRA, one_line, read_json
from ingot.stores.location import AnyPath, Location
from ingot.stores.temporary import on_disk
from ingot.translate import sentencepiece
from ingot.translate.demo_vocabulary import FORMAT, expanded

_FILE, _SETTINGS, _SENTENCEPIECE = "tokenizer.json", "tokenizer_config.json", "tokenizer.model"
# What the names of a tokenizer's files begin and end with.
_STARTS, _ENDS = ("tokenizer", "vocab", "merges", "tekken", "spiece", "sentencepiece"), (".tiktoken", ".model")
# Where ways to cut a text part: digits, contractions, spaces and lines, marks that compose, wide and joined characters.
_PROBE = (
    "It's 1234567 o'clock,  DON'T\tstop...\r\n\n  def f_1(x): return x**2  # e\u0301t\u00e9 \u212b \ufb01 \uff11\u00bd"
    " \u6f22\u5b57\u304b\u306a\ud55c\uae00 \U0001f469\u200d\U0001f4bb \u00a0end "
)


def load_tokenizer(path: AnyPath, *, add_bos_token: bool | None = None) -> Any:
    """Return the tokenizer of a model: in the folder ``path``, in that of the file, or in the file itself; else as
    ``tokenizer_in``."""
    with companions_folder(Location.parse(path)) as folder:
        return tokenizer_in(folder, add_bos_token=add_bos_token)


def tokenizer_in(folder: Store, *, add_bos_token: bool | None = None) -> Any:
    """Return the tokenizer of a model folder; no code that travels with the model is run.

    Of a folder on another machine the files beside the weights are copied for as long as it takes.

    The folder's tokenizer.json decides how text is cut. For some model types transformers' own loader builds a class
    that only takes the vocabulary from there; where that would make other tokens, a ``UserWarning`` says so.

    If the files state that a text begins with BOS and the tokenizer that transformers builds does not put it there, it
    is built with BOS: transformers 5 ignores ``add_bos_token`` beside a tokenizer.json, and adds no BOS to a
    SentencePiece model whose settings do not mention it.

    Parameters
    ----------
    folder : Store
    add_bos_token : bool, optional
        Whether texts get the token that begins one; by default as the folder's files say.

    Raises
    ------
    FormatError
        ``model.tokenizer``: no tokenizer there, or none that transformers can make.
    MissingExtraError
        transformers is not installed.
    """
    with on_disk(folder, lambda name: not is_weights(name)) as here:
        return _tokenizer_in(here, folder.location, add_bos_token)


def _tokenizer_in(folder: Store, location: str, add_bos_token: bool | None) -> Any:
    transformers = require("transformers", EXTRA)
    options = {} if add_bos_token is None else {"add_bos_token": add_bos_token}
    try:
        stored = folder.exists(_FILE)
        own = _own(folder) if stored else None
        if own is not None:
            return transformers.PreTrainedTokenizerFast(tokenizer_object=own)
        kind = transformers.PreTrainedTokenizerFast if stored else transformers.AutoTokenizer
        tokenizer = _made(kind, folder, options)
        if add_bos_token is None and _states_bos(folder):
            tokenizer, options = _with_bos(tokenizer, kind, folder)
    except IngotError:
        raise
    except Exception as error:  # readers of dozens of tokenizer classes, over files that may be anything
        raise FormatError(
            "model.tokenizer",
            f"expected a tokenizer ({_FILE}) beside the weights, found none that transformers reads: {one_line(error)}",
            where=location,
        ) from error
    require_vocabulary(tokenizer, folder, location)
    if stored:
        other = _chosen_by_transformers(folder, options)
        if other is not None and not same_tokens(other, tokenizer):
            warnings.warn(
                f"{printable(location)}: transformers takes {type(other).__name__} for this model, which makes "
                f"other tokens than the {_FILE} beside the weights; Ingot uses {_FILE}",
                stacklevel=2,
            )
    return tokenizer


def has_tokenizer(folder: Store) -> bool:
    """Return whether a model folder has files of a tokenizer."""
    return any(name.startswith(_STARTS) or name.endswith(_ENDS) for name in folder.list().files)


def _states_bos(folder: Store) -> bool:
    """Return whether a folder's files state that the tokenizer puts BOS before a text, beside its post-processor."""
    settings = read_json(folder, _SETTINGS, "model.tokenizer", "model.tokenizer") if folder.exists(_SETTINGS) else {}
    stated = settings.get("add_bos_token")
    if isinstance(stated, bool) or folder.exists(_FILE) or not folder.exists(_SENTENCEPIECE):
        return stated is True
    data = folder.read(_SENTENCEPIECE, MAX_CONFIG, "model.tokenizer")
    return sentencepiece.adds_bos(data, folder.location_of(_SENTENCEPIECE), settings)


def _with_bos(tokenizer: Any, kind: Any, folder: Store) -> tuple[Any, dict[str, bool]]:
    """Return a tokenizer that puts BOS before a text, and the options it is built with: none if it has BOS already."""
    surrounding = surrounding_tokens(tokenizer)
    if surrounding.before or tokenizer.bos_token is None:
        return tokenizer, {}
    options = {"add_bos_token": True, **({"add_eos_token": True} if surrounding.after else {})}
    return _made(kind, folder, options), options


def same_tokens(left: Any, right: Any) -> bool:
    """Whether two tokenizers make the same tokens of a text in which tokenizers use to differ."""
    return all(
        left(_PROBE, add_special_tokens=special, verbose=False).input_ids
        == right(_PROBE, add_special_tokens=special, verbose=False).input_ids
        for special in (False, True)
    )


def _made(kind: Any, folder: Store, options: Mapping[str, Any]) -> Any:
    path = fspath(folder.require_path("", "making a tokenizer"))
    return kind.from_pretrained(path, trust_remote_code=False, local_files_only=True, **options)


def _chosen_by_transformers(folder: Store, options: Mapping[str, Any]) -> Any:
    """Return the tokenizer that transformers' own loader makes; None where it makes the plain one, or fails."""
    transformers = require("transformers", EXTRA)
    try:
        tokenizer = _made(transformers.AutoTokenizer, folder, options)
    except Exception:  # nobody asked for that one
        return None
    return None if type(tokenizer) is transformers.PreTrainedTokenizerFast else tokenizer


def require_vocabulary(tokenizer: Any, folder: Store, location: str = "") -> None:
    """Refuse a tokenizer without its files: of some model types transformers makes an empty one.

    Raises ``FormatError`` ``model.tokenizer``.
    """
    names = set((getattr(tokenizer, "vocab_files_names", None) or {}).values())
    if not names:  # of bytes, say
        return
    there = {*folder.list().files} - {"tokenizer_config.json"}
    if not any(
        name in names or name.endswith(".tiktoken") or name.startswith(("tokenizer.", "tekken")) for name in there
    ):
        raise FormatError(
            "model.tokenizer",
            f"expected a tokenizer ({', '.join(sorted(names))}) beside the weights, found none; copy it there",
            where=location or folder.location,
        )


def _own(folder: Store) -> Any:
    """Return a tokenizer in the demo model's form as one of the package tokenizers; None for other files."""
    if FORMAT.encode() not in folder.head(_FILE, 64):
        return None
    stored = read_json(folder, _FILE, "model.tokenizer", "model.tokenizer")
    try:
        whole = expanded(stored)
    except FormatError as error:
        raise FormatError("model.tokenizer", error.message, where=folder.location_of(_FILE)) from None
    return require("tokenizers", EXTRA).Tokenizer.from_str(json.dumps(whole))
