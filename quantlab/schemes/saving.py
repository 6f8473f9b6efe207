"""A decode state as named tensors and back: the stored bits, the window, and every counter."""

import json
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.schemes import checks
from quantlab.schemes.ledger import StateShape
from quantlab.schemes.policy import parse_policy

if TYPE_CHECKING:
    from quantlab.schemes.rows import StateRows

State = TypeVar("State", bound="StateRows")

SAVE_VERSION = 2
_COUNTERS = {
    "numbers": torch.int64,
    "sequence_ids": torch.int64,
    "unread": torch.bool,
    "read_stores": torch.int64,
}
"""What a save holds of a store beside its bits, one a row."""
_ARITHMETIC = {"float32": torch.float32, "float64": torch.float64}


def tensors(state: "StateRows", rows: Tensor | None = None) -> dict[str, Tensor]:
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
    if state.heads is not None:
        meta["heads"] = state.heads
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


def restored(make: type[State], saved: dict[str, Tensor]) -> State:
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


def check_place(state: "StateRows", rows: Tensor, other: "StateRows") -> None:
    """InputError unless ``place`` can do it."""
    for name, mine, theirs in (
        ("policy", str(state.policy), str(other.policy)),
        ("family", state.recurrence.name, other.recurrence.name),
        ("shape", state.shape, other.shape),
        ("seed", state.seed, other.seed),
        ("layer", state.layer, other.layer),
        ("heads", state.heads, other.heads),
        ("arithmetic", state.dtype, other.dtype),
        ("drafts", state.drafts, other.drafts),
        ("rows", len(rows), other.batch),
    ):
        if mine != theirs:
            raise InputError(f"{name} of the state to place", theirs, str(mine))


def place(state: "StateRows", rows: Tensor, other: "StateRows") -> None:
    """See DecodeState.place; ``check_place`` found nothing against it."""
    for part, store in state._stores().items():
        store.place(rows, other._stores()[part])
        state._unread[part] = state._unread[part].index_copy(0, rows, other._unread[part])
        state._read_stores[part] = state._read_stores[part].index_copy(0, rows, other._read_stores[part])
    state._buffer.place(rows, other._buffer)


def _restored(make: type[State], saved: dict[str, Tensor], meta: dict[str, Any]) -> State:
    saved = {name: value.clone() for name, value in saved.items()}  # the caller's to change
    cursor, shape = saved["buffer.cursor"], StateShape(**meta["shape"])
    checks.whole_shape(shape)
    checks.options(
        meta["family"], shape, saved.get("rates"), meta["seed"], meta["layer"], meta["drafts"], cursor.device
    )
    state = make(
        parse_policy(meta["policy"]),
        meta["family"],
        shape,
        len(cursor),
        rates=saved.get("rates"),
        seed=meta["seed"],
        layer=meta["layer"],
        drafts=meta["drafts"],
        arithmetic=_ARITHMETIC[meta["arithmetic"]],
        heads=meta.get("heads"),
        device=cursor.device,
    )
    dense = (len(cursor), shape.heads, shape.value_dim, shape.key_dim)
    for part, store in state._stores().items():
        for name, dtype in _COUNTERS.items():
            tensor = saved[f"{part}.{name}"]
            if tensor.dtype != dtype or tensor.shape != cursor.shape:
                given = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise InputError(f"{part}.{name}", given, f"{dtype} of shape {tuple(cursor.shape)}")
        for name, dtype, wanted in (
            ("codes", None, dense),
            ("live", torch.bool, dense[:1]),
            ("unrounded", state.dtype, dense),
        ):
            tensor = saved.get(f"{part}.{name}")
            if tensor is not None and (tensor.shape != wanted or tensor.dtype != (dtype or tensor.dtype)):
                given = f"{tensor.dtype} {tuple(tensor.shape)}"
                raise InputError(f"{part}.{name}", given, f"{dtype or 'codes'} of shape {wanted}")
        store.load(_under(saved, part))
        if store.decoded.shape != dense:
            raise InputError(f"{part}.codes", tuple(store.decoded.shape), f"shape {dense}")
        if bool(store.format.error_feedback) != (store.residual is not None):
            raise InputError(f"{part}.residual", None, f"the residual of {store.format.text}")
        state._unread[part] = saved[f"{part}.unread"].clone()
        state._read_stores[part] = saved[f"{part}.read_stores"].clone()
    _fill_buffer(state, saved)
    # Of some rows alone, none may be unrounded though others of the batch were.
    optional = {f"{part}.{name}" for part in state._stores() for name in ("live", "unrounded")}
    unknown = saved.keys() - tensors(state).keys() - optional
    if unknown:
        raise InputError("tensors", sorted(unknown), "none but those of save()")
    return state


def _fill_buffer(state: "StateRows", saved: dict[str, Tensor]) -> None:
    buffer, cursor, origin = state._buffer, saved["buffer.cursor"], saved["buffer.origin"]
    # With flush=early the window may stand full between two forwards.
    most = buffer.window if state.policy.options.flush == "early" else buffer.window - 1
    for name, value, limit in (
        ("cursor", cursor, most),
        ("origin", origin, buffer.capacity - 1),
    ):
        if value.dtype != torch.int64 or value.shape != cursor.shape:
            raise InputError(f"buffer.{name}", f"{value.dtype} {tuple(value.shape)}", "int64, one a row")
        if bool(((value < 0) | (value > limit)).any()):
            raise InputError(f"buffer.{name}", value.tolist(), f"0 to {limit} in every row")
    fields = {n: t for n, t in _under(saved, "buffer").items() if n not in ("cursor", "origin")}
    shape = state.shape
    head, value = (shape.heads,), (shape.heads, shape.value_dim)
    expected = {
        "k": (shape.key_heads, shape.key_dim),
        "d": value,
        "log_decay": state.recurrence.gate_shape(shape.heads, shape.value_dim, shape.key_dim),
    } | ({"v": value, "beta": head} if buffer.raw else {})
    if fields.keys() != expected.keys() and (fields or bool(cursor.any())):
        raise InputError("buffer", sorted(fields), f"records with {', '.join(expected)}")
    for name, tensor in fields.items():
        wanted = (len(cursor), buffer.capacity, *expected[name])
        if tensor.dtype != state.dtype or tuple(tensor.shape) != wanted:
            given = f"{tensor.dtype} {tuple(tensor.shape)}"
            raise InputError(f"buffer.{name}", given, f"{state.dtype} of shape {wanted}")
    buffer.fields, buffer.cursor, buffer.origin = fields, cursor, origin


def _under(saved: dict[str, Tensor], part: str) -> dict[str, Tensor]:
    prefix = part + "."
    return {name[len(prefix) :]: value for name, value in saved.items() if name.startswith(prefix)}
