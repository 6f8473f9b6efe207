"""How each peer's function is called to verify T drafted tokens of one layer where a state is stored for every draft.

That is how engines without a window take back a rejection: a sequence has T slots, the state after draft t is stored in
slot t, and the next verification begins from the slot of the last draft that was accepted.  All are accepted here.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quantlab.kernels.bench_cases import Case
from quantlab.kernels.bench_peer_calls import Call, Draw, mamba_token, supported
from quantlab.recurrences import StepInputs, get_recurrence


def stored_state_updates(function: Callable[..., Any], case: Case, device: torch.device, seed: int) -> Call:
    """Mamba-2."""
    draw = _draw(case, device, seed)
    states, token = draw.states(extra=1), mamba_token(draw)
    slots, out = _slots(draw, case), torch.empty_like(token.x)
    arguments = supported(
        function,
        state=states,
        state_batch_indices=slots,
        out=out,
        **_sequences(case, device),
        **token.arguments(draw.case),
    )
    return Call(
        lambda phase: function(**arguments),
        lambda: _by_draft(out, case),
        token.token().map(lambda t: _by_draft(t, case)),
        lambda phase: states[slots[:, -1].long()].double(),
    )


def stored_delta_states(function: Callable[..., Any], case: Case, device: torch.device, seed: int) -> Call:
    """GDN and KDA, states (S, H, V, K)."""
    draw, shape = _draw(case, device, seed), case.shape
    rows = draw.case.batch
    states, slots = draw.states(extra=1), _slots(draw, case)
    gate = get_recurrence(case.family).gate_shape(shape.heads, shape.value_dim, shape.key_dim)
    token = StepInputs(
        q=draw.normal(rows, shape.key_heads, shape.key_dim) * shape.key_dim**-0.5,
        k=F.normalize(
            draw.normal(rows, shape.key_heads, shape.key_dim, dtype=torch.float32), dim=-1
        ).bfloat16(),
        v=draw.normal(rows, shape.heads, shape.value_dim),
        log_decay=-draw.uniform(0.0, 0.2, rows, *gate),
        beta=torch.sigmoid(draw.normal(rows, shape.heads, dtype=torch.float32)),
    )
    one = token.map(lambda t: t[None])
    arguments = supported(
        function,
        q=one.q,
        k=one.k,
        v=one.v,
        g=one.log_decay,
        beta=one.beta,
        scale=1.0,
        initial_state=states,
        inplace_final_state=True,
        state_v_first=True,
        ssm_state_indices=slots,
        **_sequences(case, device),
    )
    found: dict[str, Tensor] = {}

    def run(phase: int) -> None:
        found["out"] = function(**arguments)[0]

    return Call(
        run,
        lambda: _by_draft(found["out"][0], case),
        token.map(lambda t: _by_draft(t.double(), case)),
        lambda phase: states[slots[:, -1].long()].double(),
    )


def _draw(case: Case, device: torch.device, seed: int) -> Draw:
    """Of a row, and of a slot, a draft."""
    return Draw(replace(case, batch=case.batch * case.drafts, drafts=0), device, seed)


def _slots(draw: Draw, case: Case) -> Tensor:
    return draw.slots().view(case.batch, case.drafts)


def _sequences(case: Case, device: torch.device) -> dict[str, Tensor]:
    """Where each sequence begins among the rows, and how many drafts of its last verification were accepted."""
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=device) * case.drafts
    accepted = torch.full((case.batch,), case.drafts, dtype=torch.int32, device=device)
    return {"cu_seqlens": starts, "num_accepted_tokens": accepted}


def _by_draft(rows: Tensor, case: Case) -> Tensor:
    """(B T, ...) -> (B, T, ...)."""
    return rows.view(case.batch, case.drafts, *rows.shape[1:])
