"""Fuzzes folders that other programs packed: any files open, list and decode, or end in an IngotError.

    pip install --group fuzz
    python -m tests.fuzz.fuzz_dialects -max_total_time=600

The golden folders are the seeds, and folders that Ingot writes of the dialects without one; findings are written to the
current folder as crash-*. A finding is replayed by ``python -m tests.fuzz.fuzz_dialects crash-...``. By its first byte
an input is a folder's files as they are, or a series of choices that change keys of the configuration, and names,
types, shapes and bytes of the entries of a well-formed folder: sizes are put right then, else nothing behind the reader
of safetensors is reached.
"""

from __future__ import annotations

import gc
import json
import struct
import sys
import tempfile
from copy import deepcopy
from math import prod
from pathlib import Path
from types import FunctionType
from typing import Any

import atheris
import numpy as np

import ingot
from ingot.artifacts.open import open_source_in_store
from ingot.core.numeric.dtypes import BY_SAFETENSORS
from ingot.errors import IngotError
from ingot.stores.memory import MemoryStore
from tests.support.reading import checked, read_all

GOLDEN = Path(__file__).parent.parent / "golden"
FAMILIES = ("gptq_awq", "compressed_tensors", "small_floats", "torch_packages")
MODEL, CONFIG = "model.safetensors", "config.json"
WRITTEN = {
    "gptq": ("affine", 'bits = 4, group = 32, symmetric = false, scales = "f16"'),
    "awq": ("affine", 'bits = 4, group = 32, symmetric = false, scales = "f16"'),
    "mlx": ("affine", 'bits = 4, group = 32, zero_kind = "offset", symmetric = false, scales = "f16"'),
    "fp8": ("scaled_codebook", 'table = "f8_e4m3fn", group = [128, 128]'),
    "modelopt": ("scaled_codebook", 'table = "f4_e2m1fn", group = 16, scales = "f8_e4m3fn", second = "multiply"'),
    "bitsandbytes": ("scaled_codebook", 'table = "nf4", group = 64, flat = true, order = "high_first"'),
}
ROUND = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int"}
ROUND |= {"extra_config": {"lm_head": {"bits": 16}, ".*up.*": {"bits": 4, "sym": False}}, "dynamic": None}
QUANTIZATION = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8"}
OTHERWISE: list[tuple[str, dict[str, Any], str]] = [
    ("gptq", {**ROUND, "packing_format": "auto_round"}, ""),
    ("gptq", {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "format": "gptq", "dynamic": {}}, ""),
    ("gptq", {"bits": 4, "group_size": 32, "desc_act": False, "sym": False}, "quantize_config.json"),
    ("awq", {**ROUND, "packing_format": "auto_round:auto_awq"}, ""),
    ("awq", {"w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM"}, "quant_config.json"),
    (
        "fp8",
        {**ROUND, "packing_format": "auto_round:fp8", "data_type": "fp", "sym": True, "group_size": [128, 128]},
        "",
    ),
    ("modelopt", {"producer": {"name": "modelopt"}, "quantization": QUANTIZATION}, "hf_quant_config.json"),
]
"""Folders that other programs describe otherwise: what is written, the description, and the file that it stands in."""
NUMBERS = [0, 1, 2, 3, 4, 5, 6, 7, 8, 15, 16, 31, 32, 33, 64, 128, 256, 2**16, 2**31, 2**32, 2**62, 2**63, 2**64]
VALUES: list[Any] = [*NUMBERS, -1, True, False, None, "", [], {}, [4], [128, 128], [0, 0], 1.5, float("nan"), "x" * 99]
VALUES += ["gptq", "gptq_v2", "gptq_p", "gemm", "gemv", "pack-quantized", "nvfp4-pack-quantized", "float-quantized"]
VALUES += ["mxfp4-pack-quantized", "marlin-24", "NVFP4", "FP8", "W4A16_AWQ", "MIXED_PRECISION", "channel", "tensor"]
VALUES += ["group", "block", "int", "float", "bf16", "bfloat16", "float8_e4m3fn", "qint4", "qint8", "ue8m0", "mxfp4"]
VALUES += ["auto-round", "auto_round:auto_gptq", "auto_round", "auto_round:llm_compressor", "mx_fp", "nv_fp", "fp"]
VALUES += [{"bits": 8, "sym": True}, {"num_bits": 4, "type": "float", "group_size": 32}, ["Linear"], {"x": {"x": [{}]}}]
MOST = 1 << 16


class Folder:
    """The files of a folder, its safetensors taken apart."""

    def __init__(self, path: Path) -> None:
        held = {file.name: file.read_bytes() for file in path.iterdir() if file.name != "expected.safetensors"}
        self.model = held.pop(MODEL)
        self.config: dict[str, Any] = json.loads(held.pop(CONFIG))
        self.beside = held
        size = struct.unpack_from("<Q", self.model)[0]
        header = json.loads(self.model[8 : 8 + size])
        self.metadata: dict[str, Any] = header.pop("__metadata__", {})
        self.entries: dict[str, tuple[str, list[int], bytes]] = {}
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            self.entries[name] = entry["dtype"], entry["shape"], self.model[8 + size :][first:last]


def folders() -> list[Folder]:
    """Every golden folder that is small, and one of each dialect that Ingot writes and no golden folder is of."""
    paths = sorted(path.parent for family in FAMILIES for path in (GOLDEN / family).glob(f"*/{CONFIG}"))
    found = [Folder(path) for path in paths if (path / MODEL).stat().st_size <= MOST]
    with tempfile.TemporaryDirectory() as name:
        for format, (codec, options) in WRITTEN.items():
            found.append(Folder(written(Path(name), format, f'codec = "{codec}"\noptions = {{ {options} }}')))
        found.append(Folder(experts(Path(name) / "mxfp4")))
        found += [described(Path(name) / format, config, file) for format, config, file in OTHERWISE]
    return found


def described(path: Path, config: dict[str, Any], file: str) -> Folder:
    """A folder that was written, under the description of another program: in ``config.json``, or a file beside it."""
    folder = Folder(path)
    folder.config.pop("quantization_config", None)
    if file:
        folder.beside[file] = json.dumps(config).encode()
    else:
        folder.config["quantization_config"] = config
    return folder


def written(place: Path, format: str, rule: str) -> Path:
    values = np.random.default_rng(1).standard_normal((64, 128)).astype(np.float16)
    ingot.save(place / f"{format}.safetensors", {"model.layers.0.mlp.up_proj.weight": values, "norm": values[0]})
    (place / "r.toml").write_text(
        f'name = "r"\ndescription = "r"\n[[rules]]\nlabel = "r"\nmatch = ["*_proj*"]\n{rule}\n'
    )
    ingot.convert(place / f"{format}.safetensors", place / f"{format}.zt", place / "r.toml")
    report = ingot.convert(place / f"{format}.zt", place / format, format=format, keep_names=True)
    if "decoded" in report.actions:
        raise AssertionError(f"expected packed layers of {format}, found {report.actions}")
    return place / format


def experts(place: Path) -> Path:
    """A stack of two experts as gpt-oss has them."""
    rng, stem = np.random.default_rng(2), "model.layers.0.mlp.experts.down_proj"
    place.mkdir()
    blocks = {f"{stem}_blocks": rng.integers(0, 256, (2, 32, 2, 16), np.uint8)}
    ingot.save(place / MODEL, {**blocks, f"{stem}_scales": rng.integers(100, 126, (2, 32, 2), np.uint8)})
    (place / CONFIG).write_text('{"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}')
    return place


FOLDERS = folders()


def chosen(data: atheris.FuzzedDataProvider) -> dict[str, bytes]:
    """The files of a folder in which a few things are others."""
    folder = FOLDERS[data.ConsumeIntInRange(0, len(FOLDERS) - 1)]
    beside = {name: json.loads(content) for name, content in folder.beside.items() if name.endswith(".json")}
    stated: dict[str, Any] = json.loads(json.dumps({CONFIG: folder.config, **beside}))
    entries, metadata = dict(folder.entries), dict(folder.metadata)
    for _ in range(data.ConsumeIntInRange(1, 4)):
        kind = data.ConsumeIntInRange(0, 9)
        if kind < 4:
            change_value(data, stated)
        elif kind == 4 and metadata:
            change_text(data, metadata)
        else:
            change_entry(data, entries)
    files = {name: json.dumps(value).encode() for name, value in stated.items()}
    return {MODEL: safetensors(entries, metadata), **files}


def change_value(data: atheris.FuzzedDataProvider, node: Any) -> None:
    """Replace, add or take away something somewhere in JSON."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = data.PickValueInList(keys)
        inner = node[key]
        if isinstance(inner, dict | list) and inner and data.ConsumeIntInRange(0, 7):
            node = inner
            continue
        how = data.ConsumeIntInRange(0, 7)
        if how == 0 and isinstance(node, dict):
            del node[key]
        elif how == 1:
            node[key] = data.ConsumeUnicodeNoSurrogates(12)
        else:
            node[key] = deepcopy(data.PickValueInList(VALUES))
        return


def change_text(data: atheris.FuzzedDataProvider, metadata: dict[str, Any]) -> None:
    """Change JSON within text of the metadata, as torchao has it there, or the text."""
    key = data.PickValueInList(sorted(metadata))
    try:
        inner = json.loads(metadata[key])
        if isinstance(inner, dict | list):
            change_value(data, inner)
        metadata[key] = json.dumps(inner)
    except ValueError:
        metadata[key] = data.ConsumeUnicodeNoSurrogates(20)


def change_entry(data: atheris.FuzzedDataProvider, entries: dict[str, tuple[str, list[int], bytes]]) -> None:
    if not entries:
        return
    name = data.PickValueInList(list(entries))
    dtype, shape, content = entries[name]
    match data.ConsumeIntInRange(0, 6):
        case 0:
            del entries[name]
        case 1:
            entries[name] = data.PickValueInList(sorted(BY_SAFETENSORS)), shape, content
        case 2 if shape:
            at = data.ConsumeIntInRange(0, len(shape) - 1)
            entries[name] = dtype, [*shape[:at], data.ConsumeIntInRange(0, 300), *shape[at + 1 :]], content
        case 3:
            shapes = [[], [0], [1], [1, 1], shape[::-1], shape[1:], [*shape, 1], [1, *shape]]
            entries[name] = dtype, data.PickValueInList(shapes), content
        case 4:
            other = data.PickValueInList(list(entries))
            entries[name], entries[other] = entries[other], entries[name]
        case 5:
            stem, dot, _ = name.rpartition(".")
            suffixes = sorted({other.rpartition(".")[2] for other in entries})
            entries[f"{stem}{dot}{data.PickValueInList(suffixes)}"] = entries.pop(name)
        case _ if content:
            made, at = bytearray(content), data.ConsumeIntInRange(0, len(content) - 1)
            piece = data.ConsumeBytes(8) or b"\xff"
            made[at : at + len(piece)] = piece
            entries[name] = dtype, shape, bytes(made[: len(content)])


def safetensors(entries: dict[str, tuple[str, list[int], bytes]], metadata: dict[str, Any]) -> bytes:
    """Return a well-formed file: contents are cut, or repeated, to what types and shapes want."""
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    held, at = [], 0
    for name, (dtype, shape, content) in entries.items():
        size = min(prod(shape) * BY_SAFETENSORS[dtype].bits // 8, 1 << 20)
        filled = (content or b"\0") * (size // max(len(content), 1) + 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        held.append(filled[:size])
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + b"".join(held)


def as_they_are(data: bytes) -> dict[str, bytes]:
    """The length of config.json in two bytes, config.json, and the rest is the safetensors file."""
    size = int.from_bytes(data[:2], "little")
    return {CONFIG: data[2 : 2 + size], MODEL: data[2 + size :]}


def one_input(data: bytes) -> None:
    """What the fuzzer calls."""
    files = as_they_are(data[1:]) if data[:1] >= b"\x80" else chosen(atheris.FuzzedDataProvider(data[1:]))
    try:
        source = open_source_in_store(MemoryStore(files), "")
        read_all(source.catalog)
    except IngotError as error:
        checked(error)


def instrument() -> None:
    """Let the fuzzer see which branches run.

    ``atheris.instrument_imports`` sees nothing through the import hook of an editable install, so functions are taken
    one by one.
    """
    for path in (Path(ingot.__file__).parent / "formats" / "packed_folders").glob("[a-z]*.py"):
        __import__(f"ingot.formats.packed_folders.{path.stem}")
    for function in [item for item in gc.get_objects() if isinstance(item, FunctionType)]:
        if (function.__module__ or "").startswith("ingot.") and ".testing." not in function.__module__:
            atheris.instrument_func(function)


def seeds(place: Path) -> None:
    for index, folder in enumerate(FOLDERS):
        config = json.dumps(folder.config).encode()
        (place / f"{index}-files").write_bytes(b"\xff" + len(config).to_bytes(2, "little") + config + folder.model)
    for index in range(128):
        (place / f"{index}-choices").write_bytes(b"\0" + bytes((index * 37 + 11 * i) % 256 for i in range(48)))


def main() -> None:
    instrument()
    with tempfile.TemporaryDirectory() as name:
        seeds(Path(name))
        replayed = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
        atheris.Setup([*sys.argv, *([] if replayed else [name]), "-max_len=32768"], one_input)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
