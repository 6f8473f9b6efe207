"""Policies of a model's heads under a budget of bytes: the least error, counted bytes, rules that say the same."""

import contextlib
import io
import itertools
import math
import re
from pathlib import Path

import numpy as np
import pytest

from quantlab.drift import heads_of_decay
from quantlab.drift.budget import BASELINE, LADDER, allocate
from quantlab.drift.heads import steady_errors
from quantlab.errors import InputError
from quantlab.recurrences import get_recurrence
from quantlab.schemes import StateShape, parse_policy
from quantlab.schemes.ledger import ledger
from quantlab.schemes.pool import unpoolable
from quantlab.schemes.rules import parse_rules

CHANNELS = {"gated_delta": (1,), "mamba2": (1,), "mamba1": (1, 1)}
SHAPES = {
    "gated_delta": StateShape(4, 32, 64, 2),
    "mamba2": StateShape(6, 16, 64, 2),
    "mamba1": StateShape(1, 64, 16, 1),
}
LAYERS = (1, 4)
NARROW = ("fp32@16:buffer=bf16", "fp16+sr/nvfp4@16:buffer=bf16", "fp8+sr/nvfp4@16:buffer=bf16")


def made(family, layers=LAYERS, seed=0, slowest=1e-5):
    """(heads that forget between ``slowest`` and 1/2 a token, the shape of a layer)."""
    shape = SHAPES[family]
    count = len(layers) * shape.heads
    forgets = np.exp(np.random.default_rng(seed).uniform(math.log(slowest), math.log(0.5), count))
    logs = np.log1p(-forgets).reshape(-1, *CHANNELS[family])
    return heads_of_decay(family, logs, value_dim=shape.value_dim, key_dim=shape.key_dim), shape


def bytes_of(allocation):
    """The ledger of each group of heads, with the key heads that it uses: what a layer of such groups moves."""
    shape, total = allocation.shape, 0.0
    repeat = shape.heads // shape.key_heads
    rules = allocation.rules()
    for layer in allocation.layers:
        for group in rules.of_layer(layer, shape.heads):
            key_heads = len({head // repeat for head in group.heads})
            own = StateShape(len(group.heads), shape.value_dim, shape.key_dim, key_heads)
            total += ledger(group.policy, get_recurrence(allocation.family), own).bytes_per_token
    return total


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("budget", [0.25, 0.4, 0.7])
def test_bytes_are_those_of_the_ledger_and_within_the_budget(family, budget):
    if family == "mamba1":
        budget = 0.6 + budget / 2  # its windows weigh more than its states
    heads, shape = made(family)
    found = allocate(heads, shape, LAYERS, budget)
    whole = ledger(parse_policy(BASELINE), get_recurrence(family), shape).bytes_per_token
    assert found.baseline_bytes == len(LAYERS) * whole
    # Float sums of a hundred parts.
    assert found.bytes_per_token == pytest.approx(bytes_of(found), rel=1e-13)
    # Costs are rounded to 1/1024 of a byte.
    assert found.bytes_per_token <= budget * found.baseline_bytes + heads.heads / 1024
    assert found.output_error == pytest.approx(found.bound, rel=1e-12)


@pytest.mark.parametrize("family", ["gated_delta", "mamba2"])
def test_no_choice_of_policies_within_the_budget_has_less_error(family):
    """All 3^8 choices of one layer of eight heads and of two of four, or all 3^6 of one layer of six."""
    layers = LAYERS if family == "gated_delta" else (1,)
    heads, shape = made(family, layers)
    policies = [parse_policy(text) for text in NARROW]
    powers = np.stack([steady_errors(p, heads).output ** 2 for p in policies], -1)
    recurrence, repeat = get_recurrence(family), shape.heads // shape.key_heads

    def moved(heads_, keys):
        return np.array(
            [
                ledger(
                    p, recurrence, StateShape(heads_, shape.value_dim, shape.key_dim, keys)
                ).bytes_per_token
                for p in policies
            ]
        )

    head, key = moved(1, 0), moved(1, 1) - moved(1, 0)
    choices = np.array(list(itertools.product(range(3), repeat=heads.heads)))
    error = np.sqrt(powers[np.arange(heads.heads), choices].mean(1))
    used = (choices.reshape(len(choices), -1, repeat)[..., None] == np.arange(3)).any(2).sum(1)
    cost = head[choices].sum(1) + used @ key
    baseline = len(layers) * ledger(parse_policy(BASELINE), recurrence, shape).bytes_per_token
    for budget in np.linspace(1.0001 * cost[np.isfinite(error)].min() / baseline, 0.7, 9):
        found = allocate(heads, shape, layers, float(budget), NARROW)
        best = error[cost <= budget * baseline].min()
        # The square root of a mean that is right to 1e-12.
        assert found.output_error == pytest.approx(best, rel=1e-12)
    ample = allocate(heads, shape, layers, 0.7, NARROW)
    assert len(np.unique(ample.choices)) == 1


def test_more_bytes_never_bring_more_error_and_one_policy_never_less():
    heads, shape = made("gated_delta", (0, 1, 2))
    before, mixed = math.inf, 0
    for budget in np.geomspace(0.2, 1.0, 12):
        found = allocate(heads, shape, (0, 1, 2), float(budget))
        assert found.output_error <= before * (1 + 1e-12)
        before = found.output_error
        single = found.best_single
        assert single is not None
        assert single.bytes_per_token <= budget * found.baseline_bytes * (1 + 1e-9)
        assert found.output_error <= single.output_error * (1 + 1e-12)
        mixed += found.output_error < 0.95 * single.output_error
    assert mixed > 2  # where the budget lies between two policies, a mixture is worth its while


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("budget", [1.0, 3.0])
def test_a_budget_of_the_baseline_gives_every_head_its_best_policy(family, budget):
    heads, shape = made(family)
    found = allocate(heads, shape, LAYERS, budget)
    errors = np.stack([steady_errors(p, heads).output for p in found.ladder], -1)
    assert found.choices.ravel().tolist() == errors.argmin(-1).tolist()
    assert {str(p) for p in found.rules().policies} == {LADDER[0]}


def test_slow_heads_are_wide_and_fast_heads_narrow():
    heads, shape = made("gated_delta")
    found = allocate(heads, shape, LAYERS, 0.3, (NARROW[0], NARROW[1]))
    # The copy's error of a head grows with its half-life and saves the same bytes; a shared key head may pull its
    # neighbour along, so compare means.
    wide = found.choices.ravel() == 0
    assert 0 < wide.sum() < heads.heads
    assert np.log(heads.half_life[wide]).mean() > np.log(heads.half_life[~wide]).mean()


def test_a_smallest_budget_is_named_and_works():
    heads, shape = made("mamba2", slowest=1e-2)
    with pytest.raises(InputError, match=r"^budget 0\.01: expected at least 0\.\d+, the smallest") as error:
        allocate(heads, shape, LAYERS, 0.01)
    smallest = float(error.value.expected.split()[2].rstrip(","))
    found = allocate(heads, shape, LAYERS, smallest)
    assert set(found.choices.ravel().tolist()) == {len(LADDER) - 1}
    with pytest.raises(InputError, match="smallest possible"):
        allocate(heads, shape, LAYERS, smallest - 2e-4)


def test_a_head_never_gets_a_policy_under_which_it_diverges():
    """Four bits stored every 16 tokens: in Mamba-2 slow heads diverge, and stagnate before that."""
    heads, shape = made("mamba2", slowest=1e-5)
    ladder = ("fp32@16:buffer=bf16", "nvfp4+sr@16:buffer=bf16", "nvfp4@16:buffer=bf16")
    diverges = np.stack([steady_errors(p, heads).diverges for p in ladder], -1)
    assert diverges[:, 1:].any(0).all()
    assert not diverges[:, 1:].all(0).any()
    smallest = None
    for budget in (0.01, 0.6):
        try:
            found = allocate(heads, shape, LAYERS, budget, ladder)
        except InputError as error:
            smallest = float(error.expected.split()[2].rstrip(","))
            found = allocate(heads, shape, LAYERS, smallest, ladder)
        taken = np.take_along_axis(diverges, found.choices.reshape(-1, 1), -1)
        assert not taken.any()
        assert found.refusals[0] == {}
        assert found.refusals[2]["diverges"] == diverges[:, 2].sum()
        assert found.single[2].refused >= diverges[:, 2].sum()
        assert found.single[2].output_error == math.inf
    assert smallest is not None  # and the smallest budget is that of the heads that may
    named = ("layer 9, head 0",)
    alone = heads_of_decay("mamba2", np.log1p([[-1e-6]]), value_dim=16, key_dim=64, names=named)
    with pytest.raises(InputError, match=r"heads, layer 9, head 0 among them.*diverges.*add fp32@1"):
        allocate(alone, StateShape(1, 16, 64, 1), (9,), 1.0, ladder[2:])


def test_a_head_whose_moves_are_lost_does_not_get_that_policy():
    """Four bits rounded to nearest leave most of a slow state where it is, which the predicted error does not know."""
    heads = heads_of_decay("mamba2", np.log([[0.999], [0.9]]), value_dim=64, key_dim=128)
    ladder = ("fp8+sr/nvfp4@16:buffer=bf16", "nvfp4@16:buffer=bf16")
    assert not steady_errors(ladder[1], heads).diverges.any()
    with pytest.raises(InputError, match="smallest possible") as error:
        allocate(heads, StateShape(2, 64, 128, 2), (0,), 0.01, ladder)
    smallest = float(error.value.expected.split()[2].rstrip(","))
    found = allocate(heads, StateShape(2, 64, 128, 2), (0,), smallest, ladder)
    assert found.choices.tolist() == [[0, 1]]
    assert found.refusals == ({}, {"loses its moves": 1})


def test_heads_without_a_prediction_get_the_widest_policy_and_count_nowhere():
    logs = np.log1p([[0.0], [-0.1]])
    heads = heads_of_decay("mamba2", logs, value_dim=32, key_dim=64)
    assert not np.isfinite(steady_errors(LADDER[4], heads).output[0])
    found = allocate(heads, StateShape(2, 32, 64, 1), (0,), 0.5, LADDER)
    assert found.unpredicted == 1
    assert found.choices[0, 0] == 0
    alone = float(steady_errors(found.ladder[found.choices[0, 1]], heads).output[1])
    assert found.output_error == pytest.approx(alone) == found.bound


def test_heads_of_a_layer_share_a_window_unless_they_need_not():
    heads, shape = made("gated_delta", (0, 1), seed=3)
    ladder = ("fp32@16:buffer=bf16", "fp16+sr/nvfp4@16:buffer=bf16", "fp16+sr/nvfp4@8:buffer=bf16", "fp32@1")
    mixed = 0
    for budget in (0.3, 0.5, 0.7, 0.8):
        found = allocate(heads, shape, (0, 1), budget, ladder)
        freely = allocate(heads, shape, (0, 1), budget, ladder, one_window=False)
        for layer in range(2):
            assert len({found.ladder[place].window for place in found.choices[layer]}) == 1
            mixed += len({freely.ladder[place].window for place in freely.choices[layer]}) > 1
        assert freely.output_error <= found.output_error * (1 + 1e-12)
    assert mixed


@pytest.mark.parametrize("family", SHAPES)
def test_rules_say_what_was_chosen(family, tmp_path):
    heads, shape = made(family, (2, 3, 5))
    found = allocate(heads, shape, (2, 3, 5), 0.3 if family != "mamba1" else 0.7)
    (tmp_path / "mine.toml").write_text(found.rules("mine").toml())
    rules = parse_rules(tmp_path / "mine.toml")
    rules.check(dict.fromkeys(found.layers, shape.heads), family)
    for number, layer in enumerate(found.layers):
        told = {head: group.policy for group in rules.of_layer(layer, shape.heads) for head in group.heads}
        assert [told[h] for h in range(shape.heads)] == [
            found.ladder[place] for place in found.choices[number]
        ]
    assert sum(sum(share.counts) for share in found.by_layer) == heads.heads
    mean = np.mean([share.output_error**2 for share in found.by_layer])
    assert found.output_error == pytest.approx(math.sqrt(mean))


@pytest.mark.parametrize(
    ("family", "shape"), [("mamba2", (96, 80, 128, 8)), ("gated_delta", (32, 128, 128, 16))]
)
def test_kernels_have_memory_for_every_policy_to_choose_from(family, shape):
    assert [unpoolable(parse_policy(p), family, StateShape(*shape)) for p in LADDER] == [None] * len(LADDER)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"budget": 0.0}, r"^budget 0\.0: .*above 0"),
        ({"budget": math.nan}, r"^budget nan: "),
        ({"ladder": ()}, r"^ladder \[\]: expected 1 to 8"),
        ({"ladder": [f"fp32@{n}" for n in range(2, 12)]}, r"^ladder .*1 to 8"),
        ({"ladder": ("fp32/nvfp4@16:key_read=checkpoint",)}, r"delta rule only"),
        ({"layers": (1, 1)}, r"^layers \[1, 1\]: expected different numbers"),
        ({"layers": (1, 2, 3)}, r"^layers \[1, 2, 3\]: expected different numbers, 6 of the 12 heads"),
    ],
)
def test_what_cannot_be_allocated_is_one_line(change, says):
    heads, shape = made("mamba2")
    given = {"layers": LAYERS, "budget": 0.5, "ladder": LADDER} | change
    with pytest.raises(InputError, match=says) as error:
        allocate(heads, shape, given["layers"], given["budget"], given["ladder"])
    assert "\n" not in str(error.value)


def test_the_example_of_the_documentation_prints_what_it_says():
    text = (Path(__file__).resolve().parents[2] / "docs" / "drift.md").read_text(encoding="utf-8")
    found = re.search(r"```python\n(import numpy as np\n.*?allocate.*?)```\n\n```\n(.*?)```", text, re.DOTALL)
    assert found is not None
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown):
        exec(found[1], {})
    assert shown.getvalue() == found[2]
