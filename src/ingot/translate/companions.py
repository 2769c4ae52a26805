"""A model folder's small files in GGUF metadata, and the files that a GGUF file stands for.

``tokenizer.huggingface.json`` is GGUF's own key for all of ``tokenizer.json``; the other files have keys of Ingot's.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

from ingot.errors import FormatError, UnsupportedError
from ingot.formats.packed_folders.base import PACKING_KEYS
from ingot.naming.config import CONFIG, MAX_CONFIG, parse_config
from ingot.stores.location import Location
from ingot.translate import (
    chat_templates,
    demo_vocabulary,
    keys,
    pieces,
    pooling,
    sentencepiece,
    special_tokens,
    tokenizer,
    vocabulary,
)
from ingot.translate.families import Family

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
WHOLE = "tokenizer.huggingface.json"
PREFIX = "ingot.companion."
ADDED = "added_tokens.json"
_JSON = (CONFIG, GENERATION, SETTINGS, "special_tokens_map.json", ADDED, chat_templates.JSON)
_LISTS = (pooling.MODULES,)
_IN_FOLDER = re.compile(r"additional_chat_templates/\w[\w.-]{0,80}\.jinja|[0-9]{0,4}_?Pooling/config\.json", re.ASCII)
"""Chat templates with a name, and how a model of sentence-transformers pools."""
_TEXT = (chat_templates.JINJA,)
SENTENCES = ("tokenizer.model", "sentencepiece.bpe.model")
"""What SentencePiece trained: bytes, which metadata hold as base64. The second is XLM-RoBERTa's."""
RULE = "architecture.companion"


def read_files(companions: Mapping[str, str]) -> dict[str, str]:
    """Return the text of those companions that metadata keep; raises ``FormatError`` ``architecture.companion``."""
    found = {}
    order = (*_JSON, *_LISTS, *_TEXT, TOKENIZER, *SENTENCES)
    for name in sorted(
        filter(_is_kept, companions), key=lambda name: order.index(name) if name in order else len(order)
    ):
        store, file = Location.parse(companions[name]).find(io="pread")
        data = store.read(file, MAX_CONFIG * (8 if name == TOKENIZER else 1), RULE)
        try:
            found[name] = b64encode(data).decode() if name in SENTENCES else data.decode()
        except UnicodeDecodeError as error:
            raise FormatError(RULE, f"expected UTF-8, found {error.reason}", where=companions[name]) from None
    return found


def _is_kept(name: str) -> bool:
    """Return whether GGUF metadata keep a companion as it is."""
    return name in (*_JSON, *_LISTS, *_TEXT, TOKENIZER, *SENTENCES) or _IN_FOLDER.fullmatch(name) is not None


def tokenizer_metadata(files: Mapping[str, str], rows: int) -> tuple[keys.Typed, list[str]]:
    """Return GGUF metadata of the tokenizer among the files, and notes on what llama.cpp does otherwise.

    Parameters
    ----------
    files : mapping
        Texts by name, as ``read_files`` returns them.
    rows : int
        Rows of the embedding; 0 if that is not known.

    Raises
    ------
    FormatError
        ``architecture.companion``.
    UnsupportedError
        ``architecture.tokenizer``: there is none, or llama.cpp has none of its kind; ``architecture.tokens``.
    """
    whole = demo_vocabulary.expanded(parsed(files, TOKENIZER))
    settings = parsed(files, SETTINGS)
    if TOKENIZER in files:
        words = tokenizer.to_metadata(whole, rows)
        ids = tokenizer.ids_by_convention(whole)
        around = special_tokens.begins_and_ends(whole)
    else:
        trained = _trained(files)
        words = sentencepiece.to_metadata(trained, settings, parsed(files, ADDED), rows)
        ids = trained.ids
        around = sentencepiece.begins_and_ends(trained, settings)
    texts: list[str] = words.typed[keys.TOKENS][1]
    by_text = {**words.outside, **dict(enumerate(texts))}
    numbers = {text: number for number, text in sorted(by_text.items(), reverse=True)}
    configs = (parsed(files, CONFIG), parsed(files, GENERATION))
    special = special_tokens.find(whole, settings, configs, numbers, len(texts))
    vocabulary.require_rows(special.outside, len(texts))
    typed, notes = words.checked(len(texts))
    templates = chat_templates.find(settings, parsed(files, chat_templates.JSON), files)
    typed |= _special(special, ids, around, typed) | templates.to_metadata()
    lost = [*words.lost, *special.ignored, *templates.unused, *_by_default(typed), *_surplus(whole, typed)]
    return typed, [*notes, *([f"not carried over: {'; '.join(lost)}"] if lost else [])]


def _trained(files: Mapping[str, str]) -> sentencepiece.SentencePieces:
    name = next((name for name in SENTENCES if name in files), None)
    if name is None:
        raise _no_tokenizer()
    trained = sentencepiece.read(_bytes(files[name], name), name)
    if trained is None:
        raise tokenizer.unsupported("it is no BPE or Unigram of SentencePiece's", name)
    return trained if name == SENTENCES[0] else sentencepiece.as_fairseq(trained)


def without_words(files: Mapping[str, str], rows: int) -> keys.Typed:
    """Return GGUF metadata of a model without a tokenizer: the ids of special tokens that its configs state."""
    configs = (parsed(files, CONFIG), parsed(files, GENERATION))
    ids = special_tokens.find({}, {}, configs, {}, rows).ids
    typed: keys.Typed = {keys.MODEL: ("string", keys.NO_VOCABULARY)}
    return typed | {keys.ID.format(name): ("u32", ids[role]) for role, name in keys.IDS.items() if role in ids}


def _special(
    special: special_tokens.SpecialTokens, trained: Mapping[str, int], around: tuple[bool, bool], typed: keys.Typed
) -> keys.Typed:
    """Return GGUF metadata of special tokens, and of those put around a text if llama.cpp did otherwise."""
    count = len(typed[keys.TOKENS][1])
    ids = {role: number for role, number in {**trained, **special.ids}.items() if number < count}
    model, pre = (str(typed[key][1]) for key in (keys.MODEL, keys.PRE))
    added, default = dict(special.added), special_tokens.by_default(model, pre)
    if model != pieces.WPM:
        for role, adds in zip(special_tokens.AROUND, around, strict=False):
            if adds != default[role]:
                added.setdefault(role, adds)
    metadata: keys.Typed = {keys.ID.format(name): ("u32", ids[role]) for role, name in keys.IDS.items() if role in ids}
    return metadata | {keys.ADD[role]: ("bool", adds) for role, adds in added.items()}


def _surplus(whole: Mapping[str, Any], typed: keys.Typed) -> list[str]:
    """Return which tokens of a template llama.cpp does not put around a text: it puts at most one at each end."""
    default = special_tokens.by_default(str(typed[keys.MODEL][1]), str(typed[keys.PRE][1]))
    bos, eos, sep = (typed.get(keys.ADD[role], ("bool", default[role]))[1] for role in special_tokens.AROUND)
    return [
        f"the tokens {where} each text {' '.join(tokens)[:80]}"
        for where, tokens, added in zip(
            ("before", "after"), special_tokens.around_text(whole), (bos, eos or sep), strict=True
        )
        if len(tokens) > added
    ]


def _by_default(typed: keys.Typed) -> list[str]:
    """Return what llama.cpp takes for special tokens that no file names: it has ids of its own for some."""
    model = typed[keys.MODEL][1]
    texts = typed[keys.TOKENS][1]
    defaults = {keys.BPE: {"bos": 11, "eos": 11}, keys.SPM: {"bos": 1, "eos": 2}}.get(model, {})
    added = special_tokens.by_default(model, typed[keys.PRE][1])
    adds_bos = typed.get(keys.ADD["bos"], ("bool", added["bos"]))[1]
    return [
        f"no {role} token is named, for which llama.cpp takes token {number} ({texts[number]!r:.40})"
        for role, number in defaults.items()
        if keys.ID.format(role) not in typed and number < len(texts) and (role == "eos" or adds_bos)
    ]


def _no_tokenizer() -> UnsupportedError:
    return UnsupportedError(
        f"there is no tokenizer ({TOKENIZER}, {', '.join(SENTENCES)}), and llama.cpp wants one in its file; put the "
        "model's tokenizer beside its weights, or pass --no-tokenizer for a file that takes ids of tokens",
        rule=tokenizer.RULE,
    )


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
    """Return the files that metadata hold as they are; a file that is not of its kind is left out."""
    stored = {key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)}
    stored |= {TOKENIZER: metadata[WHOLE]} if WHOLE in metadata else {}
    return {
        name: text
        for name, text in stored.items()
        if isinstance(text, str) and _is_kept(name) and _is_whole(name, text)
    }


def _is_whole(name: str, text: str) -> bool:
    """Return whether a kept text is a file of its kind."""
    if name in SENTENCES:
        return _is_base64(text)
    if name.endswith(".jinja"):
        return True
    try:
        return isinstance(json.loads(text), list if name in _LISTS else dict)
    except (ValueError, RecursionError):
        return False


def files_of(
    metadata: Mapping[str, Any], config: Mapping[str, Any], family: Family
) -> tuple[dict[str, bytes], list[str]]:
    """Return the files of a GGUF file's metadata beside its ``config.json``, and what they do otherwise.

    Raises ``UnsupportedError`` ``architecture.tokenizer``.
    """
    files = kept(metadata)
    lost = list[str]()
    if TOKENIZER in files or any(name in files for name in SENTENCES):
        files |= _named_again(metadata, files)
    if TOKENIZER not in files:
        made, lost = tokenizer.to_files(metadata, parsed(files, SETTINGS))
        files = {name: json.dumps(value, indent=2, ensure_ascii=False) + "\n" for name, value in made.items()} | files
    if pooling.MODULES not in files:
        made = pooling.files_of(metadata, family, config.get("hidden_size"))
        files = {name: json.dumps(value, indent=2) + "\n" for name, value in made.items()} | files
    files[CONFIG] = json.dumps(config, indent=2) + "\n"
    return {name: _bytes(text, name) if name in SENTENCES else text.encode() for name, text in files.items()}, lost


def special_ids(metadata: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, int]:
    """Return the ids of special tokens that kept files name, by role, as a conversion to GGUF finds them."""
    texts = metadata.get(keys.TOKENS)
    texts = texts if isinstance(texts, list) else []
    ids = {text: number for number, text in reversed([*enumerate(texts)]) if isinstance(text, str)}
    configs = (parsed(files, CONFIG), parsed(files, GENERATION))
    return special_tokens.find(parsed(files, TOKENIZER), parsed(files, SETTINGS), configs, ids, len(texts)).ids


def _named_again(metadata: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, str]:
    """Return ``tokenizer_config.json`` with the special tokens that metadata name by now, if they are others."""
    settings = parsed(files, SETTINGS)
    ids = special_ids(metadata, files)
    texts = metadata.get(keys.TOKENS)
    if not settings or not isinstance(texts, list):
        return {}
    changed = {}
    for role, name in keys.IDS.items():
        number = metadata.get(keys.ID.format(name))
        if role in ids and type(number) is int and number != ids[role] and 0 <= number < len(texts):
            changed[f"{role}_token"] = texts[number]
    return {SETTINGS: json.dumps({**settings, **changed}, indent=2, ensure_ascii=False) + "\n"} if changed else {}


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
