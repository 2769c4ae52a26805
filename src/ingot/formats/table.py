"""The one table of formats. A new format is a folder and a line here."""

from __future__ import annotations

from ingot.core.registry import Instances
from ingot.formats.base import Format

FORMATS: Instances[Format] = Instances(
    "format",
    (
        ("zt", "ingot.formats.zt.format:ZtFormat"),
        ("zt2", "ingot.formats.zt2.format:Zt2Format"),
        ("safetensors", "ingot.formats.safetensors.format:SafetensorsFormat"),
        ("mlx", "ingot.formats.dialects.mlx:MlxFormat"),
        ("gptq", "ingot.formats.dialects.gptq:GptqFormat"),
        ("awq", "ingot.formats.dialects.awq:AwqFormat"),
        ("compressed-tensors", "ingot.formats.dialects.compressed_tensors:CompressedTensorsFormat"),
        ("fp8", "ingot.formats.dialects.fp8:Fp8Format"),
        ("mxfp4", "ingot.formats.dialects.mxfp4:Mxfp4Format"),
        ("modelopt", "ingot.formats.dialects.modelopt:ModelOptFormat"),
        ("bitsandbytes", "ingot.formats.dialects.bitsandbytes:BitsandbytesFormat"),
        ("torchao", "ingot.formats.dialects.torchao:TorchaoFormat"),
        ("quanto", "ingot.formats.dialects.quanto:QuantoFormat"),
        ("squizd", "ingot.formats.squizd.format:SquizdFormat"),
        ("wdelta", "ingot.formats.wdelta.format:WdeltaFormat"),
        ("npydir", "ingot.formats.npydir.format:NpydirFormat"),
        ("npy", "ingot.formats.npydir.finalized:NpyFormat"),
        ("npz", "ingot.formats.npydir.npz:NpzFormat"),
        ("gguf", "ingot.formats.gguf.format:GgufFormat"),
        ("onnx", "ingot.formats.onnx.format:OnnxFormat"),
        ("torch", "ingot.formats.torchfile.format:TorchFormat"),
        ("coreml", "ingot.formats.coreml.format:CoremlFormat"),
        ("anek", "ingot.formats.anek.format:AnekFormat"),
    ),
)
