"""The Modelfile beside a GGUF for ollama: what it says, and that Ingot reads it back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ingot
from ingot.artifacts.modelfile import adds_nothing, modelfile_text
from ingot.errors import IngotError, UnsupportedError, UsageError
from tests.support import model_folder

CHAT = {**model_folder.SETTINGS, "chat_template": "{% for message in messages %}{{ message['content'] }}{% endfor %}"}
ENDS = {"generation_config.json": {"eos_token_id": [259, 257]}}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def directives(path: str) -> list[str]:
    return [line for line in Path(path).read_text().splitlines() if not line.startswith("#")]


def test_a_model_that_chats(here: Path) -> None:
    """The file has the chat template, and each end token of the generation config stops."""
    model_folder.write(here / "m", settings=CHAT, files=ENDS)
    report = ingot.quantize("m", "x.gguf", runtime="ollama", type="Q8_0")
    assert report.commands[0] == "ollama create x -f x.Modelfile"
    assert directives("x.Modelfile") == [
        "FROM ./x.gguf",
        'PARAMETER stop "<|im_end|>"',
        'PARAMETER stop "<|endoftext|>"',
    ]
    with ingot.open("x.Modelfile") as named, ingot.open("x.gguf") as weights:
        assert named.metadata["tokenizer.chat_template"] == CHAT["chat_template"]
        assert list(named) == list(weights)
        assert np.array_equal(named["output.weight"].numpy(), weights["output.weight"].numpy())


def test_a_model_without_chat_template_gets_the_prompt_as_it_is(here: Path) -> None:
    model_folder.write(here / "m")
    report = ingot.quantize("m", "folder", runtime="ollama", type="Q8_0")
    assert report.commands[0] == "ollama create folder -f folder/Modelfile"
    assert directives("folder/Modelfile") == ["FROM ./model.gguf", "TEMPLATE {{ .Prompt }}"]
    with ingot.open("folder/Modelfile") as named:
        assert "output.weight" in named
    ingot.quantize("m", "folder", runtime="ollama", type="Q8_0", overwrite=True)


def test_a_converted_file_has_one_too(here: Path) -> None:
    model_folder.write(here / "m", settings=CHAT, files=ENDS)
    ingot.convert("m", "x.gguf", recipe="q8_0", runtime="ollama")
    assert len(directives("x.Modelfile")) == 3
    ingot.convert("m", "y.gguf", recipe="q8_0", runtime="llama.cpp")
    assert not Path("y.Modelfile").exists()


def test_another_modelfile_is_not_replaced(here: Path) -> None:
    model_folder.write(here / "m")
    Path("x.Modelfile").write_text("FROM ./mine.gguf")
    for operation in (ingot.quantize, ingot.convert):
        with pytest.raises(UsageError) as caught:
            operation("m", "x.gguf", runtime="ollama")  # type: ignore[operator]
        assert caught.value.rule == "target.exists"
    assert not Path("x.gguf").exists()
    ingot.quantize("m", "x.gguf", runtime="ollama", type="Q8_0", overwrite=True)
    assert directives("x.Modelfile")[0] == "FROM ./x.gguf"


def test_a_divided_file_is_refused(here: Path) -> None:
    model_folder.write(here / "m")
    with pytest.raises(UnsupportedError) as caught:
        ingot.convert("m", "out", runtime="ollama", recipe="q8_0", max_shard_size="40kB")
    assert caught.value.rule == "runtime.refused"


METADATA: dict[str, Any] = {
    "tokenizer.ggml.tokens": ["a", "<end>", 'odd"', "<turn>"],
    "tokenizer.ggml.token_type": [1, 3, 3, 3],
}


def test_only_control_tokens_that_can_be_written_stop() -> None:
    """An ordinary token may be a part of an answer; ollama's parser has no quote inside quotes."""
    text = modelfile_text("x.gguf", METADATA, [0, 1, 2, 1, 99, -1])
    assert [line for line in text.splitlines() if line.startswith("PARAMETER")] == ['PARAMETER stop "<end>"']


@pytest.mark.parametrize(
    ("directive", "expected"),
    [
        (("parameter", 'stop "<end>"'), True),
        (("parameter", "stop <turn>"), True),
        (("parameter", 'stop "<end>'), False),
        (("parameter", "stop a"), False),
        (("parameter", "temperature 1"), False),
        (("template", "{{ .Prompt }}"), True),
        (("template", '"""{{ .Prompt }}"""'), True),
        (("template", '"""{{ .Prompt }}'), False),
        (("template", "{{ .System }} {{ .Prompt }}"), False),
        (("system", "You answer."), False),
    ],
)
def test_lines_that_add_nothing(directive: tuple[str, str], expected: bool) -> None:
    assert adds_nothing([directive], METADATA) is expected


def test_a_plain_template_replaces_that_of_a_file() -> None:
    assert not adds_nothing([("template", "{{ .Prompt }}")], {"tokenizer.chat_template": "x"})


def test_a_stop_text_beside_weights_that_are_gone(here: Path) -> None:
    Path("Modelfile").write_text('FROM ./gone.gguf\nPARAMETER stop "<end>"\n')
    with pytest.raises(IngotError):
        ingot.open("Modelfile")
