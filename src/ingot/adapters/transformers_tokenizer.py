"""The tokenizer beside a model's weights, as transformers has it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ingot.adapters.transformers_config import EXTRA, one_line, read_json
from ingot.core.extras import require
from ingot.errors import FormatError

_FILE = "tokenizer.json"
# The byte-level BPE of Ingot's demo model; its words, as in ``ingot.demo.tokenizer``.
_OWN = "ingot-byte-bpe"
_WORD = r" ?[^\W\d_]+| ?\d{1,3}| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+"


def load_tokenizer(folder: Path) -> Any:
    """Return the tokenizer of a model folder; no code that travels with the model is run.

    Raises
    ------
    FormatError
        ``model.tokenizer``: no tokenizer there, or none that transformers can make.
    MissingExtraError
        transformers is not installed.
    """
    transformers = require("transformers", EXTRA)
    try:
        own = _own(folder)
        if own is not None:
            return transformers.PreTrainedTokenizerFast(tokenizer_object=own)
        found = transformers.AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except FormatError:
        raise
    except Exception as error:  # readers of dozens of tokenizer classes, over files that may be anything
        raise FormatError(
            "model.tokenizer",
            f"expected a tokenizer ({_FILE}) beside the weights, found none that transformers reads: {one_line(error)}",
            where=str(folder),
        ) from error
    require_vocabulary(found, folder)
    return found


def require_vocabulary(tokenizer: Any, folder: Path) -> None:
    """Refuse a tokenizer without its files: of some model types transformers makes an empty one.

    Raises ``FormatError`` ``model.tokenizer``.
    """
    names = set((getattr(tokenizer, "vocab_files_names", None) or {}).values())
    if not names:  # of bytes, say
        return
    there = {path.name for path in folder.iterdir()} - {"tokenizer_config.json"}
    if not any(
        name in names or name.endswith(".tiktoken") or name.startswith(("tokenizer.", "tekken")) for name in there
    ):
        raise FormatError(
            "model.tokenizer",
            f"expected a tokenizer ({', '.join(sorted(names))}) beside the weights, found none; copy it there",
            where=str(folder),
        )


def _own(folder: Path) -> Any:
    """Return a tokenizer in the demo model's format as one of the package tokenizers; None for other files."""
    path = folder / _FILE
    try:
        with path.open("rb") as file:
            if _OWN.encode() not in file.read(64):
                return None
    except OSError:
        return None
    merges = read_json(path, "model.tokenizer", "model.tokenizer")["merges"]
    package = require("tokenizers", EXTRA)
    chars = _byte_chars()
    tokens = list(chars)
    pairs = []
    for left, right in merges:
        pairs.append((tokens[left], tokens[right]))
        tokens.append(tokens[left] + tokens[right])
    found = package.Tokenizer(package.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    found.pre_tokenizer = package.pre_tokenizers.Sequence(
        [
            package.pre_tokenizers.Split(package.Regex(_WORD), "isolated"),
            package.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    found.decoder = package.decoders.ByteLevel()
    return found


def _byte_chars() -> list[str]:
    """Return the character that byte-level BPE writes for each byte: itself if printable Latin-1, else from U+0100 on.

    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; their encoder.py.
    """
    plain = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
