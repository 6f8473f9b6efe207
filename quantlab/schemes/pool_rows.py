"""Slots of a layer's pool as a ``DecodeState`` and back: the meaning of the pool's memory, bit for bit."""

import json

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats import Encoded
from quantlab.schemes import checks
from quantlab.schemes.pool import LayerPool, encoded_copy, pooled_copy
from quantlab.schemes.rows import DRAFTS
from quantlab.schemes.saving import SAVE_VERSION
from quantlab.schemes.state import DecodeState

_FIELDS = ("k", "d", "v", "beta", "log_decay")


def state_of(pool: LayerPool, slots: Tensor) -> DecodeState:
    """The decode state, on the CPU, of the slots (n,) in this order; drafts behind a cursor come along.

    Its ``exercised`` counts start over: the pool does not keep them.
    """
    slots = checks.rows(slots, pool.slots, distinct=True).to(pool.device)
    counters = pool.counters
    count, names = len(slots), ("numbers", "sequence_ids")
    saved = {"meta": _meta(pool)}
    for part, encoded in _encoded(pool, slots).items():
        saved |= {f"{part}.{name}": value.cpu() for name, value in vars(encoded).items() if value is not None}
        for name, source in zip(names, (counters.store_numbers, counters.sequence_ids), strict=True):
            saved[f"{part}.{name}"] = source[slots].cpu()
        saved[f"{part}.unread"] = torch.ones(count, dtype=torch.bool)
        saved[f"{part}.read_stores"] = torch.zeros(count, dtype=torch.int64)
    cursor, pending = counters.cursor[slots].cpu().long(), counters.pending[slots].cpu().long()
    saved |= {"buffer.cursor": cursor, "buffer.origin": torch.zeros_like(cursor)}
    if pool.records:
        capacity = _capacity(pool)
        at = _ring(pool, slots, pool.records)
        for name, ring in _rings(pool).items():
            held = ring[slots[:, None], :, at].float().cpu()
            padding = held.new_full((count, capacity - pool.records, *held.shape[2:]), torch.nan)
            saved[f"buffer.{name}"] = torch.cat([held, padding], 1)
    state = DecodeState.restore(saved)
    state._buffer.pending = pending
    return state


def put_state(
    pool: LayerPool,
    slots: Tensor,
    state: DecodeState,
    *,
    which: Tensor | None = None,
    counters: bool = True,
    records: bool = True,
) -> None:
    """Make the slots (n,) what the rows of ``state`` are, or those of its rows that ``which`` names.

    counters: whether cursors, store numbers and sequence ids, which all layers share, are written too; without them the
    records are placed from each slot's own origin.  records: whether those are written.

    Raises InputError unless the state has the pool's policy, family, shape and layer.
    """
    for name, mine, theirs in (
        ("policy", str(pool.policy), str(state.policy)),
        ("family", pool.family, state.recurrence.name),
        ("shape", pool.shape, state.shape),
        ("layer", pool.layer, state.layer),
    ):
        if mine != theirs:
            raise InputError(f"{name} of the state to put", theirs, str(mine))
    slots = checks.rows(slots, pool.slots, distinct=True).to(pool.device)
    rows = torch.arange(state.batch) if which is None else checks.rows(which, state.batch)
    if len(rows) != len(slots):
        raise InputError("slots", len(slots), f"{len(rows)}, one a row")
    shared = pool.counters
    if counters:
        shared.origin[slots] = 0
        shared.cursor[slots] = state.cursor[rows].int().to(pool.device)
        shared.pending[slots] = state.pending[rows].int().to(pool.device)
        checkpoint = state._checkpoint
        shared.store_numbers[slots] = checkpoint.numbers[rows].to(pool.device)
        shared.sequence_ids[slots] = checkpoint.sequence_ids[rows].to(pool.device)

    def put(memory: Tensor | None, value: Tensor | None) -> None:
        if memory is not None and value is not None:
            memory[slots] = value[rows].to(memory.device).view(memory[slots].shape).view(memory.dtype)

    encoded = state._checkpoint.encoded
    put(pool.checkpoint, encoded.codes)
    put(pool.checkpoint_scales, encoded.scales)
    if pool.policy.read_copy is not None:
        parts = pooled_copy(state.read_copy_bits, pool.policy.read_copy)
        for memory, value in zip(
            (pool.copy_codes, pool.copy_scales, pool.copy_global_scale), parts, strict=True
        ):
            put(memory, value)
    if records:
        _put_records(pool, slots, state, rows)


def _put_records(pool: LayerPool, slots: Tensor, state: DecodeState, rows: Tensor) -> None:
    held = state._buffer.cursor[rows] + state._buffer.pending[rows]
    most = int(held.max()) if len(held) and state._buffer.fields else 0
    if most == 0:
        return
    fields = state._buffer._ordered(rows, most)
    used = torch.arange(most) < held[:, None]
    at = _ring(pool, slots, most)
    for name, ring in _rings(pool).items():
        for j in range(most):
            here = used[:, j].nonzero()[:, 0]
            where = here.to(pool.device)
            ring[slots[where], :, at[where, j]] = fields[name][here, j].to(ring)


def _ring(pool: LayerPool, slots: Tensor, count: int) -> Tensor:
    """Ring positions (n, count) of the first records of the slots."""
    origin = pool.counters.origin[slots].long()
    return (origin[:, None] + torch.arange(count, device=pool.device)) % pool.records


def _rings(pool: LayerPool) -> dict[str, Tensor]:
    rings = {name: getattr(pool, f"{name}_buffer") for name in _FIELDS}
    return {name: ring for name, ring in rings.items() if ring is not None}


def _encoded(pool: LayerPool, slots: Tensor) -> dict[str, Encoded]:
    codes = pool.checkpoint[slots]
    if pool.policy.checkpoint.name in ("bf16", "fp16"):
        codes = codes.view(torch.int16)
    scales = None if pool.checkpoint_scales is None else pool.checkpoint_scales[slots][..., None]
    parts = {"checkpoint": Encoded(codes, scales)}
    if pool.policy.read_copy is not None:
        assert pool.copy_codes is not None
        assert pool.copy_scales is not None
        shared = None if pool.copy_global_scale is None else pool.copy_global_scale[slots]
        copy = pool.copy_codes[slots].cpu(), pool.copy_scales[slots].cpu(), shared
        parts["read_copy"] = encoded_copy(*copy, pool.policy.read_copy)
    return parts


def _drafts(pool: LayerPool) -> int:
    """Of a DecodeState whose ring is at least as long as the pool's."""
    return max(DRAFTS, pool.records)


def _capacity(pool: LayerPool) -> int:
    return 1 << (max(1, pool.policy.window - 1 + _drafts(pool)) - 1).bit_length()


def _meta(pool: LayerPool) -> Tensor:
    meta = {
        "version": SAVE_VERSION,
        "policy": str(pool.policy),
        "family": pool.family,
        "shape": vars(pool.shape),
        "seed": int(pool.counters.seed),
        "layer": pool.layer,
        "drafts": _drafts(pool),
        "arithmetic": "float32",
    }
    return torch.tensor(list(json.dumps(meta).encode()), dtype=torch.uint8)
