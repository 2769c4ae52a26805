"""Conversion of a model folder's small files to GGUF metadata, and back.

``tokenizer.huggingface.json`` is GGUF's standard key for the full text of ``tokenizer.json``. Ingot defines the keys
for the other files.
"""

from __future__ import annotations

import json
import re
from base64 import b64decode, b64encode
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from ingot.errors import FormatError, UnsupportedError
from ingot.formats.packed_folders.base import PACKING_KEYS
from ingot.naming.config import CONFIG, MAX_CONFIG, parse_config
from ingot.reporting.report import size_text
from ingot.stores.location import Location
from ingot.translate import (
    chat_templates,
    keys,
    pooling,
    sentencepiece,
    special_tokens,
    tekken,
    tokenizer,
    tokenizer_equality,
    vocabulary,
    wordpiece_unigram,
)
from ingot.translate.families import Family

TOKENIZER = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
GENERATION = "generation_config.json"
TOKENIZER_KEY = "tokenizer.huggingface.json"
PREFIX = "ingot.companion."
ADDED = "added_tokens.json"
_JSON = (CONFIG, GENERATION, SETTINGS, "special_tokens_map.json", ADDED, chat_templates.JSON)
_LISTS = (pooling.MODULES,)
_IN_FOLDER = re.compile(r"additional_chat_templates/\w[\w.-]{0,80}\.jinja|[0-9]{0,4}_?Pooling/config\.json", re.ASCII)
"""Files in subfolders that are stored: named chat templates, and pooling settings of a sentence-transformers model."""
_TEXT = (chat_templates.JINJA,)
SENTENCEPIECE_FILES = ("tokenizer.model", "sentencepiece.bpe.model")
"""Trained SentencePiece models; metadata contain their bytes as base64. The second name is XLM-RoBERTa's."""
_LARGE = (TOKENIZER, tekken.FILE)
RULE = "architecture.companion"
_LARGE_COPY = 1_000_000
"""If GGUF metadata contain a copy of ``tokenizer.json`` that is larger than this number of bytes, a note reports it."""


class LargeText(str):
    """The text of a large JSON file; ``parsed`` caches its value."""

    @cached_property
    def parsed(self) -> Any:
        """The parsed value; raises the errors of ``json.loads``."""
        return json.loads(self)


def read_files(companions: Mapping[str, str]) -> dict[str, str]:
    """Return the texts of the companions that GGUF metadata can store. Raises ``FormatError``
    ``architecture.companion``.
    """
    texts = {}
    order = (*_JSON, *_LISTS, *_TEXT, *_LARGE, *SENTENCEPIECE_FILES)
    for name in sorted(
        filter(_is_storable, companions), key=lambda name: order.index(name) if name in order else len(order)
    ):
        store, file = Location.parse(companions[name]).find(io="pread")
        data = store.read(file, MAX_CONFIG * (8 if name in _LARGE else 1), RULE)
        try:
            text = b64encode(data).decode() if name in SENTENCEPIECE_FILES else data.decode()
            texts[name] = LargeText(text) if name in _LARGE else text
        except UnicodeDecodeError as error:
            raise FormatError(RULE, f"expected UTF-8, found {error.reason}", where=companions[name]) from None
    return texts


def _is_storable(name: str) -> bool:
    """Return whether GGUF metadata can store the text of a companion unchanged."""
    return name in (*_JSON, *_LISTS, *_TEXT, *_LARGE, *SENTENCEPIECE_FILES) or _IN_FOLDER.fullmatch(name) is not None


def tokenizer_metadata(files: Mapping[str, str], rows: int) -> tuple[keys.Typed, list[str]]:
    """Return GGUF metadata of the tokenizer in the files, and notes on texts that llama.cpp would tokenize differently.

    Parameters
    ----------
    files : mapping
        Texts by name, a result of ``read_files``.
    rows : int
        Rows of the embedding; 0 if unknown.

    Raises
    ------
    FormatError
        ``architecture.companion``.
    UnsupportedError
        ``architecture.tokenizer``: there is no tokenizer, or llama.cpp does not support its type;
        ``architecture.tokens``: tokens without a row in the embedding.
    """
    parsed_tokenizer = parse_file(files, TOKENIZER)
    settings = parse_file(files, SETTINGS)
    if TOKENIZER not in files and tekken.FILE in files:
        parsed_tokenizer = tekken.expand(parse_file(files, tekken.FILE))
    if parsed_tokenizer or TOKENIZER in files:
        converted = tokenizer.to_metadata(parsed_tokenizer, rows)
        from_tekken = TOKENIZER not in files
        ids = (tekken if from_tekken else tokenizer).ids_by_convention(parsed_tokenizer)
        added_around = special_tokens.begins_and_ends(parsed_tokenizer)
    else:
        trained = _read_sentencepiece(files)
        converted = sentencepiece.to_metadata(trained, settings, parse_file(files, ADDED), rows)
        ids = trained.ids
        added_around = sentencepiece.begins_and_ends(trained, settings)
    texts: list[str] = converted.typed[keys.TOKENS][1]
    by_text = {**converted.outside, **dict(enumerate(texts))}
    ids_by_text = {text: token_id for token_id, text in sorted(by_text.items(), reverse=True)}
    configs = (parse_file(files, CONFIG), parse_file(files, GENERATION))
    special = special_tokens.find(parsed_tokenizer, settings, configs, ids_by_text, len(texts))
    vocabulary.require_rows(special.outside, len(texts))
    typed, notes = converted.to_metadata(len(texts))
    templates = chat_templates.find(settings, parse_file(files, chat_templates.JSON), files)
    typed |= _special_token_metadata(special, ids, added_around, typed) | templates.to_metadata()
    dropped = [
        *converted.dropped,
        *special.ignored,
        *templates.unused,
        *_describe_assumed_tokens(typed),
        *_describe_dropped_tokens(parsed_tokenizer, typed),
    ]
    return typed, [*notes, *([f"not carried over: {'; '.join(dropped)}"] if dropped else [])]


def _read_sentencepiece(files: Mapping[str, str]) -> sentencepiece.SentencePieces:
    name = next((name for name in SENTENCEPIECE_FILES if name in files), None)
    if name is None:
        raise _no_tokenizer()
    trained = sentencepiece.read(_bytes(files[name], name), name)
    if trained is None:
        raise tokenizer.unsupported("it is no BPE or Unigram of SentencePiece's", name)
    return trained if name == SENTENCEPIECE_FILES[0] else sentencepiece.with_fairseq_ids(trained)


def metadata_without_tokenizer(files: Mapping[str, str], rows: int) -> keys.Typed:
    """Return GGUF metadata of a model without a tokenizer: the ids of special tokens in its configs."""
    configs = (parse_file(files, CONFIG), parse_file(files, GENERATION))
    ids = special_tokens.find({}, {}, configs, {}, rows).ids
    typed: keys.Typed = {keys.MODEL: ("string", keys.NO_VOCABULARY)}
    return typed | {keys.ID.format(name): ("u32", ids[role]) for role, name in keys.IDS.items() if role in ids}


def _special_token_metadata(
    special: special_tokens.SpecialTokens,
    trained: Mapping[str, int],
    added_around: tuple[bool, bool],
    typed: keys.Typed,
) -> keys.Typed:
    """Return GGUF metadata of special tokens: their ids, and whether each is added to a text.

    ``added_around`` states whether the tokenizer adds its first and last token to a text. It is written only if
    llama.cpp's default differs.
    """
    count = len(typed[keys.TOKENS][1])
    ids = {role: token_id for role, token_id in {**trained, **special.ids}.items() if token_id < count}
    model, pre = (str(typed[key][1]) for key in (keys.MODEL, keys.PRE))
    added = dict(special.added)
    default = special_tokens.default_added(model, pre)
    if model != wordpiece_unigram.WPM:
        for role, adds in zip(special_tokens.AROUND, added_around, strict=False):
            if adds != default[role]:
                added.setdefault(role, adds)
    metadata: keys.Typed = {keys.ID.format(name): ("u32", ids[role]) for role, name in keys.IDS.items() if role in ids}
    return metadata | {keys.ADD[role]: ("bool", adds) for role, adds in added.items()}


def _describe_dropped_tokens(parsed_tokenizer: Mapping[str, Any], typed: keys.Typed) -> list[str]:
    """Return notes on a template's tokens that llama.cpp does not add; it adds at most one token at each end of a
    text.
    """
    default = special_tokens.default_added(str(typed[keys.MODEL][1]), str(typed[keys.PRE][1]))
    bos, eos, sep = (typed.get(keys.ADD[role], ("bool", default[role]))[1] for role in special_tokens.AROUND)
    return [
        f"the tokens {side} each text {' '.join(tokens)[:80]}"
        for side, tokens, added in zip(
            ("before", "after"), special_tokens.around_text(parsed_tokenizer), (bos, eos or sep), strict=True
        )
        if len(tokens) > added
    ]


def _describe_assumed_tokens(typed: keys.Typed) -> list[str]:
    """Return notes on the ids that llama.cpp assumes for special tokens, because no file declares them."""
    model = typed[keys.MODEL][1]
    texts = typed[keys.TOKENS][1]
    defaults = {keys.BPE: {"bos": 11, "eos": 11}, keys.SPM: {"bos": 1, "eos": 2}}.get(model, {})
    added = special_tokens.default_added(model, typed[keys.PRE][1])
    adds_bos = typed.get(keys.ADD["bos"], ("bool", added["bos"]))[1]
    return [
        f"no {role} token is named, and llama.cpp assumes token {token_id} ({texts[token_id]!r:.40})"
        for role, token_id in defaults.items()
        if keys.ID.format(role) not in typed and token_id < len(texts) and (role == "eos" or adds_bos)
    ]


def _no_tokenizer() -> UnsupportedError:
    return UnsupportedError(
        f"there is no tokenizer ({', '.join((*_LARGE, *SENTENCEPIECE_FILES))}), and llama.cpp needs one in its file; "
        "put the model's tokenizer next to its weights, or pass --no-tokenizer for a file that takes ids of tokens",
        rule=tokenizer.RULE,
    )


def parse_file(files: Mapping[str, str], name: str) -> dict[str, Any]:
    """Return one of the files as a JSON object; an empty one if the file is missing.

    Raises ``FormatError`` ``architecture.companion``: not JSON.
    """
    if name not in files:
        return {}
    if name not in _LARGE:
        return parse_config(files[name].encode(), RULE, name)
    try:
        text = files[name]
        parsed = (text if isinstance(text, LargeText) else LargeText(text)).parsed
    except (ValueError, RecursionError) as error:
        raise FormatError(RULE, f"not JSON: {error}", where=name) from error
    return parsed if isinstance(parsed, dict) else {}


def to_metadata(files: Mapping[str, str], typed: keys.Typed) -> tuple[dict[str, tuple[str, Any]], list[str]]:
    """Return GGUF metadata with the texts of the files, and notes.

    Keys on packing are removed from ``config.json``. ``tokenizer.json`` is omitted if an equivalent one can be rebuilt
    from ``typed``, the metadata of the tokenizer.
    """
    texts = dict(files)
    notes = list[str]()
    if TOKENIZER in texts:
        reason = tokenizer_equality.why_not_rebuilt(parse_file(files, TOKENIZER), parse_file(files, SETTINGS), typed)
        size = len(texts[TOKENIZER].encode())
        if not reason:
            del texts[TOKENIZER]
        elif size > _LARGE_COPY:
            notes.append(f"the file contains a copy of {TOKENIZER} ({size_text(size)}): {reason}")
    config = parse_file(files, CONFIG)
    if any(key in config for key in PACKING_KEYS):
        texts[CONFIG] = (
            json.dumps({key: value for key, value in config.items() if key not in PACKING_KEYS}, indent=2) + "\n"
        )
    names = {name: TOKENIZER_KEY if name == TOKENIZER else PREFIX + name for name in texts}
    return {names[name]: ("string", str(text)) for name, text in texts.items()}, notes


def stored_files(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of files that the metadata contain in full, by file name; malformed files are left out."""
    stored = {key.removeprefix(PREFIX): value for key, value in metadata.items() if key.startswith(PREFIX)}
    stored |= {TOKENIZER: metadata[TOKENIZER_KEY]} if TOKENIZER_KEY in metadata else {}
    return {
        name: text
        for name, text in stored.items()
        if isinstance(text, str) and _is_storable(name) and _is_well_formed(name, text)
    }


def _is_well_formed(name: str, text: str) -> bool:
    """Return whether a stored text is valid for its file name, such as JSON for ``.json``."""
    if name in SENTENCEPIECE_FILES:
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
    """Return the files of a model folder from GGUF metadata, and notes on differences in tokenization from llama.cpp.

    ``config`` is written as ``config.json``. Raises ``UnsupportedError`` ``architecture.tokenizer``.
    """
    files = _without_replaced_templates(metadata, stored_files(metadata))
    differences = list[str]()
    files |= _updated_settings(metadata, files)
    if TOKENIZER not in files:
        built, differences = tokenizer.to_files(metadata, parse_file(files, SETTINGS))
        files = {name: json.dumps(value, indent=2, ensure_ascii=False) + "\n" for name, value in built.items()} | files
    if pooling.MODULES not in files:
        built = pooling.files_of(metadata, family, config.get("hidden_size"))
        files = {name: json.dumps(value, indent=2) + "\n" for name, value in built.items()} | files
    files[CONFIG] = json.dumps(config, indent=2) + "\n"
    return {
        name: _bytes(text, name) if name in SENTENCEPIECE_FILES else text.encode() for name, text in files.items()
    }, differences


def _without_replaced_templates(metadata: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, str]:
    """Return the stored files, updated if a program has changed the chat templates in the metadata.

    After an update, ``tokenizer_config.json`` contains the templates of the metadata, and no other file contains any.
    """
    settings = parse_file(files, SETTINGS)
    stored = chat_templates.find(settings, parse_file(files, chat_templates.JSON), files).to_metadata()
    names = {key for key in metadata if key == keys.TEMPLATE or key.startswith(f"{keys.TEMPLATE}.")}
    stored_texts = {key: value for key, (_, value) in stored.items() if key != chat_templates.NAMES}
    if not files or stored_texts == {key: metadata[key] for key in names}:
        return dict(files)
    template = chat_templates.from_metadata(metadata)
    settings = {**settings, "chat_template": template} if template is not None else settings
    if template is None:
        settings.pop("chat_template", None)
    other_files = {name: text for name, text in files.items() if not chat_templates.is_template_file(name)}
    return {**other_files, SETTINGS: json.dumps(settings, indent=2, ensure_ascii=False) + "\n"}


def special_ids(metadata: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, int]:
    """Return the ids of special tokens by role, found in the stored files as a conversion to GGUF finds them."""
    texts = metadata.get(keys.TOKENS)
    texts = texts if isinstance(texts, list) else []
    ids = {text: token_id for token_id, text in reversed([*enumerate(texts)]) if isinstance(text, str)}
    configs = (parse_file(files, CONFIG), parse_file(files, GENERATION))
    settings = parse_file(files, SETTINGS)
    parsed_tokenizer = parse_file(files, TOKENIZER)
    if TOKENIZER not in files and settings and not any(name in files for name in SENTENCEPIECE_FILES):
        try:
            parsed_tokenizer = tokenizer.special_sections(metadata, settings)
        except UnsupportedError:
            parsed_tokenizer = {}  # files_of refuses this tokenizer, or leaves it out
    return special_tokens.find(parsed_tokenizer, settings, configs, ids, len(texts)).ids


def _updated_settings(metadata: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, str]:
    """Return ``tokenizer_config.json`` with the metadata's special tokens; empty if they have not changed."""
    settings = parse_file(files, SETTINGS)
    ids = special_ids(metadata, files)
    texts = metadata.get(keys.TOKENS)
    if not settings or not isinstance(texts, list):
        return {}
    changed: dict[str, Any] = {}
    for role, name in keys.IDS.items():
        token_id = metadata.get(keys.ID.format(name))
        if role in ids and type(token_id) is int and token_id != ids[role] and 0 <= token_id < len(texts):
            changed[f"{role}_token"] = texts[token_id]
    for role, key in keys.ADD.items():
        flag = metadata.get(key)
        if isinstance(flag, bool) and isinstance(settings.get(f"add_{role}_token"), bool):
            changed |= {f"add_{role}_token": flag} if settings[f"add_{role}_token"] != flag else {}
    return {SETTINGS: json.dumps({**settings, **changed}, indent=2, ensure_ascii=False) + "\n"} if changed else {}


def _bytes(text: str, location: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except ValueError:
        raise FormatError(RULE, "expected base64", where=location) from None


def _is_base64(text: str) -> bool:
    try:
        return len(b64decode(text, validate=True)) <= MAX_CONFIG
    except ValueError:
        return False
