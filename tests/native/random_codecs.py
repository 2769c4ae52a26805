"""Random cases of every codec that stands alone, for `make sanitize`: encode, decode whole and by rows, decode damage.

    python tests/native/random_codecs.py --cases 2000 --seed 1

A case takes a random matrix, element type and options; what is refused with one of Ingot's errors is counted, and the
values of all instruction sets must be the same bits. Prints the cases by codec.
"""

from __future__ import annotations

import argparse
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np

from ingot.codecs.table import CODECS
from ingot.core.numeric.dtypes import numpy_dtype
from ingot.core.runtime import native
from ingot.errors import IngotError, MissingExtraError
from ingot.model.part import Part, memory_part
from ingot.model.tensor import Tensor
from ingot.testing.codecs import bits, encode_tensor, read_rows

Options = dict[str, Any]
ALONE = [name for name in CODECS if name not in ("delta_exact", "sparse_patch")]  # those need a base


def options_of(codec: str, rng: np.random.Generator) -> Options:
    def one(*values: Any) -> Any:
        return values[rng.integers(len(values))]

    affine = {
        "bits": int(rng.integers(1, 9)),
        "group": one(None, 1, 8, 16, 32, 64, 100),
        "symmetric": one(True, False),
        "quantizer": one("absmax", "mse"),
        "bit_order": one("lsb", "msb"),
        "scales": one("f32", "f16", "bf16"),
    }
    chosen: dict[str, Options] = {
        "affine": {key: value for key, value in affine.items() if value is not None and rng.random() < 0.7},
        "palette": {"bits": int(rng.integers(1, 9))},
        "float_entropy": {"level": one("fast", "max"), "chunk": one(1 << 10, 1 << 17)},
        "low_rank": {"rank": int(rng.integers(0, 9)), "factors": one("f32", "f16", "bf16")},
        "with_outliers": {"count": int(rng.integers(1, 4)), "options": {"bits": one(3, 4, 8)}},
        "sparse_mask": {"inner": one("dense", "palette", "affine"), "sparsity": one(0.0, 0.5, 0.9)},
        "delta_int4": {"layout": one(1, 2), "outlier_fraction": one(0.0, 0.01, 0.3)},
        "dense": {"dtype": one("f32", "f16", "bf16")},
    }
    return chosen.get(codec, {}) if rng.random() < 0.9 else {}


def damaged(tensor: Tensor, rng: np.random.Generator) -> Tensor:
    """One part with random bytes changed, and no digest to tell."""
    role = sorted(tensor.parts)[rng.integers(len(tensor.parts))]
    part = tensor.parts[role]
    data = np.frombuffer(bytes(part.view()), np.uint8).copy()
    if data.size:
        places = rng.integers(0, data.size, int(rng.integers(1, 9)))
        data[places] = rng.integers(0, 256, places.size, np.uint8)
    plain: Part = memory_part(data, part.dtype, part.type)
    return replace(tensor, parts={**tensor.parts, role: replace(part, source=plain.source, digest=None)})


def case(name: str, rng: np.random.Generator) -> None:
    codec, delta = CODECS[name], name.startswith("delta_")
    shape = (int(rng.integers(0, 40)), int(rng.choice([0, 1, 3, 7, 8, 31, 64, 129, 1030, 2049])))
    if name == "tca_tbe":
        shape = (shape[0] * 4, shape[1])
    dtype = "f32" if delta else "bf16" if name == "tca_tbe" else str(rng.choice(["f32", "f16", "bf16"]))
    values = rng.normal(0, 10.0 ** rng.integers(-6, 3), shape)
    values[rng.random(shape) < 0.2] = 0
    tensor = encode_tensor(codec, values.astype(numpy_dtype(dtype)), options_of(name, rng), dtype=dtype, cuts=(3, 17))
    target = dtype if codec.lossless else "f32"
    found = set()
    for instructions in native.available_isas():
        native.set_isa(instructions)
        whole = tensor.numpy(target)
        out = np.zeros((shape[0], 2 * shape[1]), whole.dtype)[:, ::2]
        reader = codec.reader(tensor)
        reader.read_into(out)
        reader.finish()
        rows = read_rows(codec, tensor, target, (int(rng.integers(0, 40)),))
        found |= {bits(whole), bits(out), bits(rows)}
        try:
            damaged(tensor, rng).numpy(target)
        except IngotError:
            continue
    assert len(found) == 1, (name, shape, dtype, tensor.params)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    done, refused, absent = Counter[str](), Counter[str](), Counter[str]()
    for index in range(given.cases):
        name, rng = ALONE[index % len(ALONE)], np.random.default_rng((given.seed, index))
        try:
            with np.errstate(all="ignore"):
                case(name, rng)
            done[name] += 1
        except MissingExtraError:
            absent[name] += 1
        except IngotError:
            refused[name] += 1
        except Exception as error:
            raise SystemExit(f"case {index} of seed {given.seed}, {name}: {error!r}") from error
    for name in ALONE:
        print(f"{name:16} {done[name]:5} cases, {refused[name]:4} refused, {absent[name]:4} without its package")


if __name__ == "__main__":
    main()
