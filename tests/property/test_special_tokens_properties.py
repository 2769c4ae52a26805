"""Special tokens and chat templates are those of ``gguf.SpecialVocab``, for any files of a tokenizer."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingot.translate import companions, special_tokens
from tests.support import model_folder

gguf = pytest.importorskip("gguf")

ADDED = ["<s>", "</s>", "<pad>", "<unk>", "<sep>", "<cls>", "<mask>", "<|end|>"]
ROWS = model_folder.FIRST_SPECIAL + len(model_folder.SPECIAL) + len(ADDED) + 5
TEXTS = st.sampled_from([*ADDED, "<|im_end|>", "nowhere"])
IDS = st.one_of(st.none(), st.integers(0, ROWS + 3))
SPECIAL = st.builds(lambda text: {"SpecialToken": {"id": text, "type_id": 0}}, TEXTS)
FIRST, SECOND = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))


def around(*parts: Any) -> Any:
    return st.tuples(*(st.lists(SPECIAL, max_size=2) if part is None else st.just([part]) for part in parts)).map(
        lambda lists: [step for each in lists for step in each]
    )


TEMPLATES = st.fixed_dictionaries(
    {"type": st.just("TemplateProcessing"), "single": around(None, FIRST, None)},
    optional={"pair": around(None, FIRST, None, SECOND, None)},
)
ROBERTA = st.fixed_dictionaries(
    {"type": st.just("RobertaProcessing")},
    optional={"cls": st.tuples(TEXTS, IDS).map(list), "sep": st.tuples(TEXTS, IDS).map(list)},
)
BYTES = st.just({"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": True})
PROCESSORS = st.one_of(
    st.none(),
    TEMPLATES,
    ROBERTA,
    st.lists(st.one_of(BYTES, TEMPLATES), max_size=3).map(lambda steps: {"type": "Sequence", "processors": steps}),
)
NAMES = st.sampled_from(["default", "tool_use", "rag", "x-y", "9"])
CHOICES = st.lists(
    st.fixed_dictionaries({"name": NAMES, "template": st.text("ab{}\n", max_size=4)}),
    unique_by=lambda each: each["name"],
)
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        **{f"{role}_token": st.one_of(st.none(), TEXTS) for role in special_tokens.ROLES},
        **{f"add_{role}_token": st.sampled_from([None, True, False]) for role in special_tokens.AROUND},
        "chat_template": st.one_of(st.text("ab{}", max_size=4), CHOICES.filter(bool)),
    },
)
CONFIG = st.fixed_dictionaries({}, optional={f"{role}_token_id": IDS for role in special_tokens.ROLES})
FILES = st.fixed_dictionaries(
    {},
    optional={
        "chat_template.jinja": st.text("jk", max_size=3),
        "chat_template.json": st.one_of(st.text("mn", max_size=3), CHOICES.filter(bool)).map(
            lambda template: json.dumps({"chat_template": template})
        ),
    },
)


class Spy(gguf.GGUFWriter):  # type: ignore[misc]
    """A writer that keeps what it is given."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}
        super().__init__(None, "llama")
        self.found.clear()

    def add_uint32(self, key: str, val: int) -> None:
        self.found[key] = val

    def add_bool(self, key: str, val: bool) -> None:
        self.found[key] = val

    def add_string(self, key: str, val: str) -> None:
        self.found[key] = val

    def add_array(self, key: str, val: Any) -> None:
        self.found[key] = sorted(val)


def expected(files: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).parent.mkdir(exist_ok=True)
            (Path(folder) / name).write_text(text, "utf-8", newline="")
        spy = Spy()
        gguf.SpecialVocab(folder, n_vocab=ROWS).add_to_gguf(spy, quiet=True)
    return spy.found


def found(files: dict[str, str]) -> dict[str, Any]:
    typed, _ = companions.tokenizer_metadata(files, ROWS)
    beside = (*special_tokens.AROUND, *special_tokens.ROLES, "eot", "eom")
    names = {"unk": "unknown", "pad": "padding", "sep": "seperator"}
    keys = {f"tokenizer.ggml.{names.get(role, role)}_token_id" for role in beside}
    keys |= {f"tokenizer.ggml.add_{role}_token" for role in special_tokens.AROUND}
    return {
        key: sorted(value) if isinstance(value, list) else value
        for key, (_, value) in typed.items()
        if key in keys or key.startswith("tokenizer.chat_template")
    }


@settings(max_examples=300, deadline=None)
@given(
    PROCESSORS, SETTINGS, CONFIG, FILES, st.dictionaries(st.sampled_from(["tool", "rag_2"]), st.text("pq", max_size=3))
)
def test_they_are_those_of_the_package(
    processor: Any, stated: dict[str, Any], config: dict[str, Any], more: dict[str, str], named: dict[str, str]
) -> None:
    words = model_folder.tokenizer(ADDED, processor, "gpt-2")
    additional = {f"additional_chat_templates/{name}.jinja": text for name, text in named.items()}
    files = {"tokenizer.json": json.dumps(words), "config.json": json.dumps(config), **more}
    files |= additional if "chat_template.jinja" in more else {}
    files |= {"tokenizer_config.json": json.dumps(stated)} if stated else {}
    ours, theirs = found(files), expected(files)
    if not stated:  # then the package looks at no chat template, and gives the processor's own tokens no id
        ours = {key: value for key, value in ours.items() if not key.startswith("tokenizer.chat_template")}
        ends = ("bos_token_id", "eos_token_id")
        ours = {key: value for key, value in ours.items() if key in theirs or not key.endswith(ends)}
    assert ours == theirs


@settings(max_examples=100, deadline=None)
@given(PROCESSORS, SETTINGS, CONFIG)
def test_tokens_that_are_objects_are_taken_by_their_texts(
    processor: Any, stated: dict[str, Any], config: dict[str, Any]
) -> None:
    words = model_folder.tokenizer(ADDED, processor, "gpt-2")
    objects = {
        key: {"__type": "AddedToken", "content": value} if isinstance(value, str) and key.endswith("_token") else value
        for key, value in stated.items()
    }
    files = {"tokenizer.json": json.dumps(words), "config.json": json.dumps(config)}
    plain = files | ({"tokenizer_config.json": json.dumps(stated)} if stated else {})
    assert found(files | ({"tokenizer_config.json": json.dumps(objects)} if stated else {})) == found(plain)
