"""Headers from an enemy: each one refused by its rule, and the quick way never differs from the strict one."""

from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.core.dtypes import BY_SAFETENSORS
from ingot.errors import FormatError, IngotError
from ingot.formats.safetensors import header as module
from ingot.formats.safetensors.format import SafetensorsFormat
from ingot.formats.safetensors.header import Entry, encode, parse, strict_json
from ingot.stores.memory import MemoryStore

GOOD = {
    "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
    "b": {"dtype": "U8", "shape": [], "data_offsets": [8, 9]},
}


def rule_of(data: bytes, length: int = 9) -> str:
    with pytest.raises(FormatError) as caught:
        parse(data, length, "x")
    assert caught.value.rule
    return caught.value.rule


def changed(tensor: str, field: str, value: object) -> bytes:
    return json.dumps({**GOOD, tensor: {**GOOD[tensor], field: value}}).encode()


def test_the_good_one_is_good():
    assert list(parse(json.dumps(GOOD).encode(), 9, "x").entries) == ["a", "b"]


@pytest.mark.parametrize("text", ["", " {}", "[]", "null", '"{}"', "\ufeff{}", "\n{}", "1"])
def test_it_begins_with_a_brace(text):
    assert rule_of(text.encode(), 0) == "safetensors.header-start"


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}}",
        "{} x",
        "{}{}",
        "{'a':1}",
        '{"a":}',
        '{"a":{"dtype":"F32","shape":[01],"data_offsets":[0,4]}}',
        "{\x00}",
        '{"\\ud800":{}}',
        '{"a\nb":{}}',
    ],
)
def test_broken_json(text):
    assert rule_of(text.encode(), 0) in ("safetensors.json", "safetensors.fields")


@pytest.mark.parametrize("data", [b'{"a\xff":{}}', b'{"a":{"dtype":"\xc3\x28"}}', b'{"\xed\xa0\x80":{}}'])
def test_broken_utf8(data):
    assert rule_of(data, 0) == "safetensors.utf8"


@pytest.mark.parametrize("value", [None, 1, "", [], {}, 1.5, True, ["F32"], {"dtype": "F32"}])
def test_a_tensor_that_is_no_object_of_three_fields(value):
    assert rule_of(json.dumps({"a": value}).encode(), 0) == "safetensors.fields"


@pytest.mark.parametrize("field", ["dtype", "shape", "data_offsets"])
@pytest.mark.parametrize("value", [None, 1, 1.0, True, {}, [[]], ["x"], [1.0, 2], [None], [True], [-1], [1e3], "", "8"])
def test_fields_of_wrong_types(field, value):
    assert rule_of(changed("a", field, value)) in ("safetensors.fields", "safetensors.dtype")


@pytest.mark.parametrize(
    "text",
    [
        '{"a":{"dtype":"U8","shape":[-0],"data_offsets":[0,0]}}',
        '{"a":{"dtype":"U8","shape":[0],"data_offsets":[0, -0]}}',
    ],
)
def test_minus_zero_is_no_natural_number(text):
    assert rule_of(text.encode(), 0) == "safetensors.json"


def test_minus_zero_in_a_name_is_only_a_name():
    text = b'{"a-0,-0":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    assert list(parse(text, 1, "x").entries) == ["a-0,-0"]


@pytest.mark.parametrize("offsets", [[], [0], [0, 8, 8]])
def test_offsets_are_two(offsets):
    assert rule_of(changed("a", "data_offsets", offsets)) == "safetensors.fields"


@pytest.mark.parametrize("missing", ["dtype", "shape", "data_offsets"])
def test_missing_fields(missing):
    fields = {key: value for key, value in GOOD["a"].items() if key != missing}
    assert rule_of(json.dumps({"a": fields}).encode(), 8) == "safetensors.fields"
    # One field missing and an unknown one instead: the colons balance, the checks must not.
    assert rule_of(json.dumps({"a": {**fields, "more": "x"}}).encode(), 8) == "safetensors.fields"


def test_unknown_fields():
    assert rule_of(changed("a", "extra", "x")) == "safetensors.fields"


@pytest.mark.parametrize("dtype", ["", "f32", "F128", "C128", "float32", "F32 ", "I4"])
def test_unknown_dtypes_are_named(dtype):
    with pytest.raises(FormatError) as caught:
        parse(changed("a", "dtype", dtype), 9, "x")
    assert caught.value.rule == "safetensors.dtype"
    assert repr(dtype) in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "rule"),
    [
        ([2**63], "safetensors.shape"),
        ([2**62, 2**62, 0], "safetensors.shape"),
        ([2**32, 2**32], "safetensors.shape"),
        ([10**30], "safetensors.shape"),
        ([1] * 65, "safetensors.shape"),
        ([3], "safetensors.size"),
        ([0], "safetensors.size"),
        ([2**61], "safetensors.size"),
        ([2, 2], "safetensors.size"),
    ],
)
def test_impossible_shapes(shape, rule):
    assert rule_of(changed("a", "shape", shape)) == rule


@pytest.mark.parametrize(
    ("tensor", "offsets", "rule"),
    [
        ("a", [1, 9], "safetensors.offsets"),
        ("b", [9, 10], "safetensors.offsets"),
        ("b", [7, 8], "safetensors.offsets"),
        ("b", [0, 1], "safetensors.offsets"),
        ("a", [0, 2**64], "safetensors.size"),
        ("a", [8, 0], "safetensors.offsets"),
        ("b", [8, 7], "safetensors.size"),
        ("b", [2**64, 2**64 + 1], "safetensors.offsets"),
    ],
)
def test_holes_overlaps_and_backward_offsets(tensor, offsets, rule):
    assert rule_of(changed(tensor, "data_offsets", offsets), 9) in (rule, "safetensors.size", "safetensors.offsets")


@pytest.mark.parametrize("length", [0, 8, 10, 2**63])
def test_the_buffer_is_covered_exactly(length):
    assert rule_of(json.dumps(GOOD).encode(), length) == "safetensors.data-length"


@pytest.mark.parametrize(("dtype", "count"), [("F4", 1), ("F4", 3), ("F6_E2M3", 1), ("F6_E3M2", 3)])
def test_packed_types_fill_whole_bytes(dtype, count):
    size = count * BY_SAFETENSORS[dtype].bits // 8
    text = json.dumps({"a": {"dtype": dtype, "shape": [count], "data_offsets": [0, size]}}).encode()
    assert rule_of(text, size) == "safetensors.partial-byte"


@pytest.mark.parametrize(
    "text",
    [
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"\\u0061":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"__metadata__":{"k":"1","k":"2"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"__metadata__":{},"__metadata__":{},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
        '{"a\\u003a":{"dtype":"U8","shape":[],"dtype":"U8","data_offsets":[0,1]}}',
        '{"__metadata__":{"k":"\\u003A\\u003a","k":":"},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    ],
)
def test_repeated_keys_anywhere(text):
    assert rule_of(text.encode(), 1) == "safetensors.duplicate-key"


@pytest.mark.parametrize("value", [None, 1, "x", [], {"a": 1}, {"a": None}, {"a": {}}, {"a": ["x"]}, {"a": []}])
def test_metadata_is_text_to_text(value):
    assert rule_of(json.dumps({"__metadata__": value, **GOOD}).encode()) == "safetensors.metadata"


@pytest.mark.parametrize(
    ("text", "names", "metadata"),
    [
        ("{}", [], {}),
        ("{}   \n\t", [], {}),
        ('{"__metadata__":{}}', [], {}),
        (
            '{"__metadata__":{"shape":"x","dtype":"y:z","data_offsets":""}}',
            [],
            {"shape": "x", "dtype": "y:z", "data_offsets": ""},
        ),
        ('{"__metadata__":{"a\\u003ab":"::"}}', [], {"a:b": "::"}),
        ('{ "x:y" : {"shape" : [], "data_offsets" : [0, 9] , "dtype" : "U8"}}', None, {}),
        ('{"a:b":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}}', ["a:b"], {}),
    ],
)
def test_unusual_but_valid(text, names, metadata):
    if names is None:
        assert rule_of(text.encode()) == "safetensors.size"
        return
    found = parse(text.encode(), 9 if names else 0, "x")
    assert list(found.entries) == names
    assert found.metadata == metadata


def test_tensors_out_of_order_in_the_header_are_put_in_order():
    text = json.dumps({"b": GOOD["b"], "a": GOOD["a"]}).encode()
    assert list(parse(text, 9, "x").entries) == ["a", "b"]


ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "U8", "F4", "BOOL", "X"]),
        "shape": st.lists(st.integers(0, 4), max_size=3),
        "data_offsets": st.tuples(st.integers(0, 12), st.integers(0, 12)).map(list),
    }
)


@st.composite
def headers(draw):
    """Headers that are often nearly right: offsets that fit, then perhaps a mutation of the text."""
    entries, position = {}, 0
    for name in draw(
        st.lists(st.sampled_from(["a", "b:", 'c"', "\u00e9", "__metadata__x", ""]), unique=True, max_size=4)
    ):
        shape = draw(st.lists(st.integers(0, 3), max_size=2))
        size = 1
        for side in shape:
            size *= side
        entries[name] = {"dtype": "U8", "shape": shape, "data_offsets": [position, position + size]}
        position += size
    if draw(st.booleans()):
        entries = {
            "__metadata__": draw(st.dictionaries(st.text(max_size=3), st.text(max_size=3), max_size=2)),
            **entries,
        }
    if draw(st.booleans()):
        entries[draw(st.sampled_from(["a", "z"]))] = draw(ENTRY)
    text = json.dumps(entries, ensure_ascii=draw(st.booleans())).encode()
    if draw(st.booleans()):
        cut = draw(st.integers(0, len(text)))
        piece = draw(
            st.sampled_from([b"", b":", b'"', b",", b"{", b"}", b"1", b'"a":{},', b"\\u003a", b" ", b"-", b"0"])
        )
        text = text[:cut] + piece + text[cut + draw(st.integers(0, 3)) :]
    return text, position


@settings(max_examples=600, deadline=None)
@given(headers())
def test_the_quick_way_accepts_only_what_the_strict_way_accepts(case):
    data, length = case
    try:
        strict = module._strict(data, length, "x")
    except FormatError:
        strict = None
    quick = module._decode(data)
    if quick is not None and module._fills(quick.entries, length):
        assert strict is not None
        assert quick == strict
        assert list(quick.entries) == list(strict.entries)


def test_what_writers_write_goes_the_quick_way():
    entries = {f"layers.{index}.w": Entry("BF16", (2, 3), (index * 12, index * 12 + 12)) for index in range(100)}
    data = encode(entries, {"format": "pt", "a:b": "c"})[8:]
    header = module._decode(data)
    assert header is not None
    assert module._fills(header.entries, 1200)


@settings(max_examples=100)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused_by_a_rule(data):
    rule = "none"
    try:
        SafetensorsFormat().read(MemoryStore({"x": data}), "x")
    except IngotError as error:
        rule = error.rule
    assert rule


@pytest.mark.parametrize(
    ("data", "rule"),
    [
        (b"", "safetensors.too-short"),
        (b"\0" * 7, "safetensors.too-short"),
        (b"\0" * 8, "safetensors.header-start"),
        (b"\xff" * 8, "safetensors.header-length"),
        (b"\xff" * 8 + b"{}", "safetensors.header-length"),
        ((3).to_bytes(8, "little") + b"{}", "safetensors.header-length"),
        ((100_000_001).to_bytes(8, "little") + b"{}", "safetensors.header-length"),
        ((2).to_bytes(8, "little") + b"{}x", "safetensors.data-length"),
    ],
)
def test_bad_prefixes(data, rule):
    with pytest.raises(FormatError) as caught:
        SafetensorsFormat().read(MemoryStore({"x": data}), "x")
    assert caught.value.rule == rule


@pytest.mark.parametrize("bomb", [b"[" * 3_000_000, b'{"a":' * 1_000_000, b'{"a":{"shape":' + b"[" * 3_000_000])
def test_deep_nesting_is_refused_without_a_crash_or_much_memory(bomb):
    data = b"{" + bomb if bomb[:1] == b"[" else bomb
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            parse(data, 0, "x")
        assert tracemalloc.get_traced_memory()[1] < 10 * len(data)
    finally:
        tracemalloc.stop()


def test_a_long_list_of_lists_is_refused_before_it_is_built():
    data = b'{"a":{"dtype":"U8","shape":[' + b"[]," * 1_000_000 + b'[]],"data_offsets":[0,0]}}'
    tracemalloc.start()
    try:
        assert rule_of(data, 0) == "safetensors.fields"
        assert tracemalloc.get_traced_memory()[1] < 4 * len(data)
    finally:
        tracemalloc.stop()


def test_many_repeated_keys_are_found_in_linear_work():
    pairs = ",".join(f'"k{index}":"v"' for index in range(50_000))
    with pytest.raises(FormatError) as caught:
        strict_json(f"{{{pairs},{pairs}}}".encode(), "r", "twice", "x")
    assert caught.value.rule == "twice"


def test_a_hundred_thousand_tensors():
    entries = {f"t{index}": Entry("U8", (1,), (index, index + 1)) for index in range(100_000)}
    data = encode(entries, {}) + bytes(100_000)
    catalog = SafetensorsFormat().read(MemoryStore({"x": data}), "x")
    assert len(catalog.tensors) == 100_000
    assert catalog.tensors["t99999"].parts["data"].offset == len(data) - 1
