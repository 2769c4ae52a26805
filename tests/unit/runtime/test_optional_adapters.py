"""MLX and JAX where they are installed; what is said where they are not."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from ingot.core.border import require
from ingot.core.numeric.dtypes import DTYPES, numpy_dtype
from ingot.errors import MissingExtraError, UnsupportedError, UsageError
from ingot.model.tensor import FRAMEWORKS

WHOLE = tuple(row.name for row in DTYPES.values() if row.bits >= 8)


@pytest.mark.parametrize(("framework", "module"), [("mlx", "mlx"), ("jax", "jax"), ("pt", "torch")])
def test_a_missing_package_names_the_extra(monkeypatch, framework, module):
    for name in [module, *(name for name in sys.modules if name.startswith(module + "."))]:
        monkeypatch.setitem(sys.modules, name, None)
    from ingot.codecs.table import CODECS
    from ingot.model.part import memory_part
    from ingot.model.tensor import Tensor

    tensor = Tensor(
        "x", (2,), "f32", "dense", {"data": memory_part(np.ones(2, np.float32), "f32")}, decoder=CODECS["dense"]
    )
    with pytest.raises(MissingExtraError) as caught:
        tensor.to(framework)
    assert f"'ingot[{module}]'" in str(caught.value)


def test_a_package_that_is_broken_inside_says_so_itself(monkeypatch, tmp_path):
    (tmp_path / "half_there.py").write_text("import no_such_package_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError) as caught:
        require("half_there", "x")
    assert not isinstance(caught.value, MissingExtraError)


@pytest.mark.parametrize("dtype", WHOLE)
def test_mlx_keeps_the_bits_or_refuses(dtype):
    mx = pytest.importorskip("mlx.core")
    array = np.arange(1, 7).astype(numpy_dtype(dtype)).reshape(2, 3)
    convert = FRAMEWORKS["mlx"]
    if (DTYPES[dtype].bits == 8 and DTYPES[dtype].is_float) or dtype == "complex128":
        with pytest.raises(UnsupportedError):
            convert(array)
        return
    made = convert(array, "cpu")
    back = np.array(made.view(mx.uint16)).view(array.dtype) if dtype == "bf16" else np.array(made)
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


def test_mlx_knows_two_devices():
    pytest.importorskip("mlx.core")
    with pytest.raises(UsageError):
        FRAMEWORKS["mlx"](np.ones(2, np.float32), "tpu")


@pytest.mark.parametrize("dtype", WHOLE)
def test_jax_keeps_the_bits_or_refuses(dtype):
    jax = pytest.importorskip("jax")
    array = np.arange(1, 7).astype(numpy_dtype(dtype)).reshape(2, 3)
    unknown = dtype == "f8_e8m0fnu" and not hasattr(jax.numpy, "float8_e8m0fnu")  # to old releases
    if unknown or jax.dtypes.canonicalize_dtype(array.dtype) != array.dtype:
        with pytest.raises(UnsupportedError) as caught:
            FRAMEWORKS["jax"](array)
        assert caught.value.rule == "adapter.dtype"
        return
    back = np.asarray(FRAMEWORKS["jax"](array, "cpu"))
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())
