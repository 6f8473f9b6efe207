"""Pools in the middle of decoding: random states and records, the rows' cursors spread over the window."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from quantlab.kernels.bench_cases import Case
from quantlab.recurrences import DecayAxis, StepInputs, get_recurrence
from quantlab.schemes.ledger import StateShape
from quantlab.schemes.pool import LayerPool, allocate_pool

STATES_AT_ONCE = 2**28
"""Elements of prefill states that exist beside the pool while it is filled."""


@dataclass(frozen=True)
class Layers:
    """A model's layers for one batch: pools of one shape, slots int32 (batch,), one token's (or the drafts') inputs a
    layer, outputs; accepted int32 (batch,), the drafts that a commit takes, all of them.
    """

    pools: list[LayerPool]
    slots: Tensor
    inputs: list[StepInputs]
    outputs: list[Tensor]
    accepted: Tensor

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for pool in self.pools)


def desynchronised_cursors(batch: int, window: int, drafts: int = 1) -> Tensor:
    """int32 (batch,), spread over the cursors that ``drafts`` tokens a round lead to from an empty window: at every
    round as many rows flush, +-1 of single tokens.
    """
    rounds = window // math.gcd(window, drafts)
    return (torch.arange(batch) * rounds // batch * drafts % window).int()


def desynchronised_pool(
    case: Case,
    layers: int,
    load: Callable[[LayerPool, Tensor, Tensor], None],
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
) -> Layers:
    """Pools as they are in the middle of decoding; the rows stand in random slots.

    load: ``load_states`` of the kernels (or of the torch twin), which hands the prefill states over.  dtype: of q, k, v
    and the outputs; gates and write strengths are float32.  After ``case.rounds`` every cursor is where it was.
    """
    device = torch.device(device)
    generator = torch.Generator(device).manual_seed(seed)
    options = {"layers": layers, "seed": seed, "drafts": case.drafts, "device": device}
    pools = allocate_pool(case.parsed, case.family, case.shape, case.batch, **options)
    order = torch.randperm(case.batch, generator=torch.Generator().manual_seed(seed))
    slots = order.int().to(device)
    at_once = max(1, STATES_AT_ONCE // case.shape.values)
    inputs, outputs = [], []
    for pool in pools:
        for part in slots.split(at_once):
            load(pool, part, prefill_states(case.shape, len(part), generator))
        fill_records(pool, generator)
        token = random_token(case.family, case.shape, case.batch, generator, dtype, case.drafts)
        inputs.append(token)
        outputs.append(torch.empty_like(token.v))
    counters = pools[0].counters
    cursors = desynchronised_cursors(case.batch, case.parsed.window, max(case.drafts, 1))
    counters.cursor[slots.long()] = cursors.to(device)
    counters.origin.zero_()
    counters.store_numbers.fill_(1)
    accepted = torch.full((case.batch,), case.drafts, dtype=torch.int32, device=device)
    return Layers(pools, slots, inputs, outputs, accepted)


def prefill_states(shape: StateShape, count: int, generator: torch.Generator) -> Tensor:
    """float32 (count, H, V, K)."""
    sizes = (count, shape.heads, shape.value_dim, shape.key_dim)
    return torch.randn(sizes, generator=generator, device=generator.device) / 8


def random_token(
    family: str,
    shape: StateShape,
    batch: int,
    generator: torch.Generator,
    dtype: torch.dtype = torch.bfloat16,
    drafts: int = 0,
) -> StepInputs:
    """Inputs of one token that keep a state in its range: unit keys, decays of 0.82 to 1, strengths of 0 to 1.

    drafts: so many tokens instead, in a dimension behind the batch.
    """
    recurrence = get_recurrence(family)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator, device=generator.device)

    lead = (batch, drafts) if drafts else (batch,)
    k = F.normalize(normal(*lead, shape.key_heads, shape.key_dim), dim=-1)
    q = normal(*lead, shape.key_heads, shape.key_dim) / shape.key_dim**0.5
    gate = recurrence.gate_shape(shape.heads, shape.value_dim, shape.key_dim)
    beta = torch.sigmoid(normal(*lead, shape.heads)) if recurrence.delta_rule else None
    return StepInputs(
        q=q.to(dtype),
        k=k.to(dtype),
        v=normal(*lead, shape.heads, shape.value_dim).to(dtype),
        log_decay=-0.2 * torch.rand((*lead, *gate), generator=generator, device=generator.device),
        beta=beta,
    )


def fill_records(pool: LayerPool, generator: torch.Generator) -> None:
    """Random records at every ring position, used or not, of the size that decoding would leave."""

    def draw(ring: Tensor) -> Tensor:
        return torch.randn(ring.shape, generator=generator, device=generator.device)

    if pool.k_buffer is not None:
        pool.k_buffer.copy_(F.normalize(draw(pool.k_buffer), dim=-1))
    for ring in (pool.d_buffer, pool.v_buffer):
        if ring is not None:
            ring.copy_(draw(ring))
    if pool.beta_buffer is not None:
        pool.beta_buffer.copy_(torch.sigmoid(draw(pool.beta_buffer)))
    if pool.log_decay_buffer is not None:
        # A key channel's decay is one of many in a sum; a head's is the whole of it.
        size = 0.05 if get_recurrence(pool.family).axis is DecayAxis.KEY else 0.2
        pool.log_decay_buffer.copy_(-size * draw(pool.log_decay_buffer).abs().clamp(max=1))
