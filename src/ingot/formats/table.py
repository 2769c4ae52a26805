"""The table of formats. A new format of Ingot is a folder and a line here.

Plugins add formats by entry points in the group ``ingot.formats``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ingot.core.registry import Instances
from ingot.formats.base import Format

_SAFETENSORS = (".safetensors", ".safetensors.index.json", (8, b"{"))
_DIALECT = (".safetensors", ".safetensors.index.json")
_PACKAGE = ".mlpackage"  # suffix of a folder; its files identify the format
_ARRAY = ".npy"  # may be weights or any other data
_TORCH = (".bin", ".pt", ".pth", ".ckpt", ".bin.index.json")

# Each row: a format, its class, and its signs. A sign is a suffix (lower case), or magic bytes and their offset. A
# format is imported only if a sign matches.
_ENTRIES: tuple[tuple[str, str, tuple[str | tuple[int, bytes], ...]], ...] = (
    ("zt", "ingot.formats.zt.format:ZtFormat", (".zt", (0, b"ZTEN"))),
    ("zt2", "ingot.formats.zt2.format:Zt2Format", (".zt", (0, b"\x89ZT2"))),
    ("safetensors", "ingot.formats.safetensors.format:SafetensorsFormat", _SAFETENSORS),
    ("mlx", "ingot.formats.dialects.mlx:MlxFormat", _DIALECT),
    ("gptq", "ingot.formats.dialects.gptq:GptqFormat", _DIALECT),
    ("gptq-planes", "ingot.formats.dialects.gptq:GptqPlanesFormat", _DIALECT),
    ("awq", "ingot.formats.dialects.awq:AwqFormat", _DIALECT),
    ("awq-gemv", "ingot.formats.dialects.awq:AwqGemvFormat", _DIALECT),
    ("autoround", "ingot.formats.dialects.autoround:AutoRoundFormat", _DIALECT),
    ("compressed-tensors", "ingot.formats.dialects.compressed_tensors:CompressedTensorsFormat", _DIALECT),
    ("fp8", "ingot.formats.dialects.fp8:Fp8Format", _DIALECT),
    ("mxfp4", "ingot.formats.dialects.mxfp4:Mxfp4Format", _DIALECT),
    ("modelopt", "ingot.formats.dialects.modelopt:ModelOptFormat", _DIALECT),
    ("bitsandbytes", "ingot.formats.dialects.bitsandbytes:BitsandbytesFormat", _DIALECT),
    ("torchao", "ingot.formats.dialects.torchao:TorchaoFormat", _DIALECT),
    ("quanto", "ingot.formats.dialects.quanto:QuantoFormat", _DIALECT),
    ("hqq", "ingot.formats.dialects.hqq:HqqFormat", _DIALECT),
    ("squizd", "ingot.formats.squizd.format:SquizdFormat", (".squizd", (0, b"SQZD"))),
    ("wdelta", "ingot.formats.wdelta.format:WdeltaFormat", (".wdelta", (0, b"wdelta\0"))),
    ("npydir", "ingot.formats.npydir.format:NpydirFormat", ("manifest.json",)),
    ("npy", "ingot.formats.npydir.finalized:NpyFormat", (".npy",)),
    ("npz", "ingot.formats.npydir.npz:NpzFormat", (".npz",)),
    ("gguf", "ingot.formats.gguf.format:GgufFormat", (".gguf", (0, b"GGUF"))),
    ("onnx", "ingot.formats.onnx.format:OnnxFormat", (".onnx",)),
    ("torch", "ingot.formats.torchfile.format:TorchFormat", _TORCH),
    ("coreml", "ingot.formats.coreml.format:CoremlFormat", ("manifest.json",)),
    ("anek", "ingot.formats.anek.format:AnekFormat", (".anek", "kernels.json", (0, b"ANEKUNIT"))),
)


class Formats(Instances[Format]):
    """The formats by name. A format of Ingot is imported only if a sign matches; formats of plugins have no signs.

    Formats of plugins come last. Detection of a file reaches them only if no format of Ingot claims the file.
    """

    def of_file(self, name: str, head: bytes) -> Iterator[Format]:
        """Yield the formats that may apply to a file with this name and beginning."""
        yield from self._candidates([name], head)

    def of_folder(self, names: Sequence[str]) -> Iterator[Format]:
        """Yield the formats that may apply to a folder with files of these names."""
        yield from self._candidates(names, b"")

    def of_plugins(self) -> Iterator[Format]:
        """Yield the formats of plugins."""
        yield from (format for _, format in self.available_plugins())

    def endings(self) -> tuple[str, ...]:
        """Return the suffixes, in lower case, of files and folders with weights.

        Does not import the formats that are listed here.
        """
        signs = {sign for _, _, signs in _ENTRIES for sign in signs if isinstance(sign, str) and sign.startswith(".")}
        added = [self[key] for key in self._targets if key not in _SIGNS]
        added += self.of_plugins()
        suffixes = {suffix for format in added for suffix in format.suffixes}
        return tuple(sorted((signs | suffixes | {_PACKAGE}) - {_ARRAY}))

    def _candidates(self, names: Sequence[str], head: bytes) -> Iterator[Format]:
        lower = [name.lower() for name in names]
        for key in self._targets:
            signs = _SIGNS.get(key, ("",))
            ends = tuple(sign for sign in signs if isinstance(sign, str))
            starts = [sign for sign in signs if not isinstance(sign, str)]
            if any(name.endswith(ends) for name in lower) or any(
                head.startswith(sign, offset) for offset, sign in starts
            ):
                yield self[key]
        yield from self.of_plugins()


FORMATS = Formats(
    "format",
    tuple((name, path) for name, path, _ in _ENTRIES),
    group="ingot.formats",
    contract=Format,
    identifier="name",
)
_SIGNS = {name: signs for name, _, signs in _ENTRIES}
