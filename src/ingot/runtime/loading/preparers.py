"""Model preparers: extensions that choose or build the stored variant from which a model is loaded.

A folder may contain a model in several variants, such as the tiers of a Squish directory. A preparer recognizes its
folders and returns the variant that suits a request. Entry points in the group ``ingot.model_preparers`` register
preparers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from ingot.core.registry import Instances
from ingot.model.store import Store
from ingot.stores.location import AnyPath, Location


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """Options of a load that decide which stored variant suits it.

    Parameters
    ----------
    runtime : {"torch", "mlx"}
        The framework that computes.
    keep_packed : bool
        Whether quantized weights stay packed in memory.
    cache : bool
        Whether other stored variants may be used and built.
    dtype : optional
        Requested dtype of the weights; None for the model's dtype.
    model_dir : Location, optional
        The folder of config.json and the tokenizer if it is not the folder of the weights.
    """

    runtime: Literal["torch", "mlx"] = "torch"
    keep_packed: bool = False
    cache: bool = True
    dtype: Any = None
    model_dir: Location | None = None


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """The stored variant to load: a location for ``ingot.open``, its name, and the reasons for the choice."""

    location: AnyPath
    tier: str
    why: str


class ModelPreparer(Protocol):
    """An extension that chooses among the stored variants of a model in one folder."""

    def applies(self, store: Store) -> bool:
        """Return whether this preparer recognizes the folder; every load of a folder calls it."""
        ...

    def prepare(self, location: Location, request: LoadRequest) -> PreparedModel:
        """Return the variant of the folder at this location that suits the request. Raises ``IngotError``."""
        ...


MODEL_PREPARERS: Instances[ModelPreparer] = Instances(
    "model preparer", group="ingot.model_preparers", contract=ModelPreparer
)


def preparer_for(store: Store) -> ModelPreparer | None:
    """Return the first preparer that recognizes a folder; None if no preparer does."""
    return next((preparer for _, preparer in MODEL_PREPARERS.available() if preparer.applies(store)), None)
