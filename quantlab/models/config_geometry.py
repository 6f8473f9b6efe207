"""The geometry of a model from its Hugging Face config.json, read as plain JSON: no model code, no download."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quantlab.errors import InputError, unknown_name
from quantlab.models.published import Geometry

# What the entries of a layer list call a recurrent layer, in files and in the classes of transformers.  A hybrid
# layer of Zamba2 or Falcon-H1 has a recurrence beside its attention.
_RECURRENT = {"linear_attention", "mamba", "mamba2", "hybrid", "kda", "gated_delta_net", "recurrent"}

LARGEST_SIZE = 2**20
"""Of what a config counts; beyond this a damaged file, not a model."""


class _Config:
    """One config.json: fields by the first of several names, as whole numbers above zero."""

    def __init__(self, path: Path, data: dict[str, Any]):
        self.path, self.data = path, data

    def has(self, name: str) -> bool:
        return isinstance(self.data.get(name), int)

    def number(self, *names: str) -> int:
        for name in names:
            value = self.data.get(name)
            if value is not None:
                whole = isinstance(value, int) and not isinstance(value, bool)
                if not whole or not 1 <= value <= LARGEST_SIZE:
                    expected = f"a whole number above 0, up to {LARGEST_SIZE}"
                    raise InputError("config", f"{self.path}: {name} = {value}", expected)
                return value
        raise InputError("config", str(self.path), f"a field {' or '.join(names)}")

    def optional(self, *names: str) -> int | None:
        return self.number(*names) if any(self.data.get(name) is not None for name in names) else None

    def inner(self, expand: str) -> int:
        """The inner width of a Mamba layer, from its expansion of the hidden size."""
        value = self.data.get(expand)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST_SIZE:
            expected = f"a number above 0, up to {LARGEST_SIZE}"
            raise InputError("config", f"{self.path}: {expand} = {value}", expected)
        width = int(value * self.number("hidden_size"))
        if width < 1:
            raise InputError("config", f"{self.path}: {expand} = {value}", "an inner width of at least 1")
        return width

    def layers(self) -> tuple[int | None, int]:
        """(recurrent layers if a list or pattern names them, all layers)."""
        pattern = self.data.get("hybrid_override_pattern")
        if isinstance(pattern, str):
            return pattern.count("M"), len(pattern)
        for name in ("layer_types", "layers_block_type"):
            kinds = self.data.get(name)
            if isinstance(kinds, list):
                return sum(isinstance(kind, str) and kind in _RECURRENT for kind in kinds), len(kinds)
        return None, self.number("num_hidden_layers")


def _made(
    config: _Config, family: str, sizes: tuple[int, int, int, int], recurrent: int | None, **more
) -> Geometry:
    named, every = config.layers()
    layers = named if recurrent is None else recurrent
    if layers is None:
        layers = every
    if layers < 1:
        raise InputError("config", str(config.path), "a model with at least one recurrent layer")
    heads, key_heads, value_dim, key_dim = sizes
    if value_dim < 1:
        raise InputError("config", f"{config.path}: value dim {value_dim}", "an inner width above the heads")
    if heads % key_heads:
        found = f"{config.path}: {heads} heads, {key_heads} key heads"
        raise InputError("config", found, "key heads that divide the heads")
    return Geometry(
        config.path.resolve().parent.name,
        *(family, heads, key_heads, value_dim, key_dim, layers, every),
        source=str(config.path),
        **more,
    )


def _mamba2(
    heads: tuple[str, ...], width: str, state: str, groups: str, kernel: str, chunk: str, expand: str
):
    def read(config: _Config) -> Geometry:
        count = config.number(*heads)
        # Some files leave the width of a head to be worked out ("auto").
        value_dim = config.number(width) if config.has(width) else config.inner(expand) // count
        sizes = (count, config.number(groups), value_dim, config.number(state))
        recurrent = None
        if config.layers()[0] is None and isinstance(config.data.get("attn_layer_indices"), list):
            recurrent = config.layers()[1] - len(config.data["attn_layer_indices"])
        elif config.data["model_type"] in ("zamba2", "falcon_h1"):
            recurrent = config.layers()[1]  # in every layer, beside or instead of attention
        more = {"conv_kernel": config.optional(kernel), "chunk": config.optional(chunk)}
        return _made(config, "mamba2", sizes, recurrent, **more)

    return read


def _gated_delta(config: _Config) -> Geometry:
    names = ("num_value_heads", "num_key_heads", "value_head_dim", "key_head_dim")
    heads, key_heads, value_dim, key_dim = (config.number(f"linear_{name}") for name in names)
    named, every = config.layers()
    recurrent = None
    if named is None:
        recurrent = every - every // config.number("full_attention_interval")
    more = {"conv_kernel": config.optional("linear_conv_kernel_dim")}
    return _made(config, "gated_delta", (heads, key_heads, value_dim, key_dim), recurrent, **more)


def _kimi_delta(config: _Config) -> Geometry:
    nested, recurrent = config.data.get("linear_attn_config"), None
    if isinstance(nested, dict):
        flat = {f"linear_{name}": value for name, value in nested.items()}
        config = _Config(config.path, config.data | flat)
        if isinstance(nested.get("kda_layers"), list):
            recurrent = len(nested["kda_layers"])
    heads, width = config.number("linear_num_heads"), config.number("linear_head_dim")
    more = {"conv_kernel": config.optional("linear_conv_kernel_dim", "linear_short_conv_kernel_size")}
    return _made(config, "kimi_delta", (heads, heads, width, width), recurrent, **more)


def _mamba1(state: str, kernel: str, expand: str):
    def read(config: _Config) -> Geometry:
        inner = config.inner(expand)
        recurrent = None
        period = config.optional("attn_layer_period")
        named, every = config.layers()
        if config.data["model_type"] == "zamba":
            recurrent = every  # also behind the attention of a hybrid layer
        elif named is None and period is not None:
            offset = config.data.get("attn_layer_offset") or 0
            if not isinstance(offset, int):
                raise InputError("config", f"{config.path}: attn_layer_offset = {offset}", "a whole number")
            recurrent = sum(layer % period != offset for layer in range(every))
        sizes = (1, 1, inner, config.number(state))
        return _made(config, "mamba1", sizes, recurrent, conv_kernel=config.optional(kernel))

    return read


_BAMBA = _mamba2(
    *(("mamba_n_heads",), "mamba_d_head", "mamba_d_state", "mamba_n_groups"),
    *("mamba_d_conv", "mamba_chunk_size", "mamba_expand"),
)
READERS: dict[str, Callable[[_Config], Geometry]] = {
    "mamba2": _mamba2(
        ("num_heads",), "head_dim", "state_size", "n_groups", "conv_kernel", "chunk_size", "expand"
    ),
    "nemotron_h": _mamba2(
        *(("mamba_num_heads",), "mamba_head_dim", "ssm_state_size", "n_groups"),
        *("conv_kernel", "chunk_size", "expand"),
    ),
    "bamba": _BAMBA,
    "granitemoehybrid": _BAMBA,
    "falcon_h1": _BAMBA,
    "zamba2": _mamba2(
        *(("n_mamba_heads",), "mamba_headdim", "mamba_d_state", "mamba_ngroups"),
        *("mamba_d_conv", "chunk_size", "mamba_expand"),
    ),
    **dict.fromkeys(
        ("qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid"),
        _gated_delta,
    ),
    "kimi_linear": _kimi_delta,
    "jamba": _mamba1("mamba_d_state", "mamba_d_conv", "mamba_expand"),
    "zamba": _mamba1("mamba_d_state", "mamba_d_conv", "mamba_expand"),
    "falcon_mamba": _mamba1("state_size", "conv_kernel", "expand"),
    "mamba": _mamba1("state_size", "conv_kernel", "expand"),
}
"""How to read each ``model_type``."""


def read_config(folder: str | Path) -> Geometry:
    """The geometry that the config.json in ``folder`` (or the file itself) describes.

    A model with an image part keeps its text model under ``text_config``.  Raises InputError for a file that is not
    there or not JSON, for another kind of model, and for a field that is missing or no positive number.
    """
    path = Path(folder)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise InputError("config", str(folder), "a folder with a config.json")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError("config", str(path), f"JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise InputError("config", str(path), "an object with a model_type")
    if isinstance(data.get("text_config"), dict):
        data = {"model_type": data["model_type"]} | data["text_config"]
    if not isinstance(data["model_type"], str) or data["model_type"] not in READERS:
        raise unknown_name("model_type", data["model_type"], READERS)
    return READERS[data["model_type"]](_Config(path, data))
