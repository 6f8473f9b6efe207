"""Decode states on a CUDA device: the bits that they store are those of the CPU."""

from dataclasses import replace

import pytest
import torch

from quantlab.errors import InputError
from quantlab.formats.random import random_words
from quantlab.recurrences import StepInputs
from quantlab.schemes import DecodeState, start, start_layer

SHAPE = 3, 4, 16, 32
"""Rows, heads, value dim, key dim; two key heads."""
POLICIES = (
    "fp32@1",
    "nvfp4@1",
    "nvfp4+sr@4",
    "int8+ef@1:ef_read=include",
    "int8+ef.int4@4",
    "fp32/nvfp4@4",
    "fp16+sr/nvfp4+4over6@4:contents=derived",
    "fp8_e4m3+sr/mxfp6_e2m3@4:flush=early",
    "bf16@4:schedule=step",
    "int8:head+hadamard@4:flush_read=exact",
)


@pytest.fixture(autouse=True)
def on_a_gpu(runnable):
    runnable("cuda")


def tokens(count, seed=0):
    """Small whole numbers and powers of two: sums and products of a few are exact in any order."""
    draw = torch.Generator().manual_seed(seed)
    rows, heads, value_dim, key_dim = SHAPE

    def whole(*sizes):
        return torch.randint(-2, 3, (rows, count, *sizes), generator=draw).float()

    return StepInputs(
        whole(2, key_dim),
        whole(2, key_dim) / 4,
        whole(heads, value_dim),
        torch.zeros(rows, count, heads),
        torch.full((rows, count, heads), 0.5),
    )


def initial():
    return torch.randint(-64, 65, SHAPE, generator=torch.Generator().manual_seed(1)).float() / 8


def family(policy):
    return "gated_delta" if "derived" in policy else "mamba2"


def begin(policy, device):
    return start(policy, family(policy), initial().to(device), key_heads=2, seed=3, layer=5)


def given(policy, count):
    found = tokens(count)
    return found if family(policy) == "gated_delta" else replace(found, beta=None)


def same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():  # what was never written is NaN
        torch.testing.assert_close(other[name].cpu(), value.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hand_off_stores_the_same_bits(policy):
    same(begin(policy, "cpu").save(), begin(policy, "cuda").save())


@pytest.mark.parametrize("policy", [p for p in POLICIES if p.startswith("fp32")])
def test_steps_on_numbers_without_rounding_store_the_same_bits(policy):
    """Without decay nothing but the stores rounds as long as sums are short: two flushes, then drafts and rows."""
    states = [begin(policy, device) for device in ("cpu", "cuda")]
    for state in states:
        inputs = given(policy, 9).map(lambda t, state=state: t.to(state.device))
        for t in range(2 if policy.endswith("@1") else 6):
            state.step(inputs.token(t))
        state.select(torch.tensor([2, 0, 0]))
        state.reset(torch.tensor([1]), initial()[:1].to(state.device), torch.tensor([9]))
        state.verify(inputs.map(lambda x: x[:, 6:8]), lengths=torch.tensor([2, 1, 0]))
        state.commit(torch.tensor([1, 1, 0]))
        state.flush(torch.tensor([0, 2]))
    same(states[0].save(), states[1].save())


@pytest.mark.parametrize("policy", POLICIES)
def test_outputs_are_those_of_the_cpu_but_for_the_order_of_sums(policy):
    """A code on the edge may fall the other way; the median of outputs is out of its reach."""
    found = []
    for device in ("cpu", "cuda"):
        state = begin(policy, device)
        inputs = given(policy, 6).map(lambda t, device=device: t.to(device))
        found.append(torch.stack([state.step(inputs.token(t)).cpu() for t in range(6)]))
        assert state.device.type == device
    assert (found[0] - found[1]).abs().median() <= 1e-5 * found[0].abs().max()


def test_a_save_goes_on_where_its_tensors_are():
    state = begin("nvfp4+sr@4", "cuda")
    inputs = given("nvfp4+sr@4", 8)
    for t in range(3):
        state.step(inputs.token(t).map(torch.Tensor.cuda))
    saved = state.save()
    copy = DecodeState.restore(saved)
    moved = DecodeState.restore({name: value.cpu() for name, value in saved.items()})
    assert (copy.device.type, moved.device.type) == ("cuda", "cpu")
    same(copy.save(), moved.save())
    with pytest.raises(InputError, match="one on cpu, where the state is"):
        moved.step(inputs.token(3).map(torch.Tensor.cuda))


def test_heads_under_policies_of_their_own(tmp_path):
    rules = tmp_path / "rules.toml"
    rules.write_text('default = "nvfp4@4"\n[[rule]]\nheads = "1,3"\npolicy = "int8+ef@1"\n')
    states = [
        start_layer(rules, "mamba2", initial().to(device), key_heads=2, layer=0) for device in ("cpu", "cuda")
    ]
    for state in states:
        inputs = given("nvfp4@4", 2).map(lambda t, state=state: t.to(state.device))
        state.step(inputs.token(0))
        state.reset(torch.tensor([1]), initial()[:1].to(state.device))
    same(states[0].save(), states[1].save())


def test_random_words_are_those_of_the_cpu():
    numbers, ids = torch.tensor([0, 7, 2**33 + 1]), torch.tensor([5, -1, 2**31])
    for heads, count in ((None, 4), ((0, 2, 3, 7), 4)):
        sizes = (3, count, 3, 5)
        expected = random_words(sizes, 2**40 + 3, numbers, ids, 6, 1, heads=heads)
        found = random_words(sizes, 2**40 + 3, numbers.cuda(), ids.cuda(), 6, 1, heads=heads)
        assert torch.equal(found.cpu(), expected)
