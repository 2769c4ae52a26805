"""The table of formats. A new format of Ingot is a folder and a line here.

Extensions and plugins add formats by entry points in the group ``ingot.formats``, and their signs in the group
``ingot.format_signs``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from ingot.core.registry import Instances, Registry
from ingot.formats.base import Format

Sign: TypeAlias = str | tuple[int, bytes]
"""A sign of a format: the end of a file name in lower case (a folder's name ends with a slash), or an offset in a file
and the bytes there. A format with signs is imported only if a file or folder has one of them."""

_SAFETENSORS = (".safetensors", ".safetensors.index.json", (8, b"{"))
_DIALECT = (".safetensors", ".safetensors.index.json")
_PACKAGE = ".mlpackage"  # suffix of a folder; its files identify the format
_TORCH = (".bin", ".pt", ".pth", ".ckpt", ".bin.index.json")

# Each row: a format, its class, and its signs.
_ENTRIES: tuple[tuple[str, str, tuple[Sign, ...]], ...] = (
    ("zt", "ingot.formats.zt.format:ZtFormat", (".zt", (0, b"ZTEN"))),
    ("zt2", "ingot.formats.zt2.format:Zt2Format", (".zt", (0, b"\x89ZT2"))),
    ("safetensors", "ingot.formats.safetensors.format:SafetensorsFormat", _SAFETENSORS),
    ("mlx", "ingot.formats.packed_folders.mlx:MlxFormat", _DIALECT),
    ("gptq", "ingot.formats.packed_folders.gptq:GptqFormat", _DIALECT),
    ("gptq-planes", "ingot.formats.packed_folders.gptq:GptqPlanesFormat", _DIALECT),
    ("awq", "ingot.formats.packed_folders.awq:AwqFormat", _DIALECT),
    ("awq-gemv", "ingot.formats.packed_folders.awq:AwqGemvFormat", _DIALECT),
    ("autoround", "ingot.formats.packed_folders.autoround:AutoRoundFormat", _DIALECT),
    ("compressed-tensors", "ingot.formats.packed_folders.compressed_tensors:CompressedTensorsFormat", _DIALECT),
    ("fp8", "ingot.formats.packed_folders.fp8:Fp8Format", _DIALECT),
    ("mxfp4", "ingot.formats.packed_folders.mxfp4:Mxfp4Format", _DIALECT),
    ("modelopt", "ingot.formats.packed_folders.modelopt:ModelOptFormat", _DIALECT),
    ("bitsandbytes", "ingot.formats.packed_folders.bitsandbytes:BitsandbytesFormat", _DIALECT),
    ("torchao", "ingot.formats.packed_folders.torchao:TorchaoFormat", _DIALECT),
    ("quanto", "ingot.formats.packed_folders.quanto:QuantoFormat", _DIALECT),
    ("hqq", "ingot.formats.packed_folders.hqq:HqqFormat", _DIALECT),
    ("wdelta", "ingot.formats.wdelta.format:WdeltaFormat", (".wdelta", (0, b"wdelta\0"))),
    ("gguf", "ingot.formats.gguf.format:GgufFormat", (".gguf", (0, b"GGUF"))),
    ("onnx", "ingot.formats.onnx.format:OnnxFormat", (".onnx",)),
    ("torch", "ingot.formats.torch.format:TorchFormat", _TORCH),
    ("coreml", "ingot.formats.coreml.format:CoremlFormat", ("manifest.json",)),
)


class Formats(Instances[Format]):
    """The formats by name. A format with signs is imported only if a file or folder has one of them.

    Formats of plugins come last. Detection of a file reaches them only if no format of Ingot claims the file.
    """

    def of_file(self, name: str, head: bytes) -> Iterator[Format]:
        """Yield the formats that may apply to a file with this name and beginning."""
        yield from self._with_sign([name], head)

    def of_folder(self, names: Sequence[str]) -> Iterator[Format]:
        """Yield the formats that may apply to a folder with files of these names."""
        yield from self._with_sign(names, b"")

    def of_plugins(self) -> Iterator[Format]:
        """Yield the formats of plugins."""
        yield from (format for _, format in self.available_plugins())

    def endings(self) -> tuple[str, ...]:
        """Return the suffixes, in lower case, of files and folders with weights, except ``.npy``.

        It imports no format with signs. Arrays (``.npy``) next to a checkpoint are seldom weights.
        """
        signs = {sign for key in self._targets for sign in _signs_of(key) or () if isinstance(sign, str)}
        added = [self[key] for key in self._targets if _signs_of(key) is None]
        added += self.of_plugins()
        suffixes = {suffix for format in added for suffix in format.suffixes}
        extensions = {sign for sign in signs if sign.startswith(".")}
        return tuple(sorted((extensions | suffixes | {_PACKAGE}) - {".npy"}))

    def _with_sign(self, names: Sequence[str], head: bytes) -> Iterator[Format]:
        lower = [name.lower() for name in names]
        for key in self._targets:
            signs = _signs_of(key)
            if signs is None or any(_is_present(sign, lower, head) for sign in signs):
                yield self[key]
        yield from self.of_plugins()


def _is_present(sign: Sign, names: Sequence[str], head: bytes) -> bool:
    if isinstance(sign, str):
        return any(name.endswith(sign) for name in names)
    return head.startswith(sign[1], sign[0])


def _signs_of(name: str) -> tuple[Sign, ...] | None:
    """Return the signs of a format; None if it has registered none."""
    signs = _SIGNS.get(name)
    return _EXTENSION_SIGNS[name] if signs is None and name in _EXTENSION_SIGNS else signs


FORMATS = Formats(
    "format",
    tuple((name, path) for name, path, _ in _ENTRIES),
    group="ingot.formats",
    contract=Format,
    identifier="name",
)
_SIGNS = {name: signs for name, _, signs in _ENTRIES}
_EXTENSION_SIGNS: Registry[tuple[Sign, ...]] = Registry("sign", group="ingot.format_signs")
