"""What safetensors files hold, whatever it means: to compare files entry by entry, with nothing of Ingot's readers."""

from __future__ import annotations

import json
from pathlib import Path


def stored_entries(folder: Path, name: str = "model.safetensors") -> dict[str, tuple[str, list[int], bytes]]:
    """Return type, shape and bytes of each entry of a file; states of bitsandbytes, in JSON, by what they say."""
    data = (folder / name).read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    found = {}
    for key, at in json.loads(data[8:size]).items():
        if key != "__metadata__":
            start, stop = at["data_offsets"]
            stored = data[size + start : size + stop]
            stored = repr(sorted(json.loads(stored).items())).encode() if ".quant_state." in key else stored
            found[key] = (at["dtype"], at["shape"], stored)
    return found
