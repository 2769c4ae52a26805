"""Makes tests/golden/zt2 with the package ztensor itself; needs ztensor==2.1.2 and NumPy.

    python tests/golden/make_zt2.py CORPUS [FOLDER]

CORPUS is ``conformance/corpus`` of github.com/pie-project/ztensor (MIT license) at py-v2.1.2: it goes into
``conformance.zip`` as it is, and what the package reads of its valid files into ``expected.json``.
``peer.zip`` has a file that the package writes: compressed parts of several frames, and a tensor that was appended.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import ztensor

EPOCH = (1980, 1, 1, 0, 0, 0)


def read(path: Path) -> dict[str, Any] | str:
    """Return what the package says of a file: shape, layout, and of each part its types and its bytes' SHA-256."""
    try:
        source = ztensor.open(str(path))
    except (OSError, ValueError) as error:
        return type(error).__name__
    return {name: about(source[name]) for name in source}


def about(tensor: Any) -> dict[str, Any]:
    """Describe a tensor."""
    parts = {role: tensor[role] for role in tensor.parts}
    return {
        "shape": tensor.shape,
        "layout": tensor.layout,
        "parts": {role: [part.dtype, part.logical, content(part)] for role, part in parts.items()},
    }


def content(part: Any) -> str:
    """Return the SHA-256 of a part's bytes, or how the package refuses to read it."""
    try:
        return hashlib.sha256(part.tobytes()).hexdigest()
    except Exception as error:
        return type(error).__name__


def pack(files: dict[str, bytes], path: Path) -> None:
    """Write a zip archive that is the same every time."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, data in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, EPOCH), data, zipfile.ZIP_DEFLATED)


def written(folder: Path) -> dict[str, bytes]:
    """Return files that the package writes."""
    path = folder / "appended.zt"
    writer = ztensor.Writer(str(path), canonical=False, align=4096)
    for name, data in (("a", bytes(range(251)) * 10_000), ("empty", b"")):
        writer.add(name, data, [len(data)], "u8", encoding="zt.zstd-seekable/1")
    writer.finish()
    writer = ztensor.Writer(str(path), canonical=False, append=True)
    writer.add("later", b"12345678", [2], "u32")
    writer.finish()
    return {"appended.zt": path.read_bytes()}


def main(corpus: Path, root: Path) -> None:
    """Write all that is in the folder."""
    root.mkdir(parents=True, exist_ok=True)
    found = {path.relative_to(corpus).as_posix(): path for path in corpus.rglob("*.zt")}
    pack({name: path.read_bytes() for name, path in found.items()}, root / "conformance.zip")
    with tempfile.TemporaryDirectory() as folder:
        pack(written(Path(folder)), root / "peer.zip")
    expected = {name: read(path) for name, path in sorted(found.items()) if name.startswith("valid/")}
    (root / "expected.json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).parent / "zt2")
