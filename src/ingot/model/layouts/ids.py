"""Ids of codecs as files spell them: the only place where a name of ours and a file's differ."""

from __future__ import annotations

from typing import Any

_FILE_IDS = {"affine": "quantized_group"}  # zTensor 1.2 section 3
_CODECS = {stored: codec for codec, stored in _FILE_IDS.items()}
# Before an id from a file that is none of ours but reads like one: it stays unknown, and is written back as it was.
_FOREIGN = "~"


def file_id(codec: str) -> str:
    """Return the id that a file has for a codec: itself for nearly all."""
    return codec[1:] if codec.startswith(_FOREIGN) else _FILE_IDS.get(codec, codec)


def codec_named(text: Any) -> Any:
    """Return the codec that a person names: by its name, or by the id that files have for it."""
    return _CODECS.get(text, text) if isinstance(text, str) else text


def codec_of(stored: str) -> str:
    """Return the codec that an id of a file names; ``file_id`` gives the same id back, whatever it is."""
    if stored in _FILE_IDS or stored.startswith(_FOREIGN):
        return _FOREIGN + stored
    return _CODECS.get(stored, stored)
