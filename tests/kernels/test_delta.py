"""Decode kernels of the delta rules: every option that chooses code, on small layers, against float64."""

import pytest
import torch

from quantlab.formats import Encoded, pack_nibbles, parse
from quantlab.kernels import delta
from quantlab.schemes import StateShape, parse_policy
from quantlab.testing import IMPLEMENTATIONS
from quantlab.testing import delta as probes
from quantlab.testing.pools import PoolCase, check_pool

BF16 = torch.bfloat16
HEADS, GROUPED, CHANNELS = StateShape(1, 16, 32, 1), StateShape(2, 16, 32, 1), StateShape(1, 16, 32, 1)
ODD = StateShape(2, 48, 96, 1)


def case(policy, shape=HEADS, family="gated_delta", cursors=(1, 3), **options):
    return PoolCase(policy, family, shape, cursors, **options)


def product(policy, shape=HEADS, **options):
    """bfloat16 windows and tokens: a fold by matrix products."""
    return case(policy + ":buffer=bf16", shape, token=BF16, output=BF16, **options)


def channels(policy, shape=CHANNELS, **options):
    return case(policy, shape, "kimi_delta", **options)


DERIVED, KEY, OUTPUT = ":contents=derived", ":key_read=checkpoint", ":flush_read=copy"
FAST = [
    product("fp32/nvfp4@4", GROUPED, cursors=(0, 3), steps=2),
    product("fp32/nvfp4@4" + DERIVED, StateShape(1, 48, 32, 1)),
    case("fp32@4", cursors=(2, 3)),
    channels("fp32/nvfp4@4", cursors=(0, 3)),
    channels("fp32/nvfp4@4:buffer=bf16" + DERIVED, token=BF16),
    channels("fp32@1", StateShape(2, 16, 32, 1), cursors=(0, 0)),
]
SLOW = [
    product("fp32@4", StateShape(1, 64, 32, 1)),
    product("fp32@16", cursors=(7, 15)),
    product("fp32/nvfp4@4" + DERIVED + KEY),
    product("fp32/nvfp4@3" + DERIVED, ODD, cursors=(0, 2)),
    product("fp32/nvfp4@4", ODD, cursors=(3,)),
    product("fp32/nvfp4@4" + KEY, GROUPED),
    product("fp32/nvfp4@2", cursors=(0, 1), steps=5),
    product("fp32/nvfp4@4" + OUTPUT),
    case("fp32/nvfp4@4" + DERIVED + OUTPUT, GROUPED),
    case("fp32/nvfp4@4" + DERIVED + KEY + OUTPUT),
    case("fp32/nvfp4@4" + OUTPUT + KEY),
    case("fp32/nvfp4@1" + OUTPUT, cursors=(0, 0)),
    case("fp32/nvfp4@1" + OUTPUT + KEY, cursors=(0, 0)),
    product("fp16+sr/nvfp4@4", StateShape(1, 32, 64, 1)),
    product("fp8+sr/nvfp4@4" + DERIVED, StateShape(1, 16, 64, 1)),
    product("int8+sr/nvfp4@4" + DERIVED, StateShape(1, 48, 64, 1)),
    product("int8@4", StateShape(1, 16, 96, 1)),
    product("fp32/nvfp4@4", StateShape(1, 64, 160, 1), cursors=(3,)),
    case("fp32@20", cursors=(18, 19)),
    case("fp16/nvfp4@4:buffer=fp16", StateShape(4, 16, 64, 2)),
    case("fp32@1", ODD, cursors=(0, 0)),
    case("fp8+sr@4:buffer=bf16", token=BF16),
    channels("fp32/nvfp4@4" + KEY),
    channels("fp32/nvfp4@4" + DERIVED + KEY + OUTPUT),
    channels("fp32/nvfp4@4:buffer=bf16" + OUTPUT, token=BF16),
    channels("fp32/nvfp4@3", StateShape(1, 48, 96, 1), cursors=(1, 2)),
    channels("fp32@4" + DERIVED, StateShape(2, 16, 64, 1)),
    channels("int8/nvfp4@4:buffer=bf16"),
    channels("fp8+sr/nvfp4@16:buffer=bf16", cursors=(15,)),
    channels("fp32@20", cursors=(18, 19)),
    channels("bf16@1", cursors=(0, 0)),
]
JOBS = [
    pytest.param(implementation, one, id=f"{implementation}-{one}", marks=marks)
    for implementation in IMPLEMENTATIONS[1:]
    for cases, slow in ((FAST, ()), (SLOW, pytest.mark.slow))
    for one in cases
    for marks in [slow if implementation == "interpreter" else ()]
]


@pytest.mark.parametrize(("implementation", "one"), JOBS, indirect=["implementation"])
def test_conformance(implementation, one):
    assert delta.served(parse_policy(one.policy), one.shape, None) is None
    check_pool(one, implementation)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:], indirect=True)
def test_the_inverse_of_a_window_of_equal_keys(implementation):
    """Its exact inverse has entries of magnitude 1; a power series in the strict part passes through 6435.

    An entry is a sum of at most 16 products of entries before it: off by 16 2^-24 of magnitudes up to 2, for each of
    the few rows that such an error can pass through.
    """
    below = torch.ones(16, 16).tril(-1)
    random = torch.rand(16, 16, generator=torch.Generator().manual_seed(0))
    systems = torch.stack([below, below * 0.5, -below * 0.25, below * (2 * random - 1)])
    found = probes.inverses(systems, implementation).double()
    truth = torch.linalg.inv(torch.eye(16, dtype=torch.float64) + systems.double())
    assert (found - truth).abs().amax() <= 6 * 16 * 2 * 2.0**-24 * truth.abs().amax()
    assert torch.equal(found[0], truth[0].round())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:], indirect=True)
@pytest.mark.parametrize("wide", [False, True])
def test_products_of_parts_keep_float32(implementation, wide):
    """32 terms in up to six sums, each off by 2^-24 of the magnitudes; a part left out is 2^-17 of them."""
    random = torch.Generator().manual_seed(0)
    left, right = torch.rand(2, 16, 32, generator=random) + 0.5, torch.rand(32, 16, generator=random) + 0.5
    if not wide:
        right = right.bfloat16().float()
    found = probes.products(left, right, wide, implementation).double()
    truth = left.double() @ right.double()
    assert ((found - truth).abs() <= (32 + 6) * 2.0**-24 * truth).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:], indirect=True)
@pytest.mark.parametrize("key_dim", [32, 64, 128])
def test_every_key_dim_goes_to_its_column(implementation, key_dim):
    assert torch.equal(probes.restored_columns(key_dim, implementation), torch.arange(key_dim).int())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:], indirect=True)
@pytest.mark.parametrize("key_dim", [32, 64, 128])
def test_every_byte_is_itself_on_tensor_cores(implementation, key_dim):
    codes = torch.arange(16 * key_dim).mul(37).remainder(256).to(torch.uint8).view(16, key_dim)
    codes = torch.where(codes & 0x7F == 0x7F, 0, codes)  # NaN, which no copy holds
    found = probes.byte_operands(codes, implementation)
    assert torch.equal(found * 2.0**8, codes.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:], indirect=True)
@pytest.mark.parametrize("key_dim", [32, 128])
def test_blocks_of_all_sizes_share_a_unit_on_tensor_cores(implementation, key_dim):
    """Exact down to 2^-24 of the row's largest scale; what follows is lost, but for less than 2^-25 of it."""
    random = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (16, key_dim), generator=random, dtype=torch.uint8)
    below = torch.randint(0, 40, (16, key_dim // 32), generator=random)
    top = torch.tensor([0, 1, 30, 100, 127, 128, 200, 252]).repeat(2)[:, None]
    scales = (top - below + below.amin(1, keepdim=True)).clamp(min=0).to(torch.uint8)
    fmt = parse("mxfp4")
    truth = fmt.dequantize(Encoded(codes, scales)).double()
    found = probes.power_operands(pack_nibbles(codes), scales, implementation).double()
    error = (found[:, :-1] * found[:, -1:] - truth).abs()
    exact = (scales.int() >= top.clamp(min=24) - 24).repeat_interleave(32, 1)
    assert (error[exact] == 0).all()
    assert (error <= 2.0**-25 * 2.0 ** (top.double() - 127)).all()
    assert (codes[~exact] & 7).any() == (key_dim == 128)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:], indirect=True)
def test_a_scale_that_is_not_a_number_spoils_its_row(implementation):
    codes, scales = torch.full((16, 16), 0x22, dtype=torch.uint8), torch.full((16, 1), 127, dtype=torch.uint8)
    scales[3] = 0xFF
    units = probes.power_operands(codes, scales, implementation)[:, -1]
    assert units.isnan().nonzero().tolist() == [[3]]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:], indirect=True)
@pytest.mark.parametrize(
    ("policy", "family", "drafts"),
    [
        ("fp32/nvfp4@4:buffer=bf16", "gated_delta", 6),
        ("fp32@4", "gated_delta", 6),
        ("fp32/nvfp4@4", "kimi_delta", 6),
        ("fp32@6", "gated_delta", 3),  # in the ring that a pool without drafts has
    ],
)
def test_windows_that_wrap_around_the_ring(implementation, policy, family, drafts):
    """As torch reads them; both sum some tens of terms of magnitude 1 in float32."""
    for name, (expected, found) in probes.moved_windows(policy, family, drafts, implementation).items():
        if name in ("copy_codes", "copy_scales"):
            # Encoded from checkpoints that differ in their last bits.
            assert (expected != found).float().mean() < 0.01, name
        else:
            step = 2.0**-8 if name == "d_buffer" and "bf16" in policy else 0.0
            torch.testing.assert_close(found, expected, rtol=step, atol=1e-5, equal_nan=True, msg=name)


UNSERVED = {
    "fp32@65": (HEADS, "a window above 64"),
    "fp32@4:flush=early": (HEADS, "flush=early"),
    "fp32@4": (StateShape(1, 24, 32, 1), "a value dim that is no multiple of 16"),
    "fp16@4": (StateShape(1, 16, 80, 1), "a key dim that is no multiple of 32"),
    "fp32/nvfp4@4": (
        StateShape(1, 16, 224, 1),
        "a key dim that is neither a power of two nor the sum of two",
    ),
    "fp8/nvfp4@4": (StateShape(1, 16, 96, 1), "a key dim that is no power of two with a scale a row"),
}


@pytest.mark.parametrize("policy", UNSERVED)
def test_a_policy_without_a_kernel_says_why(policy):
    shape, reason = UNSERVED[policy]
    assert delta.served(parse_policy(policy), shape, None) == reason
