"""A decode state as named tensors and back: the stored bits, the window, and every counter."""

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.schemes import checks
from quantlab.schemes.ledger import StateShape
from quantlab.schemes.policy import parse_policy

if TYPE_CHECKING:
    from quantlab.schemes.state import DecodeState

SAVE_VERSION = 2
_COUNTERS = {
    "numbers": torch.int64,
    "sequence_ids": torch.int64,
    "unread": torch.bool,
    "read_stores": torch.int64,
}
"""What a save holds of a store beside its bits, one a row."""
_ARITHMETIC = {"float32": torch.float32, "float64": torch.float64}


def tensors(state: "DecodeState", rows: Tensor | None = None) -> dict[str, Tensor]:
    """See DecodeState.save."""
    meta = {
        "version": SAVE_VERSION,
        "policy": str(state.policy),
        "family": state.recurrence.name,
        "shape": vars(state.shape),
        "seed": state.seed,
        "layer": state.layer,
        "drafts": state.drafts,
        "arithmetic": str(state.dtype).removeprefix("torch."),
    }
    saved = {"meta": torch.tensor(list(json.dumps(meta).encode()), dtype=torch.uint8)}
    per_row = {
        f"{part}.{n}": t for part, store in state._stores().items() for n, t in store.tensors().items()
    }
    buffer = state._buffer
    per_row |= {f"buffer.{name}": value for name, value in buffer.fields.items()}
    per_row |= {"buffer.cursor": buffer.cursor, "buffer.origin": buffer.origin}
    for part in state._unread:
        per_row[f"{part}.unread"] = state._unread[part]
        per_row[f"{part}.read_stores"] = state._read_stores[part]
    saved |= {name: value.clone() if rows is None else value[rows] for name, value in per_row.items()}
    if state.rates is not None:
        saved["rates"] = state.rates.clone()
    return saved


def restored(make: "type[DecodeState]", saved: dict[str, Tensor]) -> "DecodeState":
    """See DecodeState.restore."""
    meta = checks.saved_meta(saved, SAVE_VERSION)
    try:
        return _restored(make, saved, meta)
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError("saved state", sorted(saved), f"all tensors of save(): {error!r}") from error
    except InputError as error:
        if error.argument == "saved state":
            raise
        raise InputError("saved state", f"{error.argument} {error.value}", error.expected) from error


def place(state: "DecodeState", rows: Tensor, other: "DecodeState") -> None:
    """See DecodeState.place."""
    for name, mine, theirs in (
        ("policy", str(state.policy), str(other.policy)),
        ("family", state.recurrence.name, other.recurrence.name),
        ("shape", state.shape, other.shape),
        ("seed", state.seed, other.seed),
        ("layer", state.layer, other.layer),
        ("arithmetic", state.dtype, other.dtype),
        ("drafts", state.drafts, other.drafts),
        ("rows", len(rows), other.batch),
    ):
        if mine != theirs:
            raise InputError(f"{name} of the state to place", theirs, str(mine))
    for part, store in state._stores().items():
        store.place(rows, other._stores()[part])
        state._unread[part][rows] = other._unread[part]
        state._read_stores[part][rows] = other._read_stores[part]
    state._buffer.place(rows, other._buffer)


def _restored(make: "type[DecodeState]", saved: dict[str, Tensor], meta: dict[str, Any]) -> "DecodeState":
    cursor = saved["buffer.cursor"]
    state = make(
        parse_policy(meta["policy"]),
        meta["family"],
        StateShape(**meta["shape"]),
        len(cursor),
        rates=saved.get("rates"),
        seed=meta["seed"],
        layer=meta["layer"],
        drafts=meta["drafts"],
        arithmetic=_ARITHMETIC[meta["arithmetic"]],
    )
    shape = (len(cursor), *vars(state.shape).values())[:4]
    for part, store in state._stores().items():
        for name, dtype in _COUNTERS.items():
            tensor = saved[f"{part}.{name}"]
            if tensor.dtype != dtype or tensor.shape != cursor.shape:
                given = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise InputError(f"{part}.{name}", given, f"{dtype} of shape {tuple(cursor.shape)}")
        store.load(_under(saved, part))
        if store.decoded.shape != shape:
            raise InputError(f"{part}.codes", tuple(store.decoded.shape), f"shape {shape}")
        if bool(store.format.error_feedback) != (store.residual is not None):
            raise InputError(f"{part}.residual", None, f"the residual of {store.format.text}")
        state._unread[part] = saved[f"{part}.unread"].clone()
        state._read_stores[part] = saved[f"{part}.read_stores"].clone()
    _fill_buffer(state, saved)
    return state


def _fill_buffer(state: "DecodeState", saved: dict[str, Tensor]) -> None:
    buffer, cursor, origin = state._buffer, saved["buffer.cursor"], saved["buffer.origin"]
    for name, value, limit in (
        ("cursor", cursor, buffer.window if state._early else buffer.window - 1),
        ("origin", origin, buffer.capacity - 1),
    ):
        if value.dtype != torch.int64 or value.shape != cursor.shape:
            raise InputError(f"buffer.{name}", f"{value.dtype} {tuple(value.shape)}", "int64, one a row")
        if bool(((value < 0) | (value > limit)).any()):
            raise InputError(f"buffer.{name}", value.tolist(), f"0 to {limit} in every row")
    counters = ("cursor", "origin")
    fields = {n: t.clone() for n, t in _under(saved, "buffer").items() if n not in counters}
    lead = (len(cursor), buffer.capacity)
    for name, value in fields.items():
        if tuple(value.shape[:2]) != lead:
            raise InputError(f"buffer.{name}", tuple(value.shape), f"shape {lead} and the record's")
    if bool(cursor.any()) and not fields:
        raise InputError("buffer", None, "the records that buffer.cursor counts")
    buffer.fields, buffer.cursor, buffer.origin = fields, cursor.clone(), origin.clone()


def _under(saved: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    prefix = part + "."
    return {name[len(prefix) :]: value for name, value in saved.items() if name.startswith(prefix)}
