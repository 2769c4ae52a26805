"""The one table of formats. A new format of Ingot is a folder and a line here.

Plugins add formats by entry points in the group ``ingot.formats``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ingot.core.registry import Instances
from ingot.formats.base import Format

_SAFETENSORS = (".safetensors", ".safetensors.index.json", (8, b"{"))
_DIALECT = (".safetensors", ".safetensors.index.json")
_PACKAGE = ".mlpackage"  # the end of a folder's name, in which a file is a sign
_ARRAY = ".npy"  # may be weights, and may be anything that lies beside them
_TORCH = (".bin", ".pt", ".pth", ".ckpt", ".bin.index.json")

# A format, where it is, and the signs without which it claims no file and no folder: the end of a name (in small
# letters), or where in a file which bytes are. Only formats that one of the signs speaks for are imported and asked.
_ENTRIES: tuple[tuple[str, str, tuple[str | tuple[int, bytes], ...]], ...] = (
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
    ("squizd", "ingot.ext.squizd.format:SquizdFormat", (".squizd", (0, b"SQZD"))),
    ("wdelta", "ingot.formats.wdelta.format:WdeltaFormat", (".wdelta", (0, b"wdelta\0"))),
    ("npydir", "ingot.ext.squish.npydir.format:NpydirFormat", ("manifest.json",)),
    ("npy", "ingot.ext.squish.npydir.finalized:NpyFormat", (".npy",)),
    ("npz", "ingot.ext.squish.npydir.npz:NpzFormat", (".npz",)),
    ("gguf", "ingot.formats.gguf.format:GgufFormat", (".gguf", (0, b"GGUF"))),
    ("onnx", "ingot.formats.onnx.format:OnnxFormat", (".onnx",)),
    ("torch", "ingot.formats.torch.format:TorchFormat", _TORCH),
    ("coreml", "ingot.formats.coreml.format:CoremlFormat", ("manifest.json",)),
    ("anek", "ingot.ext.ane.kernel_units.format:AnekFormat", (".anek", "kernels.json", (0, b"ANEKUNIT"))),
)


class Formats(Instances[Format]):
    """The formats by name. A format of Ingot is imported if a sign speaks for it; the others have no signs.

    Formats of plugins come last. Detection of a file reaches them only if no format of Ingot claims the file.
    """

    def of_file(self, name: str, head: bytes) -> Iterator[Format]:
        """Yield the formats that a file with this name and beginning may have."""
        yield from self._of([name], head)

    def of_folder(self, names: Sequence[str]) -> Iterator[Format]:
        """Yield the formats that a folder with files of these names may be of."""
        yield from self._of(names, b"")

    def of_plugins(self) -> Iterator[Format]:
        """Yield the formats of plugins."""
        yield from (format for _, format in self.available_plugins())

    def endings(self) -> tuple[str, ...]:
        """Return the ends of names, in small letters, of files and folders with weights; imports no format that is
        listed here."""
        signs = {sign for _, _, signs in _ENTRIES for sign in signs if isinstance(sign, str) and sign.startswith(".")}
        added = [self[key] for key in self._targets if key not in _SIGNS]
        added += self.of_plugins()
        suffixes = {suffix for format in added for suffix in format.suffixes}
        return tuple(sorted((signs | suffixes | {_PACKAGE}) - {_ARRAY}))

    def _of(self, names: Sequence[str], head: bytes) -> Iterator[Format]:
        lower = [name.lower() for name in names]
        for key in self._targets:
            signs = _SIGNS.get(key, ("",))
            ends = tuple(sign for sign in signs if isinstance(sign, str))
            starts = [sign for sign in signs if not isinstance(sign, str)]
            if any(name.endswith(ends) for name in lower) or any(head.startswith(sign, at) for at, sign in starts):
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
