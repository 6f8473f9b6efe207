"""What a sequence moves and holds, and from which batch on it matters, against figures of public sources."""

import pytest

from quantlab.errors import InputError
from quantlab.models.capacity import (
    CONV,
    Machine,
    Speculation,
    batch_of_equal_memory,
    batch_of_equal_traffic,
    concurrency,
    demand,
    parse_bytes,
    shares,
    speed_bound,
    state_share,
)
from quantlab.models.published import PUBLISHED
from quantlab.recurrences import RECURRENCES
from quantlab.schemes import parse_policy
from quantlab.schemes.ledger import ledger


def cost(model, policy, speculation=None):
    return demand(PUBLISHED[model], parse_policy(policy), speculation)


def test_a_demand_is_the_ledger_of_every_layer_and_the_convolution():
    geometry, policy = PUBLISHED["Kimi-Linear-48B-A3B"], parse_policy("int8/nvfp4@8:key_read=checkpoint")
    found, layer = demand(geometry, policy), ledger(policy, RECURRENCES["kimi_delta"], geometry.shape)
    for side, expected in (
        (found.read, layer.read),
        (found.written, layer.written),
        (found.held, layer.held),
    ):
        assert side == {name: 20 * size for name, size in expected.items()} | {CONV: 20 * 3 * 12288 * 2}
    assert found.bytes_per_token == found.bytes_read + found.bytes_written
    assert (found.states, found.accepted) == (1, 1)


def test_a_slot_that_a_public_thread_states():
    """SGLang: 153.9 MB for Qwen3.8-27B, FP32 state and convolution."""
    assert f"{cost('Qwen3.8-27B', 'fp32@1').bytes_held / 1e6:.1f}" == "153.9"


def test_the_convolution_state_stays_in_bf16_when_the_state_is_halved():
    """A TPU back end states 4.27 MB and 2.17 MB a layer for 64 heads of 128 x 128: only the state is halved."""
    layers = PUBLISHED["Qwen3.5-397B-A17B"].layers
    assert f"{cost('Qwen3.5-397B-A17B', 'fp32@1').bytes_held / layers / 1e6:.2f}" == "4.27"
    assert f"{cost('Qwen3.5-397B-A17B', 'bf16@1').bytes_held / layers / 1e6:.2f}" == "2.17"
    # The 77 MB of bf16 that go with 153.9 MB of FP32 are a plain half; with the convolution in bf16 it is 78.4.
    full, half = cost("Qwen3.8-27B", "fp32@1").bytes_held, cost("Qwen3.8-27B", "bf16@1").bytes_held
    assert f"{full / 2e6:.0f}" == "77"
    assert f"{half / 1e6:.1f}" == "78.4"


@pytest.mark.parametrize(
    ("model", "mebibytes"),
    [("Qwen3.8-27B", 144), ("Nemotron-3-Super-120B-A12B", 160), ("Kimi-Linear-48B-A3B", 40)],
)
def test_states_in_mib(model, mebibytes):
    assert cost(model, "fp32@1").held["checkpoint"] == mebibytes * 2**20


@pytest.mark.parametrize(
    ("policy", "expected", "exact"),
    [
        ("fp32@1", "4.00", 4),
        ("bf16@1", "2.00", 2),
        # a byte and an FP32 scale a row of 128
        ("int8@1", "1.031", 1 + 4 / 128),
        # and two of residual: more than bf16
        ("int8+ef@1", "3.03", 3 + 4 / 128),
        # half a byte, an E4M3 scale a block of 16, an FP32 scale a head of 128 x 128
        ("nvfp4@1", ".5625", 0.5625 + 4 / 128**2),
        ("fp32/nvfp4@16", "4.5625", 4.5625 + 4 / 128**2),
    ],
)
def test_bytes_of_a_stored_value(policy, expected, exact):
    found = cost("Qwen3.5-0.8B", policy).stored_per_value
    assert found == exact
    assert float(f"{found:.{len(expected.partition('.')[2])}f}") == pytest.approx(float(expected), abs=3e-4)


def test_the_shares_of_a_store():
    """Of a head of 128 x 128: a scale a row of 128 bytes, and two vectors of 128 float16 for a component."""
    geometry = PUBLISHED["Qwen3.5-0.8B"]
    assert shares(parse_policy("fp32@1").checkpoint, geometry) == {"codes": 1}
    assert shares(parse_policy("int8+ef@1").checkpoint, geometry) == {"codes": 128 / 132, "scales": 4 / 132}
    found = shares(parse_policy("int8+rank1@1").checkpoint, geometry)
    assert found == {"codes": 128 / 136, "scales": 4 / 136, "component": 4 / 136}
    found = shares(parse_policy("int8+keyscale@1").checkpoint, geometry)
    assert found == {"codes": 128 / 133, "scales": 5 / 133}


def test_native_speculation_holds_a_state_a_token_and_replay_one():
    """Qwen3.8-27B with four drafts: five states ("36 slots, 5 per request") against one and a ring."""
    speculation = Speculation(drafts=4, accepted=3)
    native, replay = cost("Qwen3.8-27B", "fp32@1", speculation), cost("Qwen3.8-27B", "fp32@16", speculation)
    assert native.states == 5
    assert native.bytes_held == 5 * cost("Qwen3.8-27B", "fp32@1").bytes_held
    assert replay.states == 1
    state, record = 4 * 48 * 128 * 128, 4 * (16 * 128 + 2 * 48 * 128 + 2 * 48)  # k, v, d, beta, gate
    assert replay.held["buffer"] == 48 * (16 - 1 + 5) * record
    assert replay.held["checkpoint"] == 48 * state
    assert replay.held[CONV] == 48 * 10240 * (3 + 4) * 2
    # One state read and five written, against one read, and a fold (read and written) in 3 of 16 forwards.
    assert native.read["checkpoint"] + native.written["checkpoint"] == 48 * state * 6
    moved = replay.read["checkpoint"] + replay.written["checkpoint"]
    assert moved == pytest.approx(48 * state * (1 + 2 * 3 / 16), rel=1e-12)
    assert native.bytes_per_token == native.bytes_per_forward / 3


def test_states_outweigh_the_weights_at_seventy_requests():
    """STEPQuant's figure for Qwen3.8-27B comes out with bf16 weights and the five states of four drafts."""
    machine = Machine(weights=27e9 * 2)
    native = cost("Qwen3.8-27B", "fp32@1", Speculation(4, 5))
    assert f"{batch_of_equal_memory(native, machine):.0f}" == "70"
    assert batch_of_equal_memory(cost("Qwen3.8-27B", "fp32@1"), machine) > 350


def test_the_bound_on_the_speed():
    assert f"{speed_bound(0.10, 4) - 1:.3f}" == "0.081"  # the figure of lattice's ADR-071
    assert speed_bound(1, 4) == 4
    assert speed_bound(0, 4) == 1
    assert speed_bound(0.5, 1) == 1


@pytest.mark.parametrize("batch", [1, 16, 1000])
@pytest.mark.parametrize("policy", ["bf16@1", "fp32@16:buffer=bf16", "fp16/nvfp4@16", "int8+ef@1"])
def test_the_bound_is_the_ratio_of_all_bytes(policy, batch):
    """1 / (1 - f + f / r) against the bytes of a whole step, counted one after the other."""
    machine = Machine(weights=8e9, weights_read=3e9, kv_per_token=25e3, context=4096)
    baseline, found = cost("Qwen3.5-4B", "fp32@1"), cost("Qwen3.5-4B", policy)

    def step(of):
        moved = 3e9
        for _ in range(batch):
            moved += 25e3 * 4096 + of.bytes_read + of.bytes_written
        return moved

    share = state_share(baseline, machine, batch)
    # A sum of `batch` terms in float64.
    assert share == pytest.approx(batch * baseline.bytes_per_forward / step(baseline), rel=1e-12)
    ratio = baseline.bytes_per_forward / found.bytes_per_forward
    assert speed_bound(share, ratio) == pytest.approx(step(baseline) / step(found), rel=1e-12)


def test_break_even_batches():
    machine, found = Machine(weights=8e9, weights_read=3e9), cost("Qwen3.5-4B", "fp32@1")
    batch = batch_of_equal_traffic(found, machine)
    assert batch * (found.bytes_read + found.bytes_written) == pytest.approx(3e9, rel=1e-12)
    assert state_share(found, Machine(weights_read=3e9), 1) == pytest.approx(1 / (1 + batch), rel=1e-12)
    assert batch_of_equal_memory(found, machine) * found.bytes_held == pytest.approx(8e9, rel=1e-12)


@pytest.mark.parametrize("policy", ["fp32@1", "fp16/nvfp4@16"])
@pytest.mark.parametrize("context", [0, 32768])
def test_as_many_requests_as_fit_and_not_one_more(policy, context):
    machine = Machine(memory=80 * 2**30, weights=9e9, kv_per_token=32e3, context=context)
    found = cost("Qwen3.5-4B", policy)
    count, request = concurrency(found, machine), found.bytes_held + 32e3 * context
    assert 9e9 + count * request <= 80 * 2**30 < 9e9 + (count + 1) * request
    assert found.slots_per_gib * found.bytes_held <= 2**30 < (found.slots_per_gib + 1) * found.bytes_held


def test_memory_that_is_not_there():
    with pytest.raises(InputError, match="less than the memory"):
        Machine(memory=1e9, weights=2e9)
    with pytest.raises(InputError, match="80GiB"):
        concurrency(cost("Qwen3.5-4B", "fp32@1"), Machine())
    with pytest.raises(InputError, match="delta rule"):
        cost("Mamba2-2.7B", "fp32/nvfp4@16:key_read=checkpoint")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("80GiB", 80 * 2**30),
        ("80GB", 80e9),
        ("1.5 tb", 1.5e12),
        ("24KB", 24e3),
        (".5MiB", 2**19),
        ("7B", 7),
    ],
)
def test_bytes_in_words(text, expected):
    assert parse_bytes("memory", text) == expected


@pytest.mark.parametrize("text", ["80G", "80", "", "GB", "-1GB", "1e9", "1..5GB", "nan", "1 2GB"])
def test_bytes_that_nobody_can_read(text):
    with pytest.raises(InputError, match=r"memory .*GB is 10\^9 bytes"):
        parse_bytes("memory", text)
