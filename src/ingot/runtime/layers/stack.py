"""A model as a stack of layers that run one at a time.

The model's own forward runs with its layers replaced by functions that record their arguments and return their input.
So masks, positions and all modules before and after the layers are computed by the model itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ingot.core.border import require
from ingot.errors import IngotError, UnsupportedError

_OUTPUT_SHAPES: tuple[Callable[[Any], Any], ...] = (
    lambda hidden: hidden,
    lambda hidden: (hidden,),
    lambda hidden: (hidden, None),
    lambda hidden: (hidden, None, None),
)


@dataclass(frozen=True, slots=True)
class Call:
    """The recorded arguments of a layer, without its hidden states.

    ``named`` is the keyword under which the hidden states are passed; None if they are positional.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    named: str | None


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """The hidden states that the first layer receives, and the other arguments of each layer."""

    hidden: Any
    calls: Sequence[Call]


class Stack:
    """The layers of a model in the order in which they run.

    Parameters
    ----------
    model : PreTrainedModel
        Its modules outside the lists of layers have their weights.
    tokens : i64 [1, n]
        A few tokens for the probe run that finds the layers.

    Attributes
    ----------
    paths : list of str
        Paths of the layers, in the order in which they run.

    Raises
    ------
    UnsupportedError
        ``calibrate.architecture``: the layers do not form a chain in which each runs once.
    """

    def __init__(self, model: Any, tokens: Any) -> None:
        self._torch = require("torch", "torch")
        self._model = model
        lists = _outermost(self._torch, model)
        candidates = {f"{name}.{index}": layer for name, items in lists.items() for index, layer in enumerate(items)}
        reason: BaseException | None = None
        self._running, self._zeros = _Run(), self._torch.zeros_like(self.embedded(tokens))
        for wrap in _OUTPUT_SHAPES:
            self._wrap_output = wrap
            try:
                run = self._run(candidates, self._zeros, None)
            except IngotError:
                raise
            except Exception as error:  # models raise various errors for an output of another shape
                reason = error
                continue
            names = [name for name, _, _ in run.entries]
            if names and len(set(names)) == len(names) and run.handed_on:
                self.paths = names
                self._layers = [candidates[name] for name in names]
                return
        raise UnsupportedError(
            f"expected layers that form a chain in which each runs once; {type(model).__name__} is built differently",
            rule="calibrate.architecture",
        ) from reason

    def embedded(self, tokens: Any) -> Any:
        """Return the embeddings of tokens: f32 [windows, length, width]."""
        return self._model.get_input_embeddings()(tokens)

    def enter(self, embedded: Any, *, with_gradients: bool = False) -> LayerInputs:
        """Return the first layer's input for these embeddings, and the other arguments of each layer.

        If ``with_gradients`` is false, layers may not receive other values that depend on the embeddings.
        """
        entries = self._headless(embedded, None).entries
        calls = [call for _, call, _ in entries]
        if not with_gradients and any(
            _depends_on_embeddings(self._torch, value)
            for call in calls
            for value in (*call.args, *call.kwargs.values())
        ):
            raise UnsupportedError(
                "expected layers whose only argument that depends on the embeddings is their input",
                rule="calibrate.architecture",
            )
        return LayerInputs(entries[0][2], calls)

    def run_before_layers(self, modules: Sequence[Any]) -> list[bool]:
        """Return for each module outside the layers whether it runs before the first layer."""
        early = [False] * len(modules)

        def note(index: int, *_: Any) -> None:
            early[index] = not self._running.entries

        hooks = [module.register_forward_pre_hook(partial(note, index)) for index, module in enumerate(modules)]
        try:
            self.enter(self._zeros)
        finally:
            for hook in hooks:
                hook.remove()
        return early

    def layer(self, index: int, hidden: Any, call: Call) -> Any:
        """Return the output of a layer for hidden states: [windows, length, width]."""
        positional = (hidden, *call.args) if call.named is None else call.args
        keywords = call.kwargs if call.named is None else {**call.kwargs, call.named: hidden}
        out = self._layers[index](*positional, **keywords)
        return out[0] if isinstance(out, tuple) else out

    def leave(self, hidden: Any, width: int, *, headless: bool = False) -> Any:
        """Run the modules after the layers; return the model's output.

        ``hidden`` is the output of the last layer: [windows, length, width].

        If ``headless`` is set, the head is skipped and returns its input, provided that the model can run in this way.
        """
        zeros = hidden.new_zeros(*hidden.shape[:-1], width)
        return (self._headless if headless else self._through)(zeros, hidden).out

    def _through(self, embedded: Any, last: Any) -> _Run:
        return self._run(dict(zip(self.paths, self._layers, strict=True)), embedded, last)

    def _headless(self, embedded: Any, last: Any) -> _Run:
        """Run the model without its layers and its head, because the head may be as large as some layers.

        If the model fails without logits, it runs again with the head.
        """
        head = self._model.get_output_embeddings()
        if head is None:
            return self._through(embedded, last)
        instance_forward = head.__dict__.get("forward")
        head.forward = lambda inputs: inputs
        try:
            return self._through(embedded, last)
        except IngotError:
            raise
        except Exception:  # a model that does more with logits than scaling them
            _restore_forward(head, instance_forward)
            return self._through(embedded, last)
        finally:
            _restore_forward(head, instance_forward)

    def _run(self, layers: Mapping[str, Any], embedded: Any, last: Any) -> _Run:
        """Run the model with functions in place of its layers; return the recorded arguments and the output.

        Each function returns its input. If ``last`` is given, the function in place of the last layer returns ``last``.
        """
        run = self._running = _Run()
        before: list[Any] = []

        def replaced(name: str) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                keyword = None if args else "hidden_states"
                hidden = args[0] if args else kwargs["hidden_states"]
                other_kwargs = {key: value for key, value in kwargs.items() if key != keyword}
                run.handed_on &= not before or hidden is before[-1]
                run.entries.append((name, Call(args[1:], other_kwargs, keyword), hidden))
                out = last if last is not None and len(run.entries) == len(layers) else hidden.view_as(hidden)
                before.append(out)
                return self._wrap_output(out)

            return forward

        with _replaced(layers, replaced):
            run.out = self._model(inputs_embeds=embedded, use_cache=False)
        return run


@dataclass(slots=True)
class _Run:
    """The result of running a model without its layers.

    ``entries`` are the recorded arguments of each layer in order. ``handed_on`` states whether the input of each layer
    was the output of the layer before it. ``out`` is the model's output.
    """

    entries: list[tuple[str, Call, Any]] = field(default_factory=list)
    handed_on: bool = True
    out: Any = None


def _restore_forward(module: Any, forward: Any) -> None:
    """Set a module's attribute ``forward``; if ``forward`` is None, remove the attribute so that the class's method is
    used.
    """
    if forward is not None:
        module.forward = forward
    elif "forward" in module.__dict__:
        del module.forward


def _depends_on_embeddings(torch: Any, value: Any) -> bool:
    """Return whether an argument of a layer depends on the embeddings, or may depend on them later.

    A dictionary may depend on them later, because layers may store values in it.
    """
    if isinstance(value, dict):
        return True
    if isinstance(value, tuple | list):
        return any(_depends_on_embeddings(torch, item) for item in value)
    return isinstance(value, torch.Tensor) and value.requires_grad


def _outermost(torch: Any, model: Any) -> dict[str, Any]:
    lists: dict[str, Any] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists[name] = module
    return lists


@contextmanager
def _replaced(layers: Mapping[str, Any], forward: Callable[[str], Any]) -> Iterator[None]:
    for name, layer in layers.items():
        layer.forward = forward(name)
    try:
        yield
    finally:
        for layer in layers.values():
            del layer.forward
