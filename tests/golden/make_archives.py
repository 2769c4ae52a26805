"""Makes the golden archives: ``python -m tests.golden.make_archives``. Later versions of Ingot must open these files.

The script is run again only to add files, because the same files can be stored in other bytes by a later version.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from pathlib import Path

import ml_dtypes
import numpy as np

import ingot

ROOT = Path(__file__).parent / "archives"
LAYERS = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.down_proj.weight")


def weights(seed: int, dtype: type) -> dict[str, np.ndarray]:
    """Return two matrices and a vector."""
    rng = np.random.default_rng(seed)
    arrays = {name: rng.normal(0, 0.02, (96, 64)).astype(dtype) for name in LAYERS}
    return {**arrays, "model.norm.weight": np.ones(64, dtype)}


def moved(arrays: dict[str, np.ndarray], seed: int) -> dict[str, np.ndarray]:
    """Return the arrays after a small step of training."""
    rng = np.random.default_rng(seed)
    return {
        name: (value.astype(np.float32) * (1 + 0.003 * rng.normal(size=value.shape))).astype(value.dtype)
        for name, value in arrays.items()
    }


def folder(path: Path) -> Path:
    """Write a folder with tensors that occur again, two checkpoints, and files of other programs."""
    tensors = {
        name: np.tile(value, (3, 1)) if value.ndim == 2 else value for name, value in weights(1, np.float32).items()
    }
    for name, step in (("a", tensors), ("b", moved(tensors, 2))):
        (path / name).mkdir(parents=True)
        ingot.save(path / name / "model.safetensors", step)
        (path / name / "config.json").write_text('{"model_type": "llama"}')
    (path / "b" / "copy.safetensors").write_bytes((path / "b" / "model.safetensors").read_bytes())
    (path / "notes é.txt").write_text("words " * 300)
    (path / "empty").touch()
    return path


def digests(path: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of a folder, or of a single file."""
    files = [path] if path.is_file() else sorted(item for item in path.rglob("*") if item.is_file())
    top = path.parent if path.is_file() else path
    return {file.relative_to(top).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def main() -> None:
    """Write the archives, and ``expected.json`` with the digests of the files in them."""
    ROOT.mkdir(exist_ok=True)
    expected = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        sources = {"folder": folder(work / "folder")}
        ingot.save(work / "base.safetensors", weights(3, ml_dtypes.bfloat16))
        ingot.save(work / "tuned.safetensors", moved(weights(3, ml_dtypes.bfloat16), 4))
        for recipe in ("q4_0", "q6_k"):
            ingot.save(
                work / "wide.safetensors",
                {name: np.tile(value, (1, 4)) for name, value in weights(5, np.float32).items() if value.ndim == 2},
            )
            ingot.convert(work / "wide.safetensors", work / f"{recipe}.zt", recipe=recipe)
            ingot.convert(work / f"{recipe}.zt", ROOT / f"packed-{recipe}.zt", recipe="lossless", overwrite=True)
            with ingot.open(work / f"{recipe}.zt") as opened:
                expected[f"packed-{recipe}"] = {
                    name: hashlib.sha256(tensor.numpy("f32").tobytes()).hexdigest() for name, tensor in opened.items()
                }
            sources[recipe] = work / f"{recipe}.zt"
        for name, source in sources.items():
            ingot.archive(source, ROOT / f"{name}.zt", overwrite=True)
            expected[name] = digests(source)
        (ROOT / "base.safetensors").write_bytes((work / "base.safetensors").read_bytes())
        ingot.archive(work / "tuned.safetensors", ROOT / "tuned.zt", against=ROOT / "base.safetensors", overwrite=True)
        expected["tuned"] = digests(work / "tuned.safetensors")
    (ROOT / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
