"""A package of one linear or convolution layer, without values: a template for a weight."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ingot.formats.coreml.build import FP16, OPSETS, Builder, Feature, Interface
from ingot.formats.coreml.template import Template

__all__ = ["BIAS", "OPSETS", "WEIGHT", "Layer", "layer_template"]

WEIGHT = "weight"
BIAS = "bias"


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear or convolution layer for which a package is built.

    Parameters
    ----------
    shape : tuple of int
        Shape of the weight: [out, in] for a linear layer, [out, in, size, ...] with one or two sizes for a convolution.
    bias : bool
        Whether a bias of [out] is added.
    opset : {"iOS16", "iOS17", "iOS18"}
    spatial : tuple of int
        Sizes of a convolution's input except batch (1) and channels.
    """

    shape: tuple[int, ...]
    bias: bool
    opset: str
    spatial: tuple[int, ...] = ()

    @property
    def input(self) -> tuple[int, ...]:
        """Shape of the input ``x``."""
        return (1, self.shape[1], *self.spatial)

    @property
    def output(self) -> tuple[int, ...]:
        """Shape of the output ``y``: no padding, stride 1."""
        sizes = (size - kernel + 1 for size, kernel in zip(self.spatial, self.shape[2:], strict=True))
        return (1, self.shape[0], *sizes)


def layer_template(layer: Layer) -> Template:
    """Return the package of a layer whose weight and bias are dense fp16 constants with undefined values."""
    builder = Builder(layer.opset)
    inputs = {"x": "x", WEIGHT: builder.weight(WEIGHT, layer.shape)}
    if layer.bias:
        inputs[BIAS] = builder.weight(BIAS, layer.shape[:1])
    if len(layer.shape) > 2:
        inputs |= _settings(layer, builder)
    builder.add("linear" if len(layer.shape) == 2 else "conv", "y", inputs, layer.output)
    return builder.template(Interface([Feature("x", FP16, layer.input)], [Feature("y", FP16, layer.output)]))


def _settings(layer: Layer, builder: Builder) -> dict[str, str]:
    """Add the constants that a convolution needs besides its weight, and return the inputs bound to them."""
    rank = len(layer.spatial)
    numbers = {"strides": [1] * rank, "pad": [0] * (2 * rank), "dilations": [1] * rank}
    bound = {key: builder.constant(f"y_{key}", np.array(values, np.int32)) for key, values in numbers.items()}
    bound["groups"] = builder.constant("y_groups", np.int32(1))
    return {**bound, "pad_type": builder.text("y_pad_type", "valid")}
