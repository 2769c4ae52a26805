"""What damage does to every format: small artifacts, bytes changed in them, and what each reader then says.

``judge`` puts a damaged artifact into one of ``OUTCOMES``. An artifact lives in memory, so that it takes a millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import ingot
from ingot.artifacts.open import Source
from ingot.core.bytes import checksums
from ingot.core.parsing import cbor
from ingot.delta.apply import apply_delta
from ingot.delta.strategy import Storage
from ingot.errors import IngotError
from ingot.ext.ane.kernel import pack_model
from ingot.formats.table import FORMATS
from ingot.formats.zt2.layout import ALIGNMENT, FOOTER, MAGIC, Footer, align
from ingot.inspect.verify import examine
from ingot.model.checkpoint import Checkpoint
from ingot.model.tensor import Tensor
from ingot.stores.memory import MemoryStore
from tests.support import coreml, onnx

OUTCOMES = ("open", "decode", "verify", "harmless", "SILENT")
"""Refused on opening, while decoding, or by ``verify`` alone; nothing differs; something does, and nobody says so."""

COVERED = (
    "zt",
    "zt lossless",
    "squizd",
    "npydir",
    "wdelta sparse",
    "wdelta int4",
    "zt delta",
    "zt delta of other rows",
    "sparse patch",
    "anek",
    "zt2",
)
"""Artifacts in which no byte may change unseen."""
UNCOVERED = ("safetensors", "mlx", "npy", "coreml", "gguf", "gptq", "compressed-tensors", "onnx", "onnx within")
"""Artifacts of formats without a place for digests."""

Files = dict[str, bytes]
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass
class Sample:
    """A small artifact, whole. ``base`` are the weights that a delta is applied to."""

    name: str
    format: str
    entry: str
    files: Files
    base: Mapping[str, Array] = field(default_factory=dict)
    expected: Any = None

    def opened(self, files: Files) -> Source:
        """Open an artifact of these files."""
        store, format = MemoryStore(files), FORMATS.get_or_refuse(self.format)
        return Source(self.entry, store, self.entry, format, self.entry, format.read(store, self.entry), "mmap")

    def content(self, source: Source) -> Any:
        """Return everything that the artifact says, in a form that can be compared."""
        checkpoint = source.view()
        lines: list[Any] = [repr(sorted(checkpoint.metadata.items(), key=repr))]
        if self.base:
            state: dict[str, Any] = {name: array.copy() for name, array in self.base.items()}
            apply_delta(state, checkpoint, workers=0)
            lines.append(_bits(state))
        if not self.base or self.format == "wdelta":  # other differences mean nothing without their base
            lines.append(_bits(checkpoint.state_dict()))
        lines += [_described(checkpoint)]
        attached = checkpoint.attachments
        if attached.draft is not None:
            lines.append(_bits({name: tensor.numpy() for name, tensor in attached.draft.items()}))
        if attached.coreml is not None:
            lines.append(bytes(attached.coreml.view()))
        return lines


def _bits(arrays: Mapping[str, Array]) -> list[Any]:
    return [(name, str(array.dtype), array.shape, array.tobytes()) for name, array in arrays.items()]


def _described(tensors: Mapping[str, Tensor] | Checkpoint) -> list[Any]:
    return [(name, tensor.shape, tensor.dtype, tensor.codec) for name, tensor in tensors.items()]


def refusal(sample: Sample, files: Files) -> BaseException | None:
    """Open a damaged artifact and read all of it; return what refused it, None where nothing did."""
    try:
        sample.content(sample.opened(files))
    except (IngotError, MemoryError) as error:
        return error
    return None


def judge(sample: Sample, files: Files) -> tuple[str, str]:
    """Return which of ``OUTCOMES`` a damaged artifact comes to, and the rule that refused it."""
    if sample.expected is None:
        sample.expected = sample.content(sample.opened(sample.files))
    try:
        source = sample.opened(files)
    except IngotError as error:
        return "open", error.rule or "none"
    try:
        same = sample.content(source) == sample.expected
    except (IngotError, MemoryError) as error:
        return "decode", (error.rule if isinstance(error, IngotError) else "memory") or "none"
    if same:
        return "harmless", ""
    errors = [finding.rule for finding in examine(source) if finding.level == "error"]
    return ("verify", errors[0]) if errors else ("SILENT", "")


def exercise(sample: Sample, files: Files) -> str:
    """Open, decode and verify a mutant; return the rule of the first refusal, nothing if there was none."""
    outcome, rule = judge(sample, files)
    if outcome in ("open", "decode"):
        try:
            examine(sample.opened(files))
        except IngotError as error:
            return error.rule or "none"
    return rule


def flipped(sample: Sample, random: Random) -> Files:
    """Return the artifact with one byte changed, any of all files."""
    name, at = _somewhere(sample, random)
    data = bytearray(sample.files[name])
    data[at] ^= random.randrange(1, 256)
    return {**sample.files, name: bytes(data)}


def mutant(sample: Sample, random: Random) -> Files:
    """Return the artifact with up to four changes: bytes flipped, cut off, put in, left out, moved, repeated."""
    files = sample.files
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        filled = [name for name, data in files.items() if data]
        if not filled:
            break
        name = random.choice(filled) if random.random() < 0.5 else _somewhere(Sample("", "", "", files), random)[0]
        files = {**files, name: random.choice(_CHANGES)(files[name], random)}
    return files


def _somewhere(sample: Sample, random: Random) -> tuple[str, int]:
    at = random.randrange(sum(map(len, sample.files.values())))
    for name, data in sample.files.items():
        if at < len(data):
            return name, at
        at -= len(data)
    raise AssertionError


def _span(data: bytes, random: Random) -> tuple[int, int]:
    start = random.randrange(len(data))
    return start, min(len(data), start + random.choice((1, 1, 2, 4, 8, 16, 64)))


def _flip(data: bytes, random: Random) -> bytes:
    at = random.randrange(len(data))
    return data[:at] + bytes([data[at] ^ random.randrange(1, 256)]) + data[at + 1 :]


def _truncate(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data))]


def _insert(data: bytes, random: Random) -> bytes:
    at, _ = _span(data, random)
    new = random.choice((random.randbytes(random.randrange(1, 9)), b"9" * random.randrange(1, 20), b"\xff" * 8))
    return data[:at] + new + data[at:]


def _delete(data: bytes, random: Random) -> bytes:
    start, end = _span(data, random)
    return data[:start] + data[end:]


def _splice(data: bytes, random: Random) -> bytes:
    start, end = _span(data, random)
    at = random.randrange(len(data))
    return data[:at] + data[start:end] + data[at + end - start :]


def _repeat(data: bytes, random: Random) -> bytes:
    start, end = _span(data, random)
    return data[:end] + data[start:end] * random.randrange(1, 4) + data[end:]


_CHANGES: tuple[Callable[[bytes, Random], bytes], ...] = (_flip, _flip, _truncate, _insert, _delete, _splice, _repeat)


def samples(folder: Path) -> Iterator[Sample]:
    """Make all artifacts, by way of ``folder``."""
    base, tuned = _weights(0), _weights(1)
    start, end = folder / "base.safetensors", folder / "tuned.safetensors"
    ingot.save(start, base, {"note": "a"})
    ingot.save(end, tuned, {"note": "b"})
    (folder / "small.toml").write_text(_RECIPE)
    small = folder / "small.toml"
    for name, file, format, recipe in (
        ("zt", "a.zt", "zt", small),
        ("zt lossless", "b.zt", "zt", "lossless"),
        ("squizd", "a.squizd", "squizd", small),
        ("npydir", "squish", "npydir", "int8"),
        ("mlx", "mlx", "mlx", None),
        ("npy", "plain", "npy", None),
    ):
        ingot.convert(start, folder / file, recipe, format, keep_names=True)
        yield _sample(name, format, folder / file)
    yield _sample("safetensors", "safetensors", start)
    yield from _of_others(folder)
    package = folder / "program.mlpackage"
    for path, data in coreml.sample().files().items():
        (package / path).parent.mkdir(parents=True, exist_ok=True)
        (package / path).write_bytes(data)
    yield _sample("coreml", "coreml", package)
    pack_model(folder / "a.zt", folder / "kernels", "m4")
    yield _sample("anek", "anek", folder / "kernels")
    for name, file, strategy in (
        ("wdelta sparse", "a.wdelta", "sparse"),
        ("wdelta int4", "b.wdelta", "int4"),
        ("zt delta", "delta.zt", "exact"),
        ("sparse patch", "patch.safetensors", "sparse-patch"),
    ):
        ingot.diff(start, end, folder / file, strategy=strategy)
        format = FORMATS.get_or_refuse(file.rpartition(".")[2]).name
        yield _sample(name, format, folder / file, {key: np.asarray(value) for key, value in base.items()})
    yield _delta_of_other_rows(folder)


def _delta_of_other_rows(folder: Path) -> Sample:
    """Make a delta of tensors of other element types and numbers of rows, one of them stored with losses."""
    random = np.random.default_rng(11)
    base = {name: random.normal(0, 0.1, (8, 32)).astype(np.float32) for name in ("grown", "shrunk", "retyped")}
    tuned = {
        "grown": np.concatenate([base["grown"] * np.float32(1.5), base["grown"][:2]]),
        "shrunk": base["shrunk"][:5] * np.float32(1.5),
        "retyped": (base["retyped"] * np.float32(1.5)).astype(np.float16),
    }
    storages = {"grown": Storage("affine", {"bits": 4, "group": 32})}
    ingot.diff(base, tuned, folder / "rows.zt", storages=storages)
    return _sample("zt delta of other rows", "zt", folder / "rows.zt", base)


def _of_others(folder: Path) -> Iterator[Sample]:
    """Make artifacts of other programs' formats: their integers are those of one file."""
    for shape in ((64, 64), (128, 512)):  # the larger one fills the pages of container 2
        values = np.random.default_rng(7).normal(0, 0.1, shape).astype(np.float32)
        held = {"model.layers.0.mlp.up_proj.weight": values, "model.norm.weight": np.ones(6, np.float32)}
        ingot.save(folder / f"{shape[0]}.zt", held)
        ingot.convert(folder / f"{shape[0]}.zt", folder / f"packed{shape[0]}.zt", folder / "small.toml")
    for name in ("gguf", "gptq", "compressed-tensors"):
        path = folder / ("a.gguf" if name == "gguf" else name)
        ingot.convert(folder / "packed64.zt", path, format=name, keep_names=True)
        yield _sample(name, name, path)
    ingot.convert(folder / "packed128.zt", folder / "c.zt", container=2)
    (folder / "c.zt").write_bytes(_closer((folder / "c.zt").read_bytes()))
    yield _sample("zt2", "zt2", folder / "c.zt")
    (folder / "a.onnx").write_bytes(onnx.packed(cols=64, zeros=True).model())
    yield _sample("onnx", "onnx", folder / "a.onnx")
    (folder / "b.onnx").write_bytes(onnx.within(8).model())
    yield _sample("onnx within", "onnx", folder / "b.onnx")


def _closer(data: bytes) -> bytes:
    """Return a file of container 2 with its parts as near to each other as they may be, so that damage hits them."""
    start, size = Footer.unpack(data[-FOOTER:])[:2]
    manifest, made = cbor.loads(data[start : start + size]), MAGIC.ljust(ALIGNMENT, b"\0")
    for part in (part for item in manifest["objects"].values() for part in item["parts"].values()):
        start, size = part["blob"]
        part["blob"][0], made = len(made), made + data[start : start + size].ljust(align(size, ALIGNMENT), b"\0")
    moved = cbor.dumps(manifest, sort=True)
    return made + moved + Footer(len(made), len(moved), checksums.xxh3(moved)).pack()


_RECIPE = """
name = "small"

[[rules]]
label = "matrices, 4 bits"
min_ndim = 2
codec = "affine"
options = { bits = 4, group = 32, symmetric = true, scales = "f16" }
"""


def _weights(seed: int) -> dict[str, Array]:
    """A few matrices and vectors; those of another seed differ in an eighth of the elements."""
    weights: dict[str, Array] = {}
    for number, (name, shape) in enumerate(
        (
            ("model.layers.0.mlp.up_proj.weight", (8, 32)),
            ("model.layers.1.mlp.up_proj.weight", (8, 32)),
            ("model.norm.weight", (6,)),
        )
    ):
        values = np.random.default_rng(number).normal(0, 0.1, shape).astype(np.float32)
        if seed:
            values.reshape(-1)[::8] += 0.25
        weights[name] = values
    return weights


def _sample(name: str, format: str, path: Path, base: Mapping[str, Array] | None = None) -> Sample:
    if path.is_file():
        return Sample(name, format, path.name, {path.name: path.read_bytes()}, base or {})
    files = {file.relative_to(path).as_posix(): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}
    folders = {f"{name.split('/')[0]}/" for name in files if "/" in name}
    entry = FORMATS.get_or_refuse(format).entry(sorted({*(name for name in files if "/" not in name), *folders}))
    assert entry is not None
    return Sample(name, format, entry, files)
