"""The op that reads for a decode state reads what the state reads."""

import pytest
import torch

from quantlab.errors import InputError
from quantlab.schemes import parse_policy, start
from quantlab.schemes.dual_read import dual_read
from quantlab.schemes.kernel_read import dual_read_arguments, read_op
from tests.schemes.streams import made


@pytest.mark.parametrize("flush", ["full", "early"])
@pytest.mark.parametrize("value_dim", [64, 80])
def test_the_op_is_the_read_of_the_state(value_dim, flush):
    """Every step of three windows, rows at different cursors; ``flush_read=copy`` makes flush steps reads too."""
    shape = {"heads": 4, "key_heads": 2, "sequences": 3, "value_dim": value_dim, "key_dim": 64}
    s = made("mamba2", steps=24, seed=6, **shape)
    state = start(f"fp16/nvfp4@8:flush_read=copy:flush={flush}", "mamba2", s.initial, key_heads=2)
    cursors = set()
    for t in range(s.steps):
        if t in (3, 6):
            row = torch.tensor([t // 3])
            state.reset(row, s.initial[row])
        read = dual_read(
            **dual_read_arguments(state, s.step(t))
        )  # before the step: it moves the window's memory
        cursors.add(tuple(state.cursor.tolist()))
        output = state.step(s.step(t))
        # The same sums of at most 64 + 8 + 1 float32 products in another order, against the larger of the terms.
        scale = float(output.abs().max())
        torch.testing.assert_close(read, output, rtol=0, atol=73 * 2.0**-23 * scale)
    assert any(len(set(c)) == 3 for c in cursors)


def test_which_policies_have_an_op():
    assert read_op(parse_policy("fp32/nvfp4@16"), "mamba2") == "dual_read"
    for policy, family in (
        ("fp32/nvfp4@16", "gated_delta"),
        ("fp32/nvfp4:row@16", "mamba2"),
        ("fp32/nvfp4+rank1@16", "mamba2"),
        ("fp32/nvfp4+mean@16", "mamba2"),
        ("fp32/nvfp4+keyscale@16", "mamba2"),
        ("fp32/fp8@16", "mamba2"),
        ("nvfp4@16", "mamba2"),
        ("fp32/nvfp4@16:sites=k", "mamba2"),
        ("fp32/nvfp4@16:buffer=bf16:current=buffer", "mamba2"),
    ):
        assert read_op(parse_policy(policy), family) is None
    state = start("nvfp4@16", "mamba2", torch.zeros(1, 1, 4, 16))
    with pytest.raises(InputError, match="a read copy"):
        _ = state.read_copy_bits
