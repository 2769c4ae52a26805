"""The tokenizer of a model folder is what its tokenizer.json says, whatever class transformers would take."""

from __future__ import annotations

from pathlib import Path

import pytest
import tokenizers
import transformers

from ingot.runtime.loading.transformers_tokenizer import load_tokenizer
from ingot.stores.local import LocalStore
from tests.support.models import make_tokenizer

TEXT = "in the 123123 cafe\u0301 then 12 <s>"


def folder_of(folder: Path, kind: str, *, begins: bool = True) -> Path:
    make_tokenizer(folder, begins=begins)
    (folder / "config.json").write_text(f'{{"model_type": "{kind}"}}')
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a Qwen2: transformers builds its own, of other pre-tokenization and with NFC, around the vocabulary."""
    found = folder_of(tmp_path, "qwen2")
    own = tokenizers.Tokenizer.from_file(str(found / "tokenizer.json"))
    if transformers.AutoTokenizer.from_pretrained(found)(TEXT).input_ids == own.encode(TEXT).ids:
        pytest.skip(f"transformers {transformers.__version__} takes tokenizer.json as it is; 5.23 does not")
    return found


def test_the_file_decides_and_another_class_is_told(folder: Path) -> None:
    own = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    with pytest.warns(UserWarning, match="Qwen2Tokenizer"):
        found = load_tokenizer(folder)
    assert found(TEXT).input_ids == own.encode(TEXT).ids
    assert found(TEXT, add_special_tokens=False).input_ids == own.encode(TEXT, add_special_tokens=False).ids
    assert found.decode(found(TEXT, add_special_tokens=False).input_ids) == TEXT
    assert (found.bos_token_id, found.eos_token_id, found.pad_token_id) == (1, 2, 0)
    assert found.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[hi]"


def test_nothing_is_told_where_all_agree(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "llama")
    found = load_tokenizer(folder)  # warnings are errors here
    assert found(TEXT).input_ids == transformers.AutoTokenizer.from_pretrained(folder)(TEXT).input_ids


@pytest.mark.parametrize("begins", [True, False])
def test_the_first_token_is_the_files_unless_one_says_otherwise(tmp_path: Path, begins: bool) -> None:
    folder = folder_of(tmp_path, "llama", begins=begins)
    assert (load_tokenizer(folder)("in").input_ids[0] == 1) == begins
    assert load_tokenizer(folder, add_bos_token=True)("in").input_ids[0] == 1
    assert load_tokenizer(folder, add_bos_token=False)("in").input_ids[0] != 1


def test_mlx_gets_the_same_tokenizer(folder: Path) -> None:
    utils = pytest.importorskip("mlx_lm.utils")
    from ingot.runtime.loading.mlx_load import _tokenizer

    with pytest.warns(UserWarning, match="tokenizer"):
        found = _tokenizer(utils, LocalStore(folder))
    assert found.encode(TEXT) == tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids


def test_a_folder_without_config_is_enough(tmp_path: Path) -> None:
    make_tokenizer(tmp_path / "a")
    assert load_tokenizer(tmp_path / "a")("in").input_ids[0] == 1
