"""Geometries of published models: what their recurrent layers hold for one sequence.

From configurations, model pages and library defaults; where each row comes from is part of the row, and what nobody
has checked says so.  Weights and activations of all of them are bf16, the state of their reference code FP32.
"""

from dataclasses import dataclass

from quantlab.errors import unknown_name
from quantlab.schemes import StateShape

CONV_VALUE_BYTES = 2
"""Of one value of the convolution state, which engines keep in the dtype of the activations, bf16."""


@dataclass(frozen=True)
class Geometry:
    """The recurrent layers of one model.

    family: of the recurrence.  heads, key_heads, value_dim, key_dim: of a layer (Mamba-2: H, G, P, N; GDN and KDA:
    value heads, key heads, V, K; Mamba-1: one head of d_inner x N).  layers: recurrent ones, None where unknown.
    all_layers: of every kind.  conv_kernel: width of the short convolution, None where unknown.  chunk: of prefill.
    source: where the row is from.  from_memory: fields that are from memory and unchecked.
    """

    name: str
    family: str
    heads: int
    key_heads: int
    value_dim: int
    key_dim: int
    layers: int | None
    all_layers: int | None = None
    conv_kernel: int | None = 4
    chunk: int | None = None
    source: str = ""
    from_memory: tuple[str, ...] = ()

    @property
    def shape(self) -> StateShape:
        """Of one layer."""
        return StateShape(self.heads, self.value_dim, self.key_dim, self.key_heads)

    @property
    def counted_layers(self) -> int:
        """The recurrent layers, or 1 where their number is unknown: all figures are then those of a layer."""
        return self.layers or 1

    @property
    def conv_channels(self) -> int:
        """Channels under the short convolution of a layer: those of value, query and key (Mamba-1: value alone)."""
        shared = 0 if self.family == "mamba1" else 2 * self.key_heads * self.key_dim
        return self.heads * self.value_dim + shared

    def conv_bytes(self, drafts: int = 0, value_bytes: int = CONV_VALUE_BYTES) -> int:
        """Bytes of the convolution state of one sequence in all recurrent layers; 0 where the kernel is unknown.

        The last conv_kernel - 1 inputs of each channel, and as many more as drafts that may be taken back.
        """
        if self.conv_kernel is None:
            return 0
        columns = self.conv_kernel - 1 + drafts
        return self.counted_layers * self.conv_channels * columns * value_bytes


def _mamba2(
    name: str, heads: int, value_dim: int, key_dim: int, groups: int, layers, all_layers, **more
) -> Geometry:
    return Geometry(name, "mamba2", heads, groups, value_dim, key_dim, layers, all_layers, **more)


def _delta(
    name: str, heads: int, key_heads: int, key_dim: int, value_dim: int, layers, all_layers, **more
) -> Geometry:
    family = more.pop("family", "gated_delta")
    return Geometry(name, family, heads, key_heads, value_dim, key_dim, layers, all_layers, **more)


_ROWS = (
    _mamba2("Nemotron-3-Nano-4B", 96, 80, 128, 8, 21, 42, chunk=256, source="copies of config.json"),
    _mamba2(
        "Nemotron-3-Nano-30B-A3B", 64, 64, 128, 8, 23, 52, chunk=128, source="config.json of a derivative"
    ),
    _mamba2("Nemotron-3-Super-120B-A12B", 128, 64, 128, 8, 40, 88, source="model page; a kernel's tests"),
    _mamba2(
        "Nemotron-3-Ultra", 256, 64, 128, 8, None, None, conv_kernel=None, source="a kernel's tests alone"
    ),
    _mamba2("Nemotron-H-8B", 128, 64, 128, 8, 24, 52, chunk=128, source="transformers' defaults and pattern"),
    _mamba2(
        *("Nemotron-Nano-9B-v2", 128, 80, 128, 8, 27, 56),
        source="inner width from a page",
        from_memory=("layers", "all_layers"),
    ),
    _mamba2("Mamba2-2.7B", 80, 64, 128, 1, 64, 64, source="widths from a page, mamba_ssm's defaults"),
    _mamba2(
        "Codestral-Mamba-7B", 128, 64, 128, 8, 64, 64, chunk=256, source="transformers' Mamba2Config defaults"
    ),
    _mamba2("Falcon-H1-0.5B", 24, 64, 128, 1, 36, 36, source="table in transformers' documentation"),
    _mamba2(
        *("Falcon-H1-1.5B", 48, 64, 256, 1, 24, 24),
        source="table in transformers' documentation",
        from_memory=("key_heads",),
    ),
    _mamba2(
        *("Falcon-H1-3B", 32, 128, 256, 1, 32, 32),
        source="table in transformers' documentation",
        from_memory=("key_heads",),
    ),
    _mamba2(
        *("Falcon-H1-7B", 24, 128, 256, 1, 44, 44),
        source="table in transformers' documentation",
        from_memory=("key_heads",),
    ),
    _mamba2(
        *("Falcon-H1-34B", 32, 128, 256, 2, 72, 72),
        source="table in transformers' documentation",
        from_memory=("key_heads",),
    ),
    _mamba2(
        "Bamba-9B", 128, 64, 128, 1, 29, 32, source="config.json (transformers' default has key dim 256)"
    ),
    _mamba2(
        *("Granite-4.0-h-small", 128, 64, 128, 1, 36, 40),
        source="widths from a page",
        from_memory=("layers", "all_layers"),
    ),
    _delta("Qwen3-Next-80B-A3B", 32, 16, 128, 128, 36, 48, source="transformers' defaults"),
    _delta("Qwen3.5-0.8B", 16, 16, 128, 128, 18, 24, source="config.json of a derivative"),
    _delta("Qwen3.5-4B", 32, 16, 128, 128, 24, 32, source="copy of config.json; a kernel's tests"),
    _delta("Qwen3.5-122B-A10B", 64, 16, 128, 128, 36, 48, source="copies in code; a kernel's tests"),
    _delta("Qwen3.5-397B-A17B", 64, 16, 128, 128, 45, 60, source="a page"),
    _delta("Qwen3.8-27B", 48, 16, 128, 128, 48, None, source="sizes in two public reports agree with it"),
    _delta(
        *("Kimi-Linear-48B-A3B", 32, 32, 128, 128, 20, 27),
        family="kimi_delta",
        source="copies of config.json (transformers' default has 21 recurrent layers)",
    ),
    _delta("OLMo-Hybrid", 30, 30, 96, 192, 24, 32, source="transformers' defaults"),
)

PUBLISHED: dict[str, Geometry] = {row.name: row for row in _ROWS}


def published(name: str) -> Geometry:
    """The geometry called ``name``, in any case; raises InputError that lists the names."""
    for known, geometry in PUBLISHED.items():
        if known.lower() == name.lower():
            return geometry
    raise unknown_name("model", name, PUBLISHED)
