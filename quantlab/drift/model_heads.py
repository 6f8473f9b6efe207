"""The heads of a Hugging Face folder: from its weights where they are there, else as the layers are initialised.

Only config.json, and of safetensors files only A_log and dt_bias, are read; no model is built.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quantlab.drift.heads import HeadStatistics, heads_of_gates
from quantlab.drift.streams import check_memory
from quantlab.errors import InputError, unknown_name
from quantlab.recurrences import DecayAxis, get_recurrence

SEED = 23
SMALLEST_STEP = 1e-4
_PLACE = "layers."  # prefix of a layer's parameters, without its number
LARGEST_SIZE = 2**20
"""Of what a config counts; beyond this a damaged file, not a model."""


@dataclass(frozen=True)
class LayerShape:
    """Recurrent layers of a config: their numbers in the model, ascending, and the sizes of each."""

    numbers: Sequence[int]
    heads: int
    value_dim: int
    key_dim: int


@dataclass(frozen=True)
class ModelType:
    """What a ``model_type`` of a config means.

    family: of its recurrence.  shape: reads the sizes.  rates(generator, shape) -> exp(A_log); steps(...) -> dt at
    zero input: how the published layer initialises them.  law: the same in words.
    """

    family: str
    shape: Callable[[dict[str, Any]], LayerShape]
    rates: Callable[[np.random.Generator, LayerShape], np.ndarray]
    steps: Callable[[np.random.Generator, LayerShape], np.ndarray]
    law: str


def _uniform_rates(low: float, high: float):
    return lambda generator, s: generator.uniform(low, high, s.heads)


def _counted_rates(generator: np.random.Generator, s: LayerShape) -> np.ndarray:
    return np.arange(1.0, s.heads + 1)


def _channel_rates(generator: np.random.Generator, s: LayerShape) -> np.ndarray:
    return np.broadcast_to(np.arange(1.0, s.key_dim + 1), (1, s.value_dim, s.key_dim))


def _log_uniform(generator: np.random.Generator, *shape: int) -> np.ndarray:
    return np.maximum(np.exp(generator.uniform(math.log(1e-3), math.log(1e-1), shape)), SMALLEST_STEP)


def _unit_bias(generator: np.random.Generator, s: LayerShape) -> np.ndarray:
    return np.full(s.heads, math.log1p(math.e))


def _head_steps(generator: np.random.Generator, s: LayerShape) -> np.ndarray:
    return _log_uniform(generator, s.heads)


def _key_steps(generator: np.random.Generator, s: LayerShape) -> np.ndarray:
    return _log_uniform(generator, s.heads, s.key_dim)


def _value_steps(generator: np.random.Generator, s: LayerShape) -> np.ndarray:
    return _log_uniform(generator, 1, s.value_dim)


def _every(config: dict[str, Any]) -> range:
    """The numbers of all layers."""
    layers = config["num_hidden_layers"]
    # Before anything looks at each of them.
    if not isinstance(layers, int) or isinstance(layers, bool) or layers > LARGEST_SIZE:
        raise ValueError(f"num_hidden_layers is {layers}")
    return range(layers)


def _named(config: dict[str, Any], names: tuple[str, ...], *keys: str) -> Sequence[int]:
    """Layers of a list in the config that are called one of ``names``; all layers where there is no list."""
    for key in keys:
        listed = config.get(key)
        if isinstance(listed, (list, str)):
            return [number for number, entry in enumerate(listed) if entry in names]
    return _every(config)


def _mamba2(config: dict[str, Any]) -> LayerShape:
    return LayerShape(_every(config), config["num_heads"], config["head_dim"], config["state_size"])


def _nemotron(config: dict[str, Any]) -> LayerShape:
    names = ("mamba", "linear_attention", "M")
    numbers = _named(config, names, "layers_block_type", "layer_types", "hybrid_override_pattern")
    return LayerShape(numbers, config["mamba_num_heads"], config["mamba_head_dim"], config["ssm_state_size"])


def _bamba(config: dict[str, Any]) -> LayerShape:
    heads = config.get("mamba_n_heads") or config["n_mamba_heads"]
    inner = config.get("mamba_d_ssm") or config.get("mamba_expand", 2) * config["hidden_size"]
    value_dim = config.get("mamba_d_head") or config.get("mamba_headdim") or "auto"
    value_dim = inner // heads if value_dim == "auto" else value_dim
    names = ("mamba", "hybrid", "linear_attention")
    numbers = _named(config, names, "layers_block_type", "layer_types")
    attention = config.get("attn_layer_indices")
    if isinstance(attention, list):
        numbers = [number for number in numbers if number not in attention]
    return LayerShape(numbers, heads, int(value_dim), config["mamba_d_state"])


def _gated_delta(config: dict[str, Any]) -> LayerShape:
    numbers = _named(config, ("linear_attention",), "layer_types")
    if "layer_types" not in config:
        every = int(config["full_attention_interval"])  # the last of every so many layers is full attention
        numbers = [number for number in numbers if (number + 1) % every]
    return LayerShape(
        numbers,
        config["linear_num_value_heads"],
        config["linear_value_head_dim"],
        config["linear_key_head_dim"],
    )


def _kimi(config: dict[str, Any]) -> LayerShape:
    nested = config.get("linear_attn_config") or {}
    heads = nested.get("num_heads") or config["linear_num_heads"]
    dim = nested.get("head_dim") or config["linear_head_dim"]
    listed = nested.get("kda_layers")
    # That list counts from 1.
    numbers = sorted(number - 1 for number in listed) if listed else None
    return LayerShape(
        _named(config, ("linear_attention", "kda"), "layer_types") if numbers is None else numbers,
        heads,
        dim,
        dim,
    )


def _mamba1(config: dict[str, Any]) -> LayerShape:
    inner = config.get("intermediate_size")
    if "mamba_d_state" in config:
        inner = config.get("mamba_expand", 2) * config["hidden_size"]
    inner = inner or config.get("expand", 2) * config["hidden_size"]
    state = config.get("mamba_d_state") or config.get("state_size", 16)
    numbers = _named(config, ("mamba", "linear_attention"), "layers_block_type", "layer_types")
    if "attn_layer_period" in config and "layers_block_type" not in config:
        attention = range(config["attn_layer_offset"], len(numbers), config["attn_layer_period"])
        numbers = [number for number in numbers if number not in attention]
    return LayerShape(numbers, 1, inner, state)


def _zamba(config: dict[str, Any]) -> LayerShape:
    # A hybrid layer has a recurrence behind its attention, so that every layer counts.
    inner = config.get("mamba_expand", 2) * config["hidden_size"]
    numbers = _named(config, ("mamba", "hybrid", "linear_attention"), "layers_block_type", "layer_types")
    return LayerShape(numbers, 1, inner, config["mamba_d_state"])


_DT = "dt log-uniform in [1e-3, 1e-1]"
_MAMBA2 = ModelType("mamba2", _mamba2, _counted_rates, _head_steps, f"A = 1 .. heads, {_DT}")
_BAMBA = ModelType("mamba2", _bamba, _counted_rates, _unit_bias, "A = 1 .. heads, dt_bias = 1")
_QWEN = ModelType(
    "gated_delta", _gated_delta, _uniform_rates(0.01, 16), _unit_bias, "A ~ U(0.01, 16), dt_bias = 1"
)
_MAMBA1 = ModelType("mamba1", _mamba1, _channel_rates, _value_steps, f"A = 1 .. state size, {_DT}")
MODEL_TYPES: dict[str, ModelType] = {
    "mamba2": _MAMBA2,
    "nemotron_h": ModelType("mamba2", _nemotron, _counted_rates, _head_steps, _MAMBA2.law),
    "zamba2": ModelType("mamba2", _bamba, _counted_rates, _head_steps, _MAMBA2.law),
    "bamba": _BAMBA,
    "falcon_h1": _BAMBA,
    "granitemoehybrid": _BAMBA,
    "qwen3_next": _QWEN,
    "qwen3_5": _QWEN,
    "qwen3_5_text": _QWEN,
    "qwen3_5_moe": _QWEN,
    "qwen3_5_moe_text": _QWEN,
    "olmo_hybrid": ModelType(
        "gated_delta", _gated_delta, _uniform_rates(1e-3, 16), _head_steps, f"A ~ U(0, 16), {_DT}"
    ),
    "kimi_linear": ModelType(
        "kimi_delta", _kimi, _uniform_rates(1, 16), _key_steps, f"A ~ U(1, 16), {_DT} a channel"
    ),
    "mamba": _MAMBA1,
    "falcon_mamba": _MAMBA1,
    "jamba": _MAMBA1,
    "zamba": ModelType("mamba1", _zamba, _channel_rates, _value_steps, _MAMBA1.law),
}
"""By the ``model_type`` of a config."""


@dataclass(frozen=True)
class ModelHeads:
    """The recurrent heads of a model.  statistics: of all of them, layer after layer.  layers: the number of each
    recurrent layer in the model, in that order.  complete: whether that is each layer that the config names, once."""

    statistics: HeadStatistics
    layers: tuple[int, ...]
    complete: bool


def heads_of_folder(folder: Path, gate_spread: float = 0.0) -> HeadStatistics:
    """The ``statistics`` of ``read_heads``."""
    return read_heads(folder, gate_spread).statistics


def read_heads(folder: Path, gate_spread: float = 0.0) -> ModelHeads:
    """Statistics of every recurrent head of a Hugging Face folder, one batch of heads over all layers.

    With A_log and dt_bias (mamba1: of dt_proj) in its safetensors files these; else the initial distribution of the
    layer, which forgets far faster than what training makes of it.  mamba1: a head is a layer, d_inner x state size.
    gate_spread: as in ``heads_of_gates``.  Raises InputError for a folder without a readable config of a known
    ``model_type``, and for weights that do not fit it.
    """
    config = _config(folder)
    name = config.get("model_type")
    if not isinstance(name, str) or name not in MODEL_TYPES:
        raise unknown_name("model_type", str(name), MODEL_TYPES)
    kind = MODEL_TYPES[name]
    try:
        shape = kind.shape(config)
    except KeyError as error:
        raise InputError("config", str(folder), f"a config of {name} with {error}") from None
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise InputError("config", str(folder), f"sizes of a {name} as whole numbers, but {error}") from None
    _check_sizes(folder, shape)
    found = _weights(folder, kind, shape)
    if found:
        source = f"A_log and dt_bias of {len(found)} layers in {folder.name}"
    else:
        generator = np.random.default_rng(SEED)
        found = {}
        for layer in shape.numbers:
            rates, steps = kind.rates(generator, shape), kind.steps(generator, shape)
            bias = torch.from_numpy(np.log(np.expm1(steps)))
            found[_PLACE + str(layer)] = (torch.from_numpy(np.log(rates)), bias)
        source = (
            f"no weights in {folder.name}, so the initial distribution of {name}: {kind.law}; training makes it"
            " remember far longer"
        )
    if not found:
        raise InputError("config", str(folder), "at least one recurrent layer")
    a_log = torch.cat([a for a, _ in found.values()])
    bias = torch.cat([b for _, b in found.values()])
    names = tuple(f"{_layer_name(place)}, head {h}" for place, (a, _) in found.items() for h in range(len(a)))
    statistics = heads_of_gates(
        kind.family,
        a_log,
        bias,
        gate_spread=gate_spread,
        value_dim=shape.value_dim,
        key_dim=shape.key_dim,
        source=source,
        names=names,
    )
    layers = tuple(map(_layer_number, found))
    return ModelHeads(statistics, layers, len(set(layers)) == len(layers) == len(shape.numbers))


def _check_sizes(folder: Path, shape: LayerShape) -> None:
    sizes = vars(shape) | {"layers": len(shape.numbers)}
    del sizes["numbers"]
    for size, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= LARGEST_SIZE:
            expected = f"at least one recurrent layer, with sizes of 1 to {LARGEST_SIZE}"
            raise InputError("config", f"{folder}: {size} {value}", expected)
    drawn = sizes["layers"] * shape.heads * (shape.value_dim + shape.key_dim)
    check_memory("config", sizes, drawn)


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise InputError("config", str(path), f"JSON: {error}") from None
    except (OSError, ValueError, RecursionError):
        raise InputError("config", str(folder), "a folder with a readable config.json") from None
    if not isinstance(config, dict):
        raise InputError("config", str(path), "a JSON object")
    text = config.get("text_config")
    return text if isinstance(text, dict) and "model_type" in text else config


def _weights(folder: Path, kind: ModelType, shape: LayerShape) -> dict[str, tuple[Tensor, Tensor]]:
    """A_log and dt_bias by the prefix of a layer's weights, as ``heads_of_gates`` takes them; empty without weights."""
    from safetensors import SafetensorError, safe_open

    axis = get_recurrence(kind.family).axis
    # Zamba keeps the projections of its heads in one parameter without a layer of its own.
    bias_names = ("dt_proj.bias", "dt_proj_bias") if axis is DecayAxis.ELEMENT else ("dt_bias",)
    a_shape: tuple[int, ...] = (shape.heads,)
    bias_shape: tuple[int, ...] = (shape.heads,)
    if axis is DecayAxis.KEY:
        bias_shape = (shape.heads, shape.key_dim)
    elif axis is DecayAxis.ELEMENT:
        a_shape, bias_shape = (1, shape.value_dim, shape.key_dim), (1, shape.value_dim)
    parts: dict[str, dict[str, Tensor]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (not a dict)
                    for part, ends, wanted in (
                        ("A_log", ("A_log",), a_shape),
                        ("bias", bias_names, bias_shape),
                    ):
                        end = next((end for end in ends if name.endswith("." + end)), None)
                        if end is not None:
                            value = file.get_tensor(name).double()
                            if value.numel() != math.prod(wanted):
                                raise InputError(name, tuple(value.shape), f"shape {wanted} for this config")
                            parts.setdefault(name[: -len(end) - 1], {})[part] = value.reshape(wanted)
        except (SafetensorError, OSError):
            raise InputError("config", str(path), "a readable safetensors file") from None
    complete = {name: pair for name, pair in parts.items() if len(pair) == 2}
    order = sorted(complete, key=lambda name: [int(n) for n in re.findall(r"\d+", name)])
    return {name: (complete[name]["A_log"], complete[name]["bias"]) for name in order}


def _layer_name(prefix: str) -> str:
    numbers = re.findall(r"\d+", prefix)
    return f"layer {numbers[0]}" if len(numbers) == 1 else prefix


def _layer_number(prefix: str) -> int:
    """Of a layer whose parameters have this prefix."""
    numbers = re.findall(r"\d+", prefix)
    after = re.findall(r"(?:^|\.)layers\.(\d+)(?:\.|$)", prefix)
    return int((after or numbers or ["0"])[0])
