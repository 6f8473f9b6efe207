"""typeseg's own Mamba-1 forward, layer by layer and batched, with the scan taken out.

Every dense operation is typeseg's (numpy, float32).  Its block calls the scan twice, forward and on reversed inputs;
here the block runs once with a scan that only records, all recorded scans of all rows go to the caller's scan in one
batch, and the block runs again with the answers.  The dense part is cheap beside 512 sequential steps.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from quantlab.errors import InputError

Array = np.ndarray
DIRECTIONS = ("forward", "reverse")


@dataclass(frozen=True)
class ScanInputs:
    """The decode inputs of both scans of one layer; rows are directions x documents, direction-major.

    ``x``, ``dt`` (rows, T, V), ``key``, ``query`` (rows, T, K) float32, ``rates`` (V, K) float32 negative.
    Reverse rows are already reversed in time.
    """

    x: torch.Tensor
    dt: torch.Tensor
    key: torch.Tensor
    query: torch.Tensor
    rates: torch.Tensor

    def select(self, rows: torch.Tensor) -> "ScanInputs":
        """The rows named by ``rows``."""
        return ScanInputs(self.x[rows], self.dt[rows], self.key[rows], self.query[rows], rates=self.rates)

    def cat(self, other: "ScanInputs") -> "ScanInputs":
        """Both batches of one layer as one batch, ``self`` first."""
        pairs = zip(
            (self.x, self.dt, self.key, self.query), (other.x, other.dt, other.key, other.query), strict=True
        )
        return ScanInputs(*(torch.cat(pair) for pair in pairs), rates=self.rates)


#: ``scan(layer, inputs) -> outputs`` (rows, T, V), without the skip ``D x``.
Scan = Callable[[int, ScanInputs], torch.Tensor]


@functools.cache
def _typeseg() -> tuple[Any, Any, dict[str, Any]]:
    """typeseg's kernel module, its weights and its manifest; InputError with the install line where it is absent."""
    if importlib.util.find_spec("typeseg") is None:
        raise InputError("package", "typeseg", "it installed: pip install 'quantlab[study]'")
    runtime = importlib.import_module("typeseg._runtime")
    manifest = runtime._manifest()
    weights = runtime._weights(manifest["mamba"]["file"])
    return importlib.import_module("typeseg._mamba_kernel"), weights, manifest


def labels() -> list[str]:
    """The names of the 35 output labels, in the order of the logits."""
    return list(_typeseg()[2]["labels"])


def layer_count() -> int:
    """Mamba blocks of the network; every block holds two scans."""
    return int(_typeseg()[2]["mamba"]["n_layers"])


def version() -> str:
    """The version of the installed typeseg."""
    return importlib.metadata.version("typeseg")


def tokens(texts: list[str]) -> Array:
    """Byte tokens (documents, T) as typeseg makes them; InputError when the texts differ in bytes."""
    _typeseg()
    tokenize = importlib.import_module("typeseg._tokenize")
    rows = [tokenize.text_to_bytes(text) for text in texts]
    if len({len(row) for row in rows}) != 1:
        raise InputError("texts", [len(row) for row in rows], "documents of one length in bytes")
    return np.stack(rows)


def stock_logits(byte_tokens: Array) -> Array:
    """Logits (T, 35) of typeseg's own forward with its own sequential scan, for one document (T,)."""
    kernel, weights, manifest = _typeseg()
    return kernel.mamba_forward(np, weights, byte_tokens, **_block_sizes(manifest), n_layers=layer_count())


class StockScan(NamedTuple):
    """What typeseg handed to one of its scans: x, dt (T, V), key, query (T, K), rates (V, K), skip (V,), float32."""

    x: Array
    dt: Array
    key: Array
    query: Array
    rates: Array
    skip: Array


def stock_scan(scan: StockScan) -> Array:
    """Outputs (T, V) of typeseg's own sequential scan, without the skip ``D x``."""
    kernel = _typeseg()[0]
    return kernel._selective_scan_seq(np, *scan._replace(skip=np.zeros_like(scan.skip)))


def stock_scans(byte_tokens: Array) -> list[StockScan]:
    """The inputs of every scan in typeseg's own forward on one document (T,): layer by layer, forward then reverse."""
    kernel, weights, manifest = _typeseg()
    recorded: list[StockScan] = []

    def scan(xp: Any, *inputs: Array) -> Array:
        recorded.append(StockScan(*inputs))
        return kernel._selective_scan_seq(xp, *inputs)

    kernel.mamba_forward(
        np, weights, byte_tokens, **_block_sizes(manifest), n_layers=layer_count(), scan=scan
    )
    return recorded


def _block_sizes(manifest: dict[str, Any]) -> dict[str, int]:
    return {name: int(manifest["mamba"][name]) for name in ("d_state", "dt_rank", "d_conv")}


def forward(byte_tokens: Array, scan: Scan) -> Array:
    """Logits (documents, T, 35) float32 of the whole network on ``byte_tokens`` (documents, T), scans by ``scan``."""
    kernel, weights, manifest = _typeseg()
    sizes = _block_sizes(manifest)
    hidden = [kernel._embed(np, weights, row).astype(np.float32) for row in byte_tokens]
    for layer in range(layer_count()):
        prefix = f"CheckpointMambaBlock1D_{layer}/"
        skip, rates = weights[prefix + "D"], -np.exp(weights[prefix + "A_log"])
        recorded: list[list[tuple[Array, ...]]] = []
        for row in hidden:
            calls: list[tuple[Array, ...]] = []
            kernel._mamba_block(np, weights, layer, row, **sizes, scan=_recorder(calls))
            recorded.append(calls)
        inputs = _batch(recorded, rates)
        outputs = scan(layer, inputs).to(torch.float32) + inputs.x * torch.from_numpy(skip)
        answers = outputs.unflatten(0, (len(DIRECTIONS), len(hidden))).numpy()
        hidden = [
            kernel._mamba_block(np, weights, layer, row, **sizes, scan=_player(list(answers[:, index])))
            for index, row in enumerate(hidden)
        ]
    scale, bias = weights["LayerNorm_0/scale"], weights["LayerNorm_0/bias"]
    kernel_out, bias_out = weights["Dense_0/kernel"], weights["Dense_0/bias"]
    return np.stack(
        [kernel._layernorm(np, row, scale, bias, eps=1e-6) @ kernel_out + bias_out for row in hidden]
    )


def _recorder(calls: list[tuple[Array, ...]]) -> Callable[..., Array]:
    def scan(_xp: Any, u: Array, dt: Array, key: Array, query: Array, _rates: Array, _skip: Array) -> Array:
        calls.append((u, dt, key, query))
        return np.zeros_like(u)

    return scan


def _player(answers: list[Array]) -> Callable[..., Array]:
    """Answers the forward call, then the reverse call."""
    remaining = iter(answers)
    return lambda *_: next(remaining)


def _batch(recorded: list[list[tuple[Array, ...]]], rates: Array) -> ScanInputs:
    stacked = [
        torch.from_numpy(
            np.stack([calls[direction][part] for direction in range(len(DIRECTIONS)) for calls in recorded])
        )
        for part in range(4)
    ]
    return ScanInputs(*stacked, rates=torch.from_numpy(rates))
