"""What a pool's memory means, bit for bit: slots as a ``DecodeState`` and back, and what is done with whole slots.

``copy_slots``, ``taken_slots``, ``with_room`` and ``exercised_of`` work on the device and do not wait for it;
``dense_of`` and ``store_dense``, which a chunk of a prompt needs, work there too and wait once.
"""

import json
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats import Encoded
from quantlab.formats.random import random_words
from quantlab.recurrences import Records, fold, get_recurrence, solve_deltas
from quantlab.schemes import checks
from quantlab.schemes.pool import LayerPool, SlotCounters, copy_of, encoded_copy, pooled_copy, window_memory
from quantlab.schemes.rows import DRAFTS
from quantlab.schemes.saving import SAVE_VERSION
from quantlab.schemes.state import DecodeState
from quantlab.schemes.store import CHECKPOINT_PART, Diverged

_FIELDS = ("k", "d", "v", "beta", "log_decay")
_ROW_COUNTERS = ("cursor", "origin", "pending", "store_numbers", "sequence_ids")


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

    picked = slice(None) if which is None else rows
    copy = None if pool.policy.read_copy is None else state.read_copy_bits
    _put_stored(pool, slots, state._checkpoint.encoded, copy, picked)
    if records:
        _put_records(pool, slots, state, rows)


def copy_slots(
    pools: Sequence[LayerPool], sources: Tensor, targets: Tensor, *, counters: bool = True
) -> None:
    """Make each of the slots ``targets`` (n,) what the slot of the same place in ``sources`` (n,) was, in every pool.

    int64, on the device, where nobody looks at the numbers: targets are distinct, sources may repeat.  A copy keeps the
    sequence id.  Rings are copied as they stand, so counters, which the pools may share, have to follow: they do unless
    the caller sees to it (counters=False).
    """
    for pool in pools:
        for name, memory in _memory(pool).items():
            getattr(pool, name)[targets] = memory[sources]
    if counters:
        for shared in {id(pool.counters): pool.counters for pool in pools}.values():
            copy_counters(shared, sources, targets)


def copy_counters(counters: SlotCounters, sources: Tensor, targets: Tensor) -> None:
    """``copy_slots`` of the counters alone."""
    for name in _ROW_COUNTERS:
        getattr(counters, name)[targets] = getattr(counters, name)[sources]


def taken_counters(counters: SlotCounters, rows: Tensor) -> SlotCounters:
    """Counters of their own, of the slots ``rows`` (n,), which may repeat."""
    taken = {name: getattr(counters, name)[rows] for name in _ROW_COUNTERS}
    return SlotCounters(**taken, seed=counters.seed.clone())


def taken_slots(pool: LayerPool, rows: Tensor, counters: SlotCounters) -> LayerPool:
    """Memory of its own with what the slots ``rows`` (n,) hold; ``counters`` are those of ``taken_counters``."""
    return replace(pool, counters=counters, **{name: t[rows] for name, t in _memory(pool).items()})


def with_room(pool: LayerPool, drafts: int) -> LayerPool:
    """The same layer with room for ``drafts`` behind its window: memory of its own for the records.

    Record j then stands at position j: the caller sets every origin to 0, once all layers are through.
    """
    old = _rings(pool)
    new = window_memory(pool.policy, pool.family, pool.shape, pool.slots, drafts, pool.device)
    changed = replace(pool, **new)
    if old and changed.records:
        slots = torch.arange(pool.slots, device=pool.device)
        count = min(pool.records, changed.records)
        at = _ring(pool, slots, count)
        for name, ring in _rings(changed).items():
            ring[:, :, :count] = old[name][slots[:, None], :, at].transpose(1, 2)
    return changed


def dense_of(pool: LayerPool, slots: Tensor) -> Tensor:
    """The dense logical states (n, H, V, K) of the slots (n,), decoded checkpoint + window: ``materialize``."""
    decoded = pool.policy.checkpoint.dequantize(_checkpoint(pool, slots)).float()
    cursor = pool.counters.cursor[slots]
    length = int(cursor.max()) if len(cursor) else 0
    if length == 0:
        return decoded
    at, held = _ring(pool, slots, length), {}
    valid = torch.arange(length, device=pool.device) < cursor[:, None]
    for name, ring in _rings(pool).items():
        values = ring[slots[:, None], :, at].float()
        held[name] = torch.where(valid.view(*valid.shape, *[1] * (values.ndim - 2)), values, 0.0)
    recurrence = get_recurrence(pool.family)
    if not pool.raw:
        return fold(recurrence, decoded, Records(held["k"], held["d"], held["log_decay"]))
    records = Records(held["k"], None, held["log_decay"], held["v"], held["beta"])
    return fold(recurrence, decoded, replace(records, d=solve_deltas(recurrence, decoded, records)))


def store_dense(pool: LayerPool, slots: Tensor, dense: Tensor) -> None:
    """Round states (n, H, V, K) into the checkpoints of the slots (n,), and from there into the read copies.

    As the next store of each: it draws the random bits of that number.  Counters, which layers share, stay.
    Raises Diverged, and changes nothing, if a state is not finite.
    """
    dense, stored, copy = dense.detach().float(), pool.policy.checkpoint, pool.policy.read_copy
    finite = torch.isfinite(dense).flatten(1).all(1)
    if not bool(finite.all()):
        raise Diverged("the state holds NaN or Inf", (~finite).nonzero()[:, 0].tolist())
    words, counters = None, pool.counters
    if stored.stochastic:
        numbers, ids = counters.store_numbers[slots] + 1, counters.sequence_ids[slots]
        batch, heads, value_dim, key_dim = dense.shape
        named = numbers, ids, pool.layer, CHECKPOINT_PART
        words = random_words((batch, heads, value_dim, key_dim), int(counters.seed), *named)
    encoded = stored.quantize(dense, words)
    read = None if copy is None else copy.quantize(stored.dequantize(encoded).float())
    _put_stored(pool, slots, encoded, read)


def exercised_of(pool: LayerPool, slots: Tensor) -> dict[str, Tensor | None]:
    """Distinct stores of each slot (n,), hand-off included, that a later token read back, by copy; None without one.

    Derived from the counters: a store is read by the first token behind it, or by the fold that replaces it.  What only
    drafts have read that were all taken back does not count.  A read copy that was replaced before any token came, by
    ``store_dense`` or in a commit of several windows, is counted: the caller knows of it.
    """
    counters = pool.counters
    newest = (counters.cursor[slots] + counters.pending[slots] > 0).long()
    return _exercised(pool, counters.store_numbers[slots], newest)


def exercised_after(pool: LayerPool, tokens: Tensor) -> dict[str, Tensor | None]:
    """``exercised_of`` sequences that have decoded ``tokens`` (n,) single tokens since their prompts."""
    window = pool.policy.window
    return _exercised(pool, tokens // window, (tokens % window > 0).long())


def _exercised(pool: LayerPool, number: Tensor, newest: Tensor) -> dict[str, Tensor | None]:
    """number: of each sequence's last store.  newest: 1 where a token read it since."""
    policy = pool.policy
    if policy.read_copy is None:
        return {"checkpoint": number + newest, "read_copy": None}
    keys = get_recurrence(pool.family).delta_rule and policy.options.key_read == "checkpoint"
    return {"checkpoint": number + newest if keys else number, "read_copy": number + newest}


def _put_stored(
    pool: LayerPool,
    slots: Tensor,
    stored: Encoded,
    copy: Encoded | None,
    picked: slice | Tensor = slice(None),
) -> None:
    """Write the bits of the rows ``picked`` of both copies into the slots."""
    parts = {"checkpoint": stored.codes, "checkpoint_scales": stored.scales}
    if copy is not None:
        assert pool.policy.read_copy is not None
        parts |= pooled_copy(copy, pool.policy.read_copy)
    for name, value in parts.items():
        memory = getattr(pool, name)
        if memory is not None and value is not None:
            value = value[picked].to(memory.device)
            memory[slots] = value.view(len(slots), *memory.shape[1:]).view(memory.dtype)


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


def _memory(pool: LayerPool) -> dict[str, Tensor]:
    """The layer's own tensors by name."""
    return {name: value for name, value in vars(pool).items() if isinstance(value, Tensor)}


def _rings(pool: LayerPool) -> dict[str, Tensor]:
    rings = {name: getattr(pool, f"{name}_buffer") for name in _FIELDS}
    return {name: ring for name, ring in rings.items() if ring is not None}


def _encoded(pool: LayerPool, slots: Tensor) -> dict[str, Encoded]:
    parts = {"checkpoint": _checkpoint(pool, slots)}
    if pool.policy.read_copy is not None:
        copy = {name: part.cpu() for name, part in copy_of(pool, slots).items()}
        parts["read_copy"] = encoded_copy(copy, pool.policy.read_copy)
    return parts


def _checkpoint(pool: LayerPool, slots: Tensor) -> Encoded:
    """The stored bits of the checkpoint, on the device."""
    codes = pool.checkpoint[slots]
    if pool.policy.checkpoint.name in ("bf16", "fp16"):
        codes = codes.view(torch.int16)
    return Encoded(
        codes, None if pool.checkpoint_scales is None else pool.checkpoint_scales[slots][..., None]
    )


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
