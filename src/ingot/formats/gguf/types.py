"""The numbers of types in GGUF files, for metadata values and for tensors (``ggml.h``, ``gguf.h``)."""

from __future__ import annotations

from collections.abc import Mapping

VALUES: Mapping[int, str] = {
    0: "u8",
    1: "i8",
    2: "u16",
    3: "i16",
    4: "u32",
    5: "i32",
    6: "f32",
    7: "bool",
    8: "string",
    9: "array",
    10: "u64",
    11: "i64",
    12: "f64",
}

DENSE: Mapping[int, str] = {0: "f32", 1: "f16", 24: "i8", 25: "i16", 26: "i32", 27: "i64", 28: "f64", 30: "bf16"}

BLOCKED: Mapping[int, str] = {
    2: "q4_0",
    3: "q4_1",
    6: "q5_0",
    7: "q5_1",
    8: "q8_0",
    10: "q2_k",
    11: "q3_k",
    12: "q4_k",
    13: "q5_k",
    14: "q6_k",
    16: "iq2_xxs",
    17: "iq2_xs",
    18: "iq3_xxs",
    19: "iq1_s",
    20: "iq4_nl",
    21: "iq3_s",
    22: "iq2_s",
    23: "iq4_xs",
    29: "iq1_m",
    34: "tq1_0",
    35: "tq2_0",
    39: "mxfp4",
    40: "nvfp4",
    41: "q1_0",
    42: "q2_0",
}

FILE_TYPES: Mapping[int, str] = {
    0: "f32",
    1: "f16",
    2: "q4_0",
    3: "q4_1",
    7: "q8_0",
    8: "q5_0",
    9: "q5_1",
    12: "q3_k",
    11: "q3_k",
    13: "q3_k",
    15: "q4_k",
    14: "q4_k",
    17: "q5_k",
    16: "q5_k",
    18: "q6_k",
    10: "q2_k",
    21: "q2_k",
    19: "iq2_xxs",
    20: "iq2_xs",
    23: "iq3_xxs",
    24: "iq1_s",
    25: "iq4_nl",
    26: "iq3_s",
    27: "iq3_s",
    28: "iq2_s",
    29: "iq2_s",
    30: "iq4_xs",
    31: "iq1_m",
    32: "bf16",
    36: "tq1_0",
    37: "tq2_0",
    38: "mxfp4",
    39: "nvfp4",
    40: "q1_0",
    41: "q2_0",
}
"""The main tensor type of each ``general.file_type``.

If several numbers have the same type, the most common number comes first.
"""
