"""Rules that give the heads of a stream several policies: each head drifts as it does under its own."""

import dataclasses

import numpy as np
import pytest

from quantlab.drift import run_drift, run_long, synthetic_stream
from quantlab.drift.head_policies import parse_followed
from quantlab.drift.point import check_points
from quantlab.errors import InputError
from quantlab.recurrences import RECURRENCES
from quantlab.schemes import PolicyRules, Rule, parse_policy

NARROW, WIDE, DUAL = "nvfp4@1", "fp16+sr@1", "fp8/nvfp4@1:flush_read=copy"
"""Stored every token, so that nothing is summed over tokens and a head has the same bits in any group."""


def small(family="gated_delta", **changes):
    options = {
        "heads": 6,
        "key_heads": 3,
        "sequences": 2,
        "steps": 24,
        "value_dim": 8,
        "key_dim": 16,
        "seed": 2,
    }
    return synthetic_stream(family, **options | changes)


def rules(*given, default=NARROW):
    def numbers(listed):
        return None if listed is None else frozenset(listed)

    made = [Rule(numbers(layers), numbers(heads), parse_policy(policy)) for layers, heads, policy in given]
    return PolicyRules(parse_policy(default), tuple(made))


@pytest.mark.parametrize("family", sorted(RECURRENCES))
def test_every_head_drifts_as_under_its_own_policy(family):
    stream = small(family)
    mixed = rules((None, [0, 4], WIDE), (None, [3], DUAL))
    result = run_drift(stream, [mixed, NARROW, WIDE, DUAL], dense=True)
    run, *plain = result.runs
    head = np.arange(12) % 6
    for own, heads in zip(plain, ([1, 2, 5], [0, 4], [3]), strict=True):
        units = np.isin(head, heads)
        for name in ("output_error", "state_error", "read_error", "gain"):
            assert np.array_equal(getattr(run, name)[:, units], getattr(own, name)[:, units]), name
        for name in ("state", "output"):
            found, expected = getattr(run.prediction, name), getattr(own.prediction, name)
            assert np.array_equal(found[:, units], expected[:, units], equal_nan=True)
            assert np.isfinite(found).all()
    assert run.policy == mixed
    # Step t reads the store before it, the first one that of the hand-off.
    assert run.exercised == {"checkpoint": 24, "read_copy": 24}
    parts = [own.ledger.bytes_per_token * n / 6 for own, n in zip(plain, (3, 2, 1), strict=True)]
    # Keys are charged to each group that uses them; with window 1 there are none.
    assert run.ledger.bytes_per_token == pytest.approx(sum(parts), rel=1e-12)
    assert str(mixed) in result.table["policy"].unique()


@pytest.mark.parametrize("family", ["gated_delta", "kimi_delta"])
def test_a_long_run_of_rules_has_the_same_numbers(family):
    stream, mixed = small(family, steps=48), rules((None, [0, 4], "fp32@5"), default="nvfp4@4")
    whole, long = run_drift(stream, [mixed, "fp32@5"]), run_long(stream, [mixed, "fp32@5"])
    for one, other in zip(whole.runs, long.runs, strict=True):
        assert one.policy == other.policy
        np.testing.assert_equal(other.metrics(long.stream_hash), whole.metrics(one))
    metrics = whole.metrics(whole.runs[0])
    assert np.isfinite(metrics["predicted_output_error"])
    assert metrics["effective_policy"].startswith("heads 0,4: fp32@5:")


def test_the_layer_of_the_stream_decides_which_rules_hold():
    stream = small()
    given = rules(([2], None, WIDE), ([5], [9], DUAL))
    taken = dataclasses.replace(stream, meta={"layer": 2})
    first, second = run_drift(stream, [given]).runs, run_drift(taken, [given]).runs
    assert first[0].effective_policy == run_drift(stream, [NARROW]).runs[0].effective_policy
    assert second[0].effective_policy == run_drift(stream, [WIDE]).runs[0].effective_policy
    for layer in (5, "2", True, -1):
        with pytest.raises(InputError) as refused:
            run_drift(dataclasses.replace(stream, meta={"layer": layer}), [given])
        assert "\n" not in str(refused.value)


def test_what_rules_cannot_do_is_said_in_one_line(tmp_path):
    (tmp_path / "r.toml").write_text(rules((None, [6], WIDE)).toml())
    path = str(tmp_path / "r.toml")
    for run in (run_drift, run_long):
        with pytest.raises(InputError, match="heads from 0 to 5, which is what layer 0 has"):
            run(small(), [path])
        with pytest.raises(InputError, match="a list of policies"):
            run(small(), tmp_path / "r.toml")
    with pytest.raises(InputError, match="delta rule"):
        run_drift(small("mamba2"), [rules((None, [1], "fp32@4:contents=derived"))])
    with pytest.raises(InputError, match="not a file of rules"):
        check_points([{"stream": {"family": "mamba2"}, "policy": path}])
    assert parse_followed("fp32@16") == parse_policy("fp32@16")
    (tmp_path / "plain.toml").write_text('default = "fp32@16"')
    assert parse_followed(tmp_path / "plain.toml") == parse_policy("fp32@16")
