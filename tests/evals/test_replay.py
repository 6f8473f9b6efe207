"""Trace replay compares what each policy expects at every response token, whatever else is in the batch."""

import math

import numpy as np
import pytest
import scipy.special
import torch

from quantlab.errors import InputError
from quantlab.evals.replay import MEASURES, replay_batch
from quantlab.evals.replay_metrics import by_position, first_divergence, log_odds, metrics
from quantlab.evals.running_arithmetic import problems
from quantlab.evals.trace_answers import Answer
from quantlab.evals.traces import Trace
from quantlab.models import run_with_policy
from quantlab.models.decode_rows import ROWS_TOGETHER
from quantlab.models.forwards import CachedForward
from quantlab.models.policy_decoder import PolicyDecoder
from quantlab.models.reference import reference_folder
from quantlab.schemes import parse_rules
from tests.evals.spoiling import spoil
from tests.models.decoding import SAME

POLICIES = ("bf16@1", "int8@1", "fp16+sr@1", "fp32/nvfp4@4")
ANSWER = Answer(4, 1, 2, ((65,), (66, 98), (67,), (68, 100, 10)))


@pytest.fixture(scope="module")
def model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def traces():
    """Prompts and responses of many lengths, the shortest possible among them, two that end together."""
    generator = torch.Generator().manual_seed(3)
    lengths = [(9, 6), (1, 14), (5, 10), (12, 1), (3, 2), (1, 9), (20, 8), (2, 5), (7, 7), (4, 11)]
    made = []
    for number, (prompt, response) in enumerate(lengths):
        ids = torch.randint(0, 256, (prompt + response,), generator=generator).tolist()
        answer = ANSWER if response > 4 else None
        name = f"{number * 99991 + 17:016x}"[::-1]
        made.append(Trace(number, name, tuple(ids[:prompt]), tuple(ids[prompt:]), answer))
    return made


def replayed(model, policy, traces, *, size=None, seed=0):
    baseline, decoder = (PolicyDecoder(model, parse_rules(text), seed) for text in ("fp32@1", policy))
    found = []
    for first in range(0, len(traces), size or len(traces)):
        batch = traces[first : first + (size or len(traces))]
        (results,) = replay_batch(baseline, [decoder], batch)
        found += results
    return found


def equal(one, other, count=None):
    for name in MEASURES:
        assert one.measures[name][:count].tolist() == other.measures[name][:count].tolist(), name


@torch.no_grad()
def policy_logits(model, policy, trace):
    """float64 (response, vocabulary): what the policy alone expects at each response token."""
    ids = torch.tensor([trace.tokens[:-1]]).expand(ROWS_TOGETHER, -1)
    with run_with_policy(model, policy, sequence_ids=[trace.sequence_id] * ROWS_TOGETHER):
        forward = CachedForward(model)
        steps = [forward(ids[:, at : at + 1])[0] for at in range(ids.shape[1])]
    return torch.stack(steps).double().numpy()[len(trace.prompt) - 1 :]


@torch.no_grad()
def stock_logits(model, trace):
    """The same of the untouched model, by one forward over everything."""
    logits = model(torch.tensor([trace.tokens[:-1]]), use_cache=False).logits[0]
    return logits.double().numpy()[len(trace.prompt) - 1 :]


def test_the_baseline_against_itself_is_nothing_at_all(model, traces):
    for trace, one in zip(traces, replayed(model, "fp32@1", traces), strict=True):
        assert not one.measures["kl"].any()
        assert one.measures["top1"].all()
        assert (one.measures["nll"] == one.measures["baseline_nll"]).all()
        assert (one.letters is None) == (trace.answer is None)
        if one.letters is not None:
            assert (one.letters[0] == one.letters[1]).all()


@pytest.mark.parametrize("policy", POLICIES)
def test_numbers_are_those_of_stock_forwards_and_of_the_policy_alone(model, traces, policy):
    for trace, one in zip(traces, replayed(model, policy, traces), strict=True):
        p = scipy.special.log_softmax(stock_logits(model, trace), -1)
        q = scipy.special.log_softmax(policy_logits(model, policy, trace), -1)
        target = np.array(trace.response)[:, None]
        # Both read the same rows' numbers: float64 alone is between them, 259 terms of about 10, 259 * 10 * 2^-53.
        np.testing.assert_allclose(
            one.measures["nll"], -np.take_along_axis(q, target, 1)[:, 0], rtol=0, atol=1e-12
        )
        # Logits within SAME of each other have log probabilities within 2 SAME.
        baseline = -np.take_along_axis(p, target, 1)[:, 0]
        np.testing.assert_allclose(one.measures["baseline_nll"], baseline, rtol=0, atol=2 * SAME)
        kl = scipy.special.rel_entr(np.exp(p), np.exp(q)).sum(-1)
        # With log p' = log p + a, |a| <= d = 2 SAME: sum p' (log p' - log q) - sum p (log p - log q) is sum p' a, at
        # most d, and sum p (e^a - 1)(log p - log q), at most (e^d - 1) sum p |log p - log q|; e^d - 1 < 1.01 d.
        bound = 1.01 * 2 * SAME * (1 + (np.exp(p) * np.abs(p - q)).sum(-1))
        assert (np.abs(one.measures["kl"] - kl) <= bound).all()
        if trace.answer is not None:
            at = trace.answer.index
            direct = [scipy.special.logsumexp(q[at, list(tokens)]) for tokens in trace.answer.tokens]
            np.testing.assert_allclose(one.letters[1], direct, rtol=0, atol=1e-12)
            direct = [scipy.special.logsumexp(p[at, list(tokens)]) for tokens in trace.answer.tokens]
            np.testing.assert_allclose(one.letters[0], direct, rtol=0, atol=2 * SAME)
    assert one.measures["kl"].max() > 0


@pytest.mark.parametrize("policy", POLICIES)
def test_the_batch_layout_does_not_matter(model, traces, policy):
    together = replayed(model, policy, traces)
    for layout in (1, 3):
        for one, other in zip(replayed(model, policy, traces, size=layout), together, strict=True):
            equal(one, other)
            assert one.exercised == other.exercised
    for one, other in zip(reversed(replayed(model, policy, traces[::-1])), together, strict=True):
        equal(one, other)


@pytest.mark.parametrize("policy", ["fp16+sr@1", "fp32/nvfp4@4"])
def test_a_trace_that_is_cut_off_has_the_same_numbers_up_to_there(model, traces, policy):
    trace = traces[1]
    (whole,) = replayed(model, policy, [trace])
    cut = [
        Trace(n, trace.name, trace.prompt, trace.response[:n], None) for n in range(1, len(trace.response))
    ]
    for length, one in enumerate(replayed(model, policy, cut), 1):
        assert len(one.measures["kl"]) == length
        equal(one, whole, length)


def test_stochastic_bits_are_of_the_trace_and_the_seed(model, traces):
    trace = traces[2]
    other = Trace(0, "9" * 16, trace.prompt, trace.response, None)
    first, second = replayed(model, "fp16+sr@1", [trace, other])
    assert (first.measures["kl"] != second.measures["kl"]).any()
    (again,) = replayed(model, "fp16+sr@1", [trace], seed=1)
    assert (first.measures["kl"] != again.measures["kl"]).any()


@pytest.mark.parametrize("token", [1, 4, 8])
def test_a_divergence_is_found_where_it_was_planted(model, traces, token, monkeypatch):
    trace = traces[6]
    least = lambda logits: logits.index_fill(-1, logits[0].argmin()[None], 99.0)  # noqa: E731
    (plain,) = replayed(model, "fp32@16", [trace])
    assert first_divergence(plain.measures["top1"]) is None
    # The prompt's last token is read before response token 1 is compared.
    spoil(monkeypatch, "fp32@16", len(trace.prompt) + token - 1, least)
    (one,) = replayed(model, "fp32@16", [trace])
    assert first_divergence(one.measures["top1"]) == token
    where = np.flatnonzero(one.measures["kl"] > 1)
    assert where.tolist() == [token - 1]
    found = metrics([trace], [one])
    assert (found["first_divergence"], found["traces_diverging"]) == (token, 1)
    assert found["top1_agreement"] == 1 - 1 / 8


def test_logits_that_are_no_numbers_end_a_policy_and_no_other(model, traces, monkeypatch):
    nan = lambda logits: logits.index_fill(-1, torch.tensor([5]), math.nan)  # noqa: E731
    expected = replayed(model, "int8@1", traces)
    spoil(monkeypatch, "bf16@1", 6, nan)
    decoders = [PolicyDecoder(model, parse_rules(text), 0) for text in ("fp32@1", "bf16@1", "int8@1")]
    lost, other = replay_batch(decoders[0], decoders[1:], traces)
    assert lost is None
    assert (decoders[1].diverged_at, decoders[1].message) == (6, "at step 6, the logits are NaN or Inf")
    for one, same in zip(other, expected, strict=True):
        equal(one, same)
    spoil(monkeypatch, "fp32@1", 6, nan)
    with pytest.raises(InputError, match="baseline fp32@1 does not diverge: at step 6"):
        replayed(model, "int8@1", traces)


def test_what_was_exercised_is_counted_trace_by_trace(model, traces):
    for trace, one in zip(traces, replayed(model, "bf16@1", traces), strict=True):
        # The hand-off behind the first token and a store at each later one but the last that is read.
        assert one.exercised == {"checkpoint": len(trace.tokens) - 2, "read_copy": None}


def test_positions_are_binned_by_doubling():
    kl = [np.arange(1.0, 7.0), np.arange(10.0, 13.0)]
    bins = by_position(kl)
    assert [(b["first"], b["last"], b["traces"], b["tokens"]) for b in bins] == [
        (1, 1, 2, 2),
        (2, 3, 2, 4),
        (4, 6, 1, 3),
    ]
    assert [b["kl"] for b in bins] == [5.5, 7.0, 5.0]
    assert sum(b["tokens"] for b in bins) == 9


def test_log_odds_are_those_of_the_probabilities():
    p = np.array([0.1, 0.05, 0.3])
    assert log_odds(np.log(p), 2) == pytest.approx(math.log(0.3 / 0.15), rel=1e-14)


def test_answers_are_paired(traces):
    def one(before, after):
        values = {name: np.zeros(6, bool if name == "top1" else float) for name in MEASURES}
        return type("R", (), {"measures": values, "letters": np.log([before, after]), "exercised": {}})()

    wanted = traces[0]  # letter 2
    right, wrong, worse = [0.1, 0.1, 0.7, 0.1], [0.6, 0.1, 0.2, 0.1], [0.1, 0.6, 0.2, 0.1]
    rows = [one(right, wrong), one(right, wrong), one(wrong, right), one(wrong, worse), one(right, right)]
    found = metrics([wanted] * 5, rows)["answers"]
    assert (found["lost"], found["gained"], found["flipped"]) == (2, 1, 4)
    assert (found["baseline_right"], found["right"]) == (3, 2)
    assert found["p_value"] == 1.0  # of three flips, two or more on one side
    lost = math.log(0.2 / 0.8) - math.log(0.7 / 0.3)
    assert found["change"] == pytest.approx(lost / 5)
    low, high = scipy.stats.ttest_1samp([lost, lost, -lost, 0, 0], 0).confidence_interval()
    assert found["change_interval"] == pytest.approx([low, high])


def test_a_trained_model_ranks_the_policies():
    """Scratch-pads of a trained model: 8-bit blocks lose more than bf16, 4-bit ones far more."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(reference_folder("gated_delta"), dtype=torch.float32)
    prompts, rest = problems(4, 8, seed=1)
    traces = [
        Trace(n, f"{n:016x}", tuple(prompt), tuple(pad), None)
        for n, (prompt, pad) in enumerate(zip(prompts.tolist(), rest.tolist(), strict=True))
    ]
    names = ("nvfp4+sr@1", "int8@1", "bf16@1")
    decoders = [PolicyDecoder(model, parse_rules(text), 0) for text in ("fp32@1", *names)]
    found = replay_batch(decoders[0], decoders[1:], traces)
    kl = [metrics(traces, one)["kl"] for one in found]
    # bf16 has a step of 2^-8 of each value; int8 one of 2^-7 of the largest of a row, coarser still for the others;
    # e2m1 one of 2^-1, and stochastic rounding errs by up to a whole step instead of a half.
    assert kl[0] > kl[1] > kl[2] > 0
