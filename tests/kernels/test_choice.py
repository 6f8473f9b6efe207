"""The choice of kernels at a batch: never less accurate, and of what was measured the faster."""

import importlib
from pathlib import Path

import pytest
import torch

from quantlab.errors import InputError
from quantlab.kernels import steps as kernels
from quantlab.kernels.bench_cases import expand
from quantlab.kernels.choice import COSTS, STAND_IN, choose, microseconds, step_policy, work
from quantlab.recurrences import StepInputs, get_recurrence
from quantlab.report.speed import SHAPE, load_speed_records, speed_rows
from quantlab.schemes import parse_policy
from quantlab.schemes.ledger import StateShape, ledger
from quantlab.schemes.policy import Policy
from quantlab.schemes.state import start
from tests.kernels.bench_stand_ins import LARGE, SMALL, CountingTimer, case, run

RECORDS = Path(__file__).resolve().parents[2] / "experiments" / "kernels_h200"
REPLAYS = (
    "fp32@16",
    "fp16@16",
    "fp32/nvfp4@16",
    "fp16+sr/nvfp4@16",
    "fp8+sr/nvfp4@16",
    "int8/fp8@16",
    "bf16/mxfp4@8",
)
DELTA = StateShape(32, 128, 128, 16)


def measured():
    """(record, the record of fp32@1 beside it) of our kernels with a window."""
    records = [
        r for r in load_speed_records(RECORDS) if r["metrics"].get("us") and "drafts" not in r["point"]
    ]
    ours = [r for r in records if r["point"]["implementation"] == "quantlab"]
    for record in ours:
        wanted = record["point"] | {"policy": "fp32@1"}
        beside = [r for r in ours if r["point"] == wanted and r["metrics"]["run"] == record["metrics"]["run"]]
        if parse_policy(record["point"]["policy"]).window > 1 and beside:
            yield record, beside[0]


def shape_of(record):
    return StateShape(*(record["point"][name] for name in SHAPE))


# -- what was measured
def test_the_choice_is_the_faster_of_what_was_measured():
    """But for pairs within 2 %: so much one case differs between two runs of a day."""
    pairs, stand_ins = list(measured()), 0
    assert len(pairs) > 60
    for record, other in pairs:
        point, given = record["point"], parse_policy(record["point"]["policy"])
        policy = step_policy(given, point["family"], shape_of(record), point["batch"])
        chosen, left = (record, other) if policy == given else (other, record)
        assert chosen["metrics"]["us"] <= 1.02 * left["metrics"]["us"], point
        stand_ins += policy == STAND_IN
    assert 0 < stand_ins < len(pairs)  # neither side is always the faster


def test_what_is_expected_is_near_what_was_measured():
    for record, other in measured():
        for one in (record, other):
            point, us = one["point"], one["metrics"]["us"]
            expected = microseconds(
                parse_policy(point["policy"]), point["family"], shape_of(one), point["batch"]
            )
            assert expected == pytest.approx(us, rel=1 / 3), point


def test_the_fit_finds_the_costs_that_times_are_made_of():
    fit = importlib.import_module("experiments.kernels_h200.fit")
    records = []
    for record in load_speed_records(RECORDS):
        point = record["point"]
        if point["implementation"] == "quantlab" and record["metrics"].get("us"):
            amounts = work(parse_policy(point["policy"]), point["family"], shape_of(record), point["batch"])
            metrics = {"us": sum(COSTS[name] * amount for name, amount in amounts.items())}
            records.append({"point": point, "metrics": metrics})
    assert fit.fit(records) == pytest.approx(COSTS, rel=1e-6)


# -- what it is
@pytest.mark.parametrize("family", ["mamba2", "gated_delta", "kimi_delta"])
@pytest.mark.parametrize("policy", REPLAYS)
def test_few_rows_take_steps_and_many_replay(family, policy):
    shape, given = LARGE if family == "mamba2" else DELTA, parse_policy(policy)
    found = [step_policy(policy, family, shape, batch) for batch in range(1, 257)]
    assert found[0] == STAND_IN
    assert found[-1] == given
    crossover = found.index(given)
    assert set(found[crossover:]) == {given}


@pytest.mark.parametrize("policy", ["fp32@1", "fp16@1", "fp16+sr@1", "int8@1"])
def test_a_step_stays_what_it_is(policy):
    choice = choose(policy, "mamba2", LARGE, 1)
    assert choice.policy == parse_policy(policy)
    assert set(choice.expected) == {str(choice.policy)}


def test_a_choice_says_what_it_costs():
    choice = choose("fp16+sr/nvfp4@16:buffer=bf16", "mamba2", LARGE, 1)
    assert choice.policy == STAND_IN
    assert list(choice.expected) == list(choice.slot_bytes) == ["fp16+sr/nvfp4@16:buffer=bf16", "fp32@1"]
    assert choice.expected["fp32@1"] == min(choice.expected.values())
    assert choice.slot_bytes["fp32@1"] == 4 * LARGE.values
    given = ledger(parse_policy("fp16+sr/nvfp4@16:buffer=bf16"), get_recurrence("mamba2"), LARGE)
    assert choice.slot_bytes["fp16+sr/nvfp4@16:buffer=bf16"] == given.bytes_held


@pytest.mark.parametrize(
    ("family", "shape"), [("mamba2", LARGE), ("gated_delta", StateShape(30, 192, 96, 30))]
)
def test_what_stands_in_is_served_wherever_the_policy_is(family, shape):
    policies = [policy for policy in REPLAYS if kernels.served(policy, family, shape) is None]
    assert policies
    assert kernels.served(STAND_IN, family, shape) is None


@pytest.mark.parametrize("given", ["fp32@16", "fp32/nvfp4@16", "fp16+sr@16", "fp16@16", "fp8+sr/nvfp4@16"])
def test_what_stands_in_keeps_what_the_policy_keeps(given):
    """Beside a float64 state, fp32@1 is off by float32 arithmetic alone, a rounding checkpoint by 20 times that and
    more, and its own window 1, which is no stand-in, by twice as much again.
    """
    arithmetic = 3 * 48 * 2.0**-24  # each token a product with the decay, one with the key, and their sum
    policy = parse_policy(given)
    state, outputs = errors_of(policy)
    assert max(errors_of(STAND_IN)) < arithmetic
    if policy.checkpoint.rounded:
        assert min(state, outputs) > 20 * arithmetic
        assert errors_of(Policy(policy.checkpoint, None, 1))[0] > 2 * state
    else:
        assert state < arithmetic
        assert (outputs > 20 * arithmetic) == (policy.read_copy is not None)


def errors_of(policy):
    """Relative norms, of the state after 48 tokens of two rows and of the last window's outputs."""
    generator = torch.Generator().manual_seed(5)
    shape, recurrence = SMALL, get_recurrence("mamba2")
    exact = torch.zeros(2, shape.heads, shape.value_dim, shape.key_dim, dtype=torch.float64)
    state, wanted, found = start(policy, "mamba2", exact.float(), key_heads=shape.key_heads), [], []
    for _ in range(48):
        q, k = (torch.randn(2, shape.key_heads, shape.key_dim, generator=generator) for _ in range(2))
        v = torch.randn(2, shape.heads, shape.value_dim, generator=generator)
        gate = -0.02 * torch.rand(2, shape.heads, generator=generator)
        inputs = StepInputs(q, k, v, gate, None)
        exact, output = recurrence.step(exact, inputs.map(lambda t: t.double()))
        wanted.append(output)
        found.append(state.step(inputs).double())
    last, exact_last = torch.stack(found[-16:]), torch.stack(wanted[-16:])
    stored = state.materialize().double()
    return float((stored - exact).norm() / exact.norm()), float(
        (last - exact_last).norm() / exact_last.norm()
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("fp32@16", "mamba2", LARGE, 0), "batch 0: expected a whole number of rows"),
        (("fp32@16", "mamba1", LARGE, 1), "family 'mamba1'"),
        (("fp32@16:contents=raw", "mamba2", LARGE, 1), "contents="),
        (("fp32@", "mamba2", LARGE, 1), "policy"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(InputError, match=message):
        step_policy(*arguments)


# -- in the bench
def test_what_is_chosen_is_timed_beside_the_policy():
    given = ["fp16/nvfp4@16", "fp16@1"]
    cases = expand("mamba2", LARGE, given, [1, 256], {"vllm": ["fp32@1"]}, chosen=True)
    assert [(c.batch, c.policy) for c in cases if c.implementation == "quantlab"] == [
        (1, "fp32@1"),
        (1, "fp16/nvfp4@16"),
        (1, "fp16@1"),
        (256, "fp16/nvfp4@16"),
        (256, "fp16@1"),
    ]
    assert len({c.group for c in cases}) == 2
    assert [c.policy for c in expand("mamba2", LARGE, given, [1], {})] == given


def test_a_record_has_the_choice_and_a_row_its_time(tmp_path):
    class Timer(CountingTimer):
        """fp32@1, the first, in half the time of the others."""

        def measure(self, work):
            found = super().measure(work)
            return found if self.measured > 1 else found.per(2)

    cases = expand("mamba2", SMALL, ["fp32/nvfp4@16"], [2], {}, chosen=True)
    records = run(cases, folder=tmp_path, timer=Timer())
    chosen = [record["metrics"]["chosen"] for record in records]
    assert [one["policy"] for one in chosen] == ["fp32@1", "fp32@1"]
    assert set(chosen[1]["expected_us"]) == {"fp32@1", "fp32/nvfp4@16"}
    rows = list(speed_rows(records))
    assert [row["chosen_us"] for row in rows] == [records[0]["metrics"]["us"]] * 2
    assert rows[1]["us"] != rows[1]["chosen_us"]
    assert rows[1]["chosen_against_peer"] is None
    (alone,) = speed_rows(records[1:])
    assert (alone["chosen"], alone["chosen_us"]) == ("fp32@1", None)


def test_rivals_of_what_is_chosen_keep_as_many_bits():
    def record(us, policy, implementation="quantlab", chosen=None, bits=32):
        point = {"kind": "bench"} | case("fp32@1", 1, shape=LARGE).point("x")
        metrics = {"run": "a", "us": us, "checkpoint_bits": bits}
        if chosen:
            metrics["chosen"] = {"policy": chosen}
        point |= {"policy": policy, "implementation": implementation}
        return {"point": point, "metrics": metrics, "status": "ok", "message": None}

    records = [
        record(5.0, "fp16/nvfp4@16", chosen="fp32@1", bits=16),
        record(4.0, "fp32@1", chosen="fp32@1"),
        record(3.0, "fp16@1", "vllm", bits=16),
        record(3.8, "fp32@1", "vllm"),
    ]
    row = next(speed_rows(records))
    assert (row["against_peer"], row["peer_policy"]) == (0.6, "fp16@1")
    assert (row["chosen_against_peer"], row["chosen_peer_policy"]) == (0.95, "fp32@1")
    script = importlib.import_module("experiments.kernels_h200.run")
    (line,) = [line for line in script.held([row | {"family": "mamba2"}]) if "batch 1:" in line]
    for part in (
        "0.95x",
        " met ",
        "chosen fp32@1 against vllm fp32@1",
        "0.60x of vllm fp16@1, the chosen 0.75x",
    ):
        assert part in line
