"""Which op of ``backend`` serves the reads of a decode state, and the state's stored bits as its arguments."""

import torch
from torch import Tensor

from quantlab.formats import pack_nibbles
from quantlab.recurrences import StepInputs
from quantlab.schemes.policy import Policy
from quantlab.schemes.state import DecodeState


def read_op(policy: Policy, family: str) -> str | None:
    """The op that reads for steps that do not flush under ``policy``, or None if only torch does."""
    copy = policy.read_copy
    if family != "mamba2" or copy is None or copy.name != "nvfp4" or copy.granularity != "matrix":
        return None
    # A library's global value has its own convention, a rotated copy or one with key scales is not read by a plain
    # product, and beside a component the codes are not the state; the kernel reads what it is given, without the
    # roundings on the way that are under study.
    whole = copy.component is None and not copy.key_scale
    plain = copy.profile is None and whole and copy.hadamard is None
    exact = policy.options.current == "exact" and not policy.options.sites
    return "dual_read" if plain and exact else None


def dual_read_arguments(state: DecodeState, inputs: StepInputs) -> dict[str, Tensor]:
    """What ``dual_read`` takes to read ``state`` (Mamba-2, NVFP4 read copy) for the token ``inputs``.

    The read copy's codes are packed two a byte; window and token are float32.  Nothing changes in ``state``.
    """
    stored, shape = state.read_copy_bits, state.shape
    assert stored.scales is not None
    assert stored.global_scale is not None
    window = state.window_tensors
    batch = state.batch
    empty = {
        "k": torch.empty(batch, 0, shape.key_heads, shape.key_dim),
        "d": torch.empty(batch, 0, shape.heads, shape.value_dim),
        "log_decay": torch.empty(batch, 0, shape.heads),
    }
    return {
        "codes": pack_nibbles(stored.codes),
        "scales": stored.scales,
        "global_scale": stored.global_scale,
        **{f"{name}_buffer": window.get(name, value) for name, value in empty.items()},
        "cursor": state.cursor.to(torch.int32),
        "q": inputs.q,
        "k": inputs.k,
        "d": inputs.v,
        "log_decay": inputs.log_decay,
    }
