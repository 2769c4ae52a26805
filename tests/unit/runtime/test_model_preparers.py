"""Model preparers of plugins choose the stored form that a model is loaded from."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import ingot
from ingot.core.registry import Instances
from ingot.runtime.loading import preparers
from ingot.runtime.loading.model_source import resolve
from ingot.runtime.loading.preparers import MODEL_PREPARERS, ModelPreparer

CODE = """
from ingot.runtime.loading.preparers import PreparedModel

class NewestForm:
    def applies(self, store):
        return store.exists("forms.txt")

    def prepare(self, path, request):
        return PreparedModel(f"{path}/v2.zt", "v2", f"newest form for {request.runtime}, dtype {request.dtype}")
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table of preparers that an installed distribution extends."""
    info = tmp_path / "site" / "preparer_example-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: preparer-example\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[ingot.model_preparers]\nnewest = preparer_example:NewestForm\n")
    (tmp_path / "site" / "preparer_example.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.delitem(sys.modules, "preparer_example", raising=False)
    table: Instances[ModelPreparer] = Instances("model preparer", group="ingot.model_preparers", contract=ModelPreparer)
    monkeypatch.setattr(preparers, "MODEL_PREPARERS", table)


@pytest.mark.usefixtures("plugin")
def test_preparer_of_a_plugin_chooses_the_form(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "forms.txt").write_text("v1 v2")
    for name, value in (("v1", 1), ("v2", 2)):
        ingot.save(model / f"{name}.zt", {"w": np.full(3, value, np.float32)})
    source = resolve(model, dtype="f32")
    with source.checkpoint as checkpoint:
        assert checkpoint["w"].numpy().tolist() == [2, 2, 2]
    assert (source.tier, source.why) == ("v2", "newest form for torch, dtype f32")


@pytest.mark.usefixtures("plugin")
def test_other_folders_are_loaded_as_stored(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    ingot.save(model / "model.zt", {"w": np.ones(3, np.float32)})
    source = resolve(model)
    with source.checkpoint:
        assert source.tier == "as stored"


def test_squish_tiers_are_a_registered_preparer() -> None:
    assert type(MODEL_PREPARERS["squish"]).__module__.startswith("ingot.ext.squish.")
