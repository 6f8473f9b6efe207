"""The decode states of a model in device memory: every layer's slots, laid out for kernels.

This is the memory that kernels work on in place; ``DecodeState`` stays the truth of what happens to it.  A batch of one
step names a slot for each of its rows, in any order; a negative slot number is a padded row, which nothing is read from
or written to.  Layers share the counters of a slot, so a step is ``begin_step``, ``decode_token`` once a layer, and
``end_step``.

Layout (S slots, H heads, G key heads, V value dim, K key dim, R records; everything contiguous):

    checkpoint        (S, H, V, K)      float32, bfloat16, float16; or codes, int8 or uint8 (fp8)
    checkpoint_scales (S, H, V)         float32, with codes
    copy_codes        (S, H, V, K / 2)  uint8, two 4-bit codes a byte, low nibble = even element; fp8: (S, H, V, K)
    copy_scales       (S, H, V, K / 16) uint8 E4M3; mxfp4: (S, H, V, K / 32) uint8 E8M0; fp8: (S, H, V) float32
    copy_global_scale (S, H)            float32, nvfp4 alone
    copy_key_scales   (S, H, K)         uint8 E8M0, nvfp4+keyscale alone
    k_buffer          (S, G, R, K)      the records of a group are one block of memory; shared by the group's heads
    d_buffer          (S, H, R, V)      what was written along k
    v_buffer          (S, H, R, V)      contents=raw: what d is derived from again
    beta_buffer       (S, H, R)         float32, contents=raw
    log_decay_buffer  (S, H, R)         float32; kimi_delta (S, H, R, K)

Record j of a slot stands at ring position (origin + j) mod R; R is a power of two, the origin any number that leaves
this remainder.  Positions behind the cursor, and behind the drafts that follow it, are undefined memory.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quantlab.errors import InputError
from quantlab.formats import Encoded, Format, pack_nibbles, unpack_nibbles
from quantlab.recurrences import get_recurrence
from quantlab.schemes import checks
from quantlab.schemes.fits import check_policy_fits
from quantlab.schemes.ledger import StateShape, uses_raw
from quantlab.schemes.policy import Policy, parse_policy

COPY_PARTS = ("copy_codes", "copy_scales", "copy_global_scale", "copy_key_scales")
"""The tensors of a pool that hold a read copy."""

BUFFER_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class SlotCounters:
    """What the layers of a model share.

    cursor, origin, pending: int32 (S,), records in the window, ring position of the oldest (mod R), drafts behind the
    cursor.
    store_numbers, sequence_ids: int64 (S,), of the last store (0 = prefill) and of the sequence; with ``seed``, int64
    (1,), they name the random bits of stochastic rounding.  In device memory, so that a captured graph sees them move.
    """

    cursor: Tensor
    origin: Tensor
    pending: Tensor
    store_numbers: Tensor
    sequence_ids: Tensor
    seed: Tensor

    @property
    def slots(self) -> int:
        return self.cursor.shape[0]


@dataclass(frozen=True)
class LayerPool:
    """One layer's memory, as in the module's docstring; parts that the policy has no use for are None."""

    policy: Policy
    family: str
    shape: StateShape
    layer: int
    counters: SlotCounters
    checkpoint: Tensor
    checkpoint_scales: Tensor | None
    copy_codes: Tensor | None
    copy_scales: Tensor | None
    copy_global_scale: Tensor | None
    copy_key_scales: Tensor | None
    k_buffer: Tensor | None
    d_buffer: Tensor | None
    v_buffer: Tensor | None
    beta_buffer: Tensor | None
    log_decay_buffer: Tensor | None

    @property
    def slots(self) -> int:
        return self.checkpoint.shape[0]

    @property
    def device(self) -> torch.device:
        return self.checkpoint.device

    @property
    def records(self) -> int:
        """Ring positions of a window; 0 under @1, which has none."""
        return 0 if self.k_buffer is None else self.k_buffer.shape[2]

    @property
    def raw(self) -> bool:
        return self.v_buffer is not None

    @property
    def held_as(self) -> str:
        """The dtype of the checkpoint's memory, which is codes beside scales for a scaled format."""
        return f"{str(self.checkpoint.dtype).removeprefix('torch.')} of {self.policy.checkpoint.text}"

    @property
    def nbytes(self) -> int:
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))


def allocate_pool(
    policy: str | Policy,
    family: str,
    shape: StateShape,
    slots: int,
    *,
    layers: int | Sequence[int] = 1,
    seed: int = 0,
    drafts: int = 0,
    device: torch.device | str = "cpu",
    counters: SlotCounters | None = None,
) -> list[LayerPool]:
    """Memory for ``slots`` sequences in layers of one shape; counters start as after a hand-off.

    What the memory holds is undefined until ``pool_rows.put_state`` or ``load_states`` fills a slot.  layers: how many
    there are, or the numbers, ascending, that name their random bits (those of the model's layers).  drafts: tokens
    that one verification may add behind a window.  counters: to share with pools of the same window, whatever their
    policies and shapes; the seed and the device are then theirs.

    Raises:
        InputError: the policy does not fit the family, or keeps something that the pool has no layout for.
    """
    policy = parse_policy(policy)
    check_policy_fits(policy, family)
    checks.whole_shape(shape)
    numbers = _layer_numbers(layers)
    for name, value, least in (("slots", slots, 1), ("drafts", drafts, 0)):
        if not checks.is_integer(value) or value < least:
            raise InputError(name, value, f"an integer of at least {least}")
    if not checks.is_integer(seed) or not -(2**63) <= seed < 2**63:
        raise InputError("seed", seed, "an integer of 64 bits")
    if reason := unpoolable(policy, family, shape):
        raise InputError("policy", str(policy), reason)
    if counters is None:
        counters = new_counters(torch.arange(slots, device=device), seed)
    elif counters.slots != slots:
        raise InputError("counters", f"of {counters.slots} slots", f"those of {slots} slots")
    device = counters.cursor.device
    return [_layer(policy, family, shape, slots, n, drafts, counters, device) for n in numbers]


def new_counters(sequence_ids: Tensor, seed: int = 0) -> SlotCounters:
    """Counters as after a hand-off of the sequences int64 (S,), on their device."""
    cursor, origin, pending = (torch.zeros_like(sequence_ids, dtype=torch.int32) for _ in range(3))
    return SlotCounters(
        cursor,
        origin,
        pending,
        store_numbers=torch.zeros_like(sequence_ids),
        sequence_ids=sequence_ids,
        seed=torch.full((1,), seed, dtype=torch.int64, device=sequence_ids.device),
    )


def _layer_numbers(layers: int | Sequence[int]) -> Sequence[int]:
    if checks.is_integer(layers):
        if layers < 1:  # pyright: ignore[reportOperatorIssue]
            raise InputError("layers", layers, "an integer of at least 1")
        return range(layers)  # pyright: ignore[reportArgumentType]
    numbers = list(layers) if isinstance(layers, Sequence) else []
    plain = numbers and all(checks.is_integer(n) and n >= 0 for n in numbers)
    if not plain or numbers != sorted(set(numbers)):
        raise InputError("layers", layers, "how many there are, or their numbers, which go up")
    return numbers


def ring_positions(window: int, drafts: int) -> int:
    """R of a window with room for ``drafts`` behind it; 0 if there is nothing to hold."""
    held = window - 1 + drafts
    return 0 if held == 0 else 1 << (held - 1).bit_length()


def _layer(
    policy: Policy,
    family: str,
    shape: StateShape,
    slots: int,
    layer: int,
    drafts: int,
    counters: SlotCounters,
    device: torch.device,
) -> LayerPool:
    heads, value_dim, key_dim = shape.heads, shape.value_dim, shape.key_dim

    def memory(dtype: torch.dtype | None, *sizes: int) -> Tensor | None:
        return None if dtype is None else torch.empty((slots, *sizes), dtype=dtype, device=device)

    code_dtype, scale_dtype = _checkpoint_dtypes(policy.checkpoint)
    copy = dict.fromkeys(COPY_PARTS)
    if policy.read_copy is not None:
        name = policy.read_copy.name
        packed = key_dim if name == "fp8_e4m3" else key_dim // 2
        copy["copy_codes"] = memory(torch.uint8, heads, value_dim, packed)
        if name == "fp8_e4m3":
            copy["copy_scales"] = memory(torch.float32, heads, value_dim)
        else:
            block = 16 if name == "nvfp4" else 32
            copy["copy_scales"] = memory(torch.uint8, heads, value_dim, key_dim // block)
        copy["copy_global_scale"] = memory(torch.float32 if name == "nvfp4" else None, heads)
        copy["copy_key_scales"] = memory(torch.uint8 if policy.read_copy.key_scale else None, heads, key_dim)
    return LayerPool(
        policy=policy,
        family=family,
        shape=shape,
        layer=layer,
        counters=counters,
        checkpoint=torch.empty((slots, heads, value_dim, key_dim), dtype=code_dtype, device=device),
        checkpoint_scales=memory(scale_dtype, heads, value_dim),
        **copy,
        **window_memory(policy, family, shape, slots, drafts, device),
    )


def window_memory(
    policy: Policy, family: str, shape: StateShape, slots: int, drafts: int, device: torch.device
) -> dict[str, Tensor | None]:
    """The records of a ``LayerPool`` with room for ``drafts`` behind the window, undefined."""
    heads, value_dim, key_dim = shape.heads, shape.value_dim, shape.key_dim
    recurrence, records = get_recurrence(family), ring_positions(policy.window, drafts)

    def memory(dtype: torch.dtype | None, *sizes: int) -> Tensor | None:
        return None if dtype is None else torch.empty((slots, *sizes), dtype=dtype, device=device)

    vectors = BUFFER_DTYPES[policy.options.buffer] if records else None
    raw = vectors if records and uses_raw(policy, recurrence) else None
    gates = recurrence.gate_shape(heads, value_dim, key_dim)
    return {
        "k_buffer": memory(vectors, shape.key_heads, records, key_dim),
        "d_buffer": memory(vectors, heads, records, value_dim),
        "v_buffer": memory(raw, heads, records, value_dim),
        "beta_buffer": memory(None if raw is None else torch.float32, heads, records),
        "log_decay_buffer": memory(torch.float32 if records else None, heads, records, *gates[1:]),
    }


def unpoolable(policy: Policy, family: str, shape: StateShape) -> str | None:
    """What the pool would need to be different, or None if it has a layout for the policy."""
    options, checkpoint, copy = policy.options, policy.checkpoint, policy.read_copy
    if family not in ("mamba2", "gated_delta", "kimi_delta"):
        return f"family mamba2, gated_delta or kimi_delta, not {family}"
    if not _plain(checkpoint) or checkpoint.name not in (
        "fp32",
        "bf16",
        "fp16",
        "fp8_e4m3",
        "int8",
    ):
        return "a checkpoint of fp32, bf16, fp16, fp8 or int8, rounded to nearest or stochastically"
    if checkpoint.name in ("fp8_e4m3", "int8") and checkpoint.granularity != "row":
        return "one scale a value row in the checkpoint"
    if copy is not None:
        granularity = {"nvfp4": "matrix", "fp8_e4m3": "row", "mxfp4": None}
        plain = dataclasses.replace(copy, key_scale=False) if copy.name == "nvfp4" else copy
        if not _plain(plain) or copy.name not in granularity or copy.stochastic:
            return "a read copy of nvfp4, nvfp4+keyscale, mxfp4 or fp8, rounded to nearest"
        if granularity[copy.name] is not None and copy.granularity != granularity[copy.name]:
            return f"{copy.name}:{granularity[copy.name]} as the read copy"
        if shape.key_dim % 32:
            return "a key dim in whole blocks of 32 with a read copy"
    if options.buffer not in BUFFER_DTYPES:
        return "buffer=fp32, bf16 or fp16"
    if options.flush != "full":
        return "flush=full"
    if options.schedule != "flush" or options.dot != "ieee" or options.sites:
        return "the default schedule and dot, and no extra rounding sites"
    if options.current != "exact" or options.ef_read != "exclude":
        return "current=exact and ef_read=exclude"
    return None


def _plain(stored: Format) -> bool:
    """Whether a format is a canonical recipe as it stands."""
    return (
        stored.profile is None
        and stored.hadamard is None
        and not stored.error_feedback
        and stored.text.partition("+")[2] in ("", "sr")
    )


def _checkpoint_dtypes(stored: Format) -> tuple[torch.dtype, torch.dtype | None]:
    """Of the checkpoint's numbers or codes, and of its scales."""
    if stored.name in BUFFER_DTYPES:
        return BUFFER_DTYPES[stored.name], None
    return {"fp8_e4m3": torch.uint8, "int8": torch.int8}[stored.name], torch.float32


def pooled_copy(encoded: Encoded, stored: Format) -> dict[str, Tensor]:
    """The ``COPY_PARTS`` of an encoded read copy (n, H, V, K) that there are, by name."""
    codes = encoded.codes if stored.name == "fp8_e4m3" else pack_nibbles(encoded.codes)
    scales = encoded.scales
    if stored.name == "fp8_e4m3" and scales is not None:
        scales = scales.reshape(scales.shape[:3])
    by_key = None if encoded.key_scales is None else encoded.key_scales.squeeze(-2)
    parts = zip(COPY_PARTS, (codes, scales, encoded.global_scale, by_key), strict=True)
    return {name: part for name, part in parts if part is not None}


def encoded_copy(parts: Mapping[str, Tensor], stored: Format) -> Encoded:
    """The inverse of ``pooled_copy``."""
    codes, scales, global_scale, by_key = (parts.get(name) for name in COPY_PARTS)
    assert codes is not None
    assert scales is not None
    if stored.name == "fp8_e4m3":
        return Encoded(codes, scales[..., None])
    by_key = None if by_key is None else by_key.unsqueeze(-2)
    return Encoded(unpack_nibbles(codes), scales, global_scale, key_scales=by_key)


def copy_of(pool: LayerPool, slots: Tensor) -> dict[str, Tensor]:
    """The ``COPY_PARTS`` of the slots (n,) that the pool has, by name."""
    parts = {name: getattr(pool, name) for name in COPY_PARTS}
    return {name: part[slots] for name, part in parts.items() if part is not None}


def bytes_of_slot(pool: LayerPool) -> int:
    """Device memory of one slot in one layer, counters left out."""
    return math.ceil(pool.nbytes / pool.slots)
