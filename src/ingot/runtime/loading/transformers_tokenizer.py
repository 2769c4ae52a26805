"""The tokenizer of a model folder, as an object of transformers."""

from __future__ import annotations

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

_FILE = "tokenizer.json"
_SETTINGS = "tokenizer_config.json"
_SENTENCEPIECE = "tokenizer.model"
# Beginnings and ends of the names of tokenizer files.
_STARTS = ("tokenizer", "vocab", "merges", "tekken", "spiece", "sentencepiece")
_ENDS = (".tiktoken", ".model")
# Text on which tokenizers differ: digits, contractions, spaces, lines, combining marks, wide and joined characters.
_PROBE = (
    "It's 1234567 o'clock,  DON'T\tstop...\r\n\n  def f_1(x): return x**2  # e\u0301t\u00e9 \u212b \ufb01 \uff11\u00bd"
    " \u6f22\u5b57\u304b\u306a\ud55c\uae00 \U0001f469\u200d\U0001f4bb \u00a0end "
)


def load_tokenizer(path: AnyPath, *, add_bos_token: bool | None = None) -> Any:
    """Return the tokenizer of a model.

    It is in the folder ``path``, in the folder of the file ``path``, or in the metadata of that file.

    Errors and options are documented at ``tokenizer_in``.
    """
    with companions_folder(Location.parse(path)) as folder:
        return tokenizer_in(folder, add_bos_token=add_bos_token)


def tokenizer_in(folder: Store, *, add_bos_token: bool | None = None) -> Any:
    """Return the tokenizer of a model folder. Code in the folder does not run.

    If the folder is remote, its files except the weights are copied while the tokenizer is read.

    The folder's tokenizer.json decides how text is split. For some model types transformers' own loader builds a class
    that uses only the vocabulary of that file. If its tokens differ, a ``UserWarning`` says so.

    If the files declare that texts begin with BOS but the tokenizer of transformers does not add BOS, the tokenizer is
    built with BOS. transformers 5 ignores ``add_bos_token`` if there is a tokenizer.json. It adds no BOS to a
    SentencePiece model whose settings do not mention BOS.

    Parameters
    ----------
    folder : Store
    add_bos_token : bool, optional
        Whether texts get the BOS token; by default as the folder's files declare.

    Raises
    ------
    FormatError
        ``model.tokenizer``: the folder has no tokenizer that transformers can build.
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
        tokenizer_cls = transformers.PreTrainedTokenizerFast if stored else transformers.AutoTokenizer
        tokenizer = _from_pretrained(tokenizer_cls, folder, options)
        if add_bos_token is None and _states_bos(folder):
            tokenizer, options = _with_bos(tokenizer, tokenizer_cls, folder)
    except IngotError:
        raise
    except Exception as error:  # dozens of tokenizer classes read arbitrary files
        raise FormatError(
            "model.tokenizer",
            f"expected a tokenizer ({_FILE}) next to the weights that transformers can read: {one_line(error)}",
            where=location,
        ) from error
    require_vocabulary(tokenizer, folder, location)
    if stored:
        alternative = _chosen_by_transformers(folder, options)
        if alternative is not None and not same_tokens(alternative, tokenizer):
            warnings.warn(
                f"{printable(location)}: transformers uses {type(alternative).__name__} for this model, whose tokens "
                f"differ from those of {_FILE}; Ingot uses {_FILE}",
                stacklevel=2,
            )
    return tokenizer


def has_tokenizer(folder: Store) -> bool:
    """Return whether a model folder has files of a tokenizer."""
    return any(name.startswith(_STARTS) or name.endswith(_ENDS) for name in folder.list().files)


def _states_bos(folder: Store) -> bool:
    """Return whether the folder's files declare that texts begin with BOS.

    The post-processor of tokenizer.json is ignored, because transformers applies it.
    """
    settings = read_json(folder, _SETTINGS, "model.tokenizer", "model.tokenizer") if folder.exists(_SETTINGS) else {}
    declared = settings.get("add_bos_token")
    if isinstance(declared, bool) or folder.exists(_FILE) or not folder.exists(_SENTENCEPIECE):
        return declared is True
    data = folder.read(_SENTENCEPIECE, MAX_CONFIG, "model.tokenizer")
    return sentencepiece.adds_bos(data, folder.location_of(_SENTENCEPIECE), settings)


def _with_bos(tokenizer: Any, tokenizer_cls: Any, folder: Store) -> tuple[Any, dict[str, bool]]:
    """Return a tokenizer that adds BOS, and the options with which it was built.

    If ``tokenizer`` adds BOS already or has no BOS, it is returned unchanged with empty options.
    """
    surrounding = surrounding_tokens(tokenizer)
    if surrounding.before or tokenizer.bos_token is None:
        return tokenizer, {}
    options = {"add_bos_token": True, **({"add_eos_token": True} if surrounding.after else {})}
    return _from_pretrained(tokenizer_cls, folder, options), options


def same_tokens(first: Any, second: Any) -> bool:
    """Return whether two tokenizers agree on the tokens of a probe text, with and without special tokens.

    Returns false if one of them raises an error for the text.
    """
    try:
        return all(
            first(_PROBE, add_special_tokens=special, verbose=False).input_ids
            == second(_PROBE, add_special_tokens=special, verbose=False).input_ids
            for special in (False, True)
        )
    except Exception:  # the type of every error of the package tokenizers
        return False


def _from_pretrained(tokenizer_cls: Any, folder: Store, options: Mapping[str, Any]) -> Any:
    path = fspath(folder.require_path("", "reading a tokenizer"))
    return tokenizer_cls.from_pretrained(path, trust_remote_code=False, local_files_only=True, **options)


def _chosen_by_transformers(folder: Store, options: Mapping[str, Any]) -> Any:
    """Return the tokenizer that transformers' own loader builds for the folder.

    Returns None if its class is the plain ``PreTrainedTokenizerFast``, or if it cannot be built.
    """
    transformers = require("transformers", EXTRA)
    try:
        tokenizer = _from_pretrained(transformers.AutoTokenizer, folder, options)
    except Exception:  # this tokenizer serves only for a warning
        return None
    return None if type(tokenizer) is transformers.PreTrainedTokenizerFast else tokenizer


def require_vocabulary(tokenizer: Any, folder: Store, location: str = "") -> None:
    """Raise if the tokenizer's files are missing: for some model types transformers builds an empty tokenizer.

    Raises ``FormatError`` ``model.tokenizer``.
    """
    names = set((getattr(tokenizer, "vocab_files_names", None) or {}).values())
    if not names:  # a tokenizer of bytes has no files
        return
    there = {*folder.list().files} - {"tokenizer_config.json"}
    if not any(
        name in names or name.endswith(".tiktoken") or name.startswith(("tokenizer.", "tekken")) for name in there
    ):
        raise FormatError(
            "model.tokenizer",
            f"expected a tokenizer ({', '.join(sorted(names))}) next to the weights, which have none; copy it there",
            where=location or folder.location,
        )
