"""A model folder's small files in GGUF metadata, and the files that a GGUF file stands for.

``tokenizer.huggingface.json`` is GGUF's own key for all of ``tokenizer.json``; the other files have keys of Ingot's.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

from ingot.core.config import CONFIG, MAX_CONFIG, parse_config
from ingot.errors import FormatError
from ingot.formats.dialects.base import PACKING_KEYS
from ingot.ops.architectures import keys, sentencepiece, tokenizer
from ingot.stores.table import locate

TOKENIZER, SETTINGS = "tokenizer.json", "tokenizer_config.json"
WHOLE = "tokenizer.huggingface.json"
PREFIX = "ingot.companion."
ADDED = "added_tokens.json"
_JSON = (CONFIG, "generation_config.json", SETTINGS, "special_tokens_map.json", ADDED)
_TEXT = ("chat_template.jinja",)
SENTENCES = ("tokenizer.model", "sentencepiece.bpe.model")
"""What SentencePiece trained: bytes, which metadata hold as base64. The second is XLM-RoBERTa's."""
RULE = "architecture.companion"


def read_files(companions: Mapping[str, str]) -> dict[str, str]:
    """Return the text of those companions that metadata keep; raises ``FormatError`` ``architecture.companion``."""
    found = {}
    for name in (*_JSON, *_TEXT, TOKENIZER, *SENTENCES):
        if name in companions:
            store, file = locate(companions[name], io="pread")
            data = store.read(file, MAX_CONFIG * (8 if name == TOKENIZER else 1), RULE)
            try:
                found[name] = b64encode(data).decode() if name in SENTENCES else data.decode()
            except UnicodeDecodeError as error:
                raise FormatError(RULE, f"expected UTF-8, found {error.reason}", where=companions[name]) from None
    return found


def words(files: Mapping[str, str], rows: int) -> tuple[keys.Typed, list[str]]:
    """Return GGUF metadata of the tokenizer among the files, and what of it llama.cpp has no word for.

    ``rows`` are those of the embedding. Raises ``FormatError`` ``architecture.companion``.
    """
    settings = parsed(files, SETTINGS)
    if TOKENIZER in files:
        return tokenizer.to_metadata(parsed(files, TOKENIZER), settings, rows)
    name = next((name for name in SENTENCES if name in files), None)
    if name is None:
        return {}, []
    found = sentencepiece.read(_bytes(files[name], name), name)
    if found is None:
        return {}, [f"{name}, which is no BPE or Unigram of SentencePiece's"]
    if name != SENTENCES[0]:
        found = sentencepiece.as_fairseq(found)
    made, lost = sentencepiece.to_metadata(found, settings, parsed(files, ADDED), rows)
    if isinstance(settings.get("chat_template"), str):
        made[keys.TEMPLATE] = ("string", settings["chat_template"])
    return made, lost


def parsed(files: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return one of the files as JSON; nothing where there is none. Errors as ``parse_config``."""
    if name not in files:
        return {}
    if name != TOKENIZER:
        return parse_config(files[name].encode(), RULE, name)
    try:
        found = json.loads(files[name])
    except (ValueError, RecursionError) as error:
        raise FormatError(RULE, f"not JSON: {error}", where=name) from error
    return found if isinstance(found, dict) else {}


def to_metadata(files: Mapping[str, str]) -> dict[str, tuple[str, Any]]:
    """Return the metadata that hold the files as they are, less what ``config.json`` says of packing."""
    texts = dict(files)
    config = parsed(files, CONFIG)
    if any(key in config for key in PACKING_KEYS):
        texts[CONFIG] = (
            json.dumps({key: value for key, value in config.items() if key not in PACKING_KEYS}, indent=2) + "\n"
        )
    return {WHOLE if name == TOKENIZER else PREFIX + name: ("string", text) for name, text in texts.items()}


def kept(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the files that metadata hold as they are; those that are no JSON objects are none."""
    keys = {name: PREFIX + name for name in (*_JSON, *_TEXT)} | {TOKENIZER: WHOLE}
    found = {name: metadata[key] for name, key in keys.items() if isinstance(metadata.get(key), str)}
    texts = {name: text for name, text in found.items() if name in _TEXT or _is_object(text)}
    models = {name: metadata.get(PREFIX + name) for name in SENTENCES}
    return texts | {name: text for name, text in models.items() if isinstance(text, str) and _is_base64(text)}


def files_of(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[dict[str, bytes], list[str]]:
    """Return the files of a GGUF file's metadata beside its ``config.json``, and what they cannot say."""
    files, lost = kept(metadata), list[str]()
    if TOKENIZER not in files:
        made, lost = tokenizer.to_files(metadata, parsed(files, SETTINGS))
        files = {name: json.dumps(value, indent=2, ensure_ascii=False) + "\n" for name, value in made.items()} | files
    files[CONFIG] = json.dumps(config, indent=2) + "\n"
    return {name: _bytes(text, name) if name in SENTENCES else text.encode() for name, text in files.items()}, lost


def _bytes(text: str, where: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError:
        raise FormatError(RULE, "expected base64", where=where) from None


def _is_base64(text: str) -> bool:
    try:
        return len(b64decode(text, validate=True)) <= MAX_CONFIG
    except ValueError:
        return False


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
