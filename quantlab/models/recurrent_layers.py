"""Which layers of a model are recurrent, and which family of ops each one calls."""

import inspect
import sys
from dataclasses import dataclass
from types import ModuleType

from torch import nn

from quantlab.errors import InputError
from quantlab.models.families import FAMILIES, UNSUPPORTED, Family, families_of
from quantlab.recurrences import get_recurrence


@dataclass(frozen=True)
class RecurrentLayer:
    """One recurrent layer of a model.

    layer: its ``layer_idx``.  module: the mixer, whose forward calls the ops.  heads: value heads of the state.
    """

    layer: int
    module: nn.Module
    family: Family
    heads: int


def recurrent_layers(model: nn.Module) -> dict[int, RecurrentLayer]:
    """The recurrent layers of ``model`` by layer number: modules with a ``layer_idx`` and decay parameters of their own
    (``A_log``), whose file calls a family's ops.

    Raises InputError as ``op_namespaces`` does, and for a model whose modules are none of these.
    """
    op_namespaces(model)
    found = {}
    for module in model.modules():
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            continue
        decays = _own_decays(module)
        families = [family for file in _files(module) for family in families_of(file)]
        if decays and families:
            family = _called(module, families)
            # Mamba-1's decays are one for each element of the single head.
            single = get_recurrence(family.recurrence).needs_rates
            heads = 1 if single else sum(decay.numel() for decay in decays)
            found[layer] = RecurrentLayer(layer, module, family, heads)
    if not found:
        expected = (
            "modules with an integer layer_idx and a parameter A_log, in files that call a family's ops"
        )
        raise InputError("model", type(model).__name__, expected)
    return found


def check_heads(layer: int, decays: int, heads: int) -> None:
    """InputError unless a layer has as many ``decays``, which its ``heads`` were counted by, as its state has heads."""
    if decays != heads:
        expected = f"one number for each of the {heads} heads of the layer's state"
        raise InputError("A_log", f"of {decays} numbers at layer {layer}", expected)


def op_namespaces(model: nn.Module) -> list[tuple[ModuleType, Family]]:
    """(module, family) for every module file of the model that defines a family's step op.

    Raises InputError for what is no model, for a model without a known op, and for one with an op that no
    adapter serves.
    """
    if not isinstance(model, nn.Module):
        raise InputError("model", type(model).__name__, "a loaded model (torch.nn.Module)")
    files = {file.__name__: file for part in model.modules() for file in _files(part)}
    for name, reason in UNSUPPORTED.items():
        if any(file.rsplit(".", 1)[-1] == name for file in files):
            raise InputError(
                "model", type(model).__name__, f"a model that a policy can serve, which this is not: {reason}"
            )
    found = [(file, family) for file in files.values() for family in families_of(file)]
    if not found:
        ops = ", ".join(family.step_op for family in FAMILIES)
        raise InputError(
            "model", type(model).__name__, f"a model with recurrent layers (one that calls {ops})"
        )
    return found


def _files(module: nn.Module) -> list[ModuleType]:
    """The Python modules that define this module's class and its bases."""
    names = [cls.__module__ for cls in type(module).__mro__]
    return [sys.modules[name] for name in names if name in sys.modules]


def _called(module: nn.Module, families: list[Family]) -> Family:
    """The family whose step op the methods of ``module`` name, where its file has several."""
    if len(families) == 1:
        return families[0]
    methods = [inspect.unwrap(f) for cls in type(module).__mro__ for f in vars(cls).values() if callable(f)]
    names = {name for f in methods if (code := getattr(f, "__code__", None)) for name in code.co_names}
    return next((family for family in families if family.step_op in names), families[0])


def _own_decays(module: nn.Module) -> list[nn.Parameter]:
    """``A_log`` parameters of a module and its parts, without those of parts that are layers themselves."""
    found = [p for name, p in module.named_parameters(recurse=False) if name == "A_log"]
    for part in module.children():
        if not isinstance(getattr(part, "layer_idx", None), int):
            found += _own_decays(part)
    return found
