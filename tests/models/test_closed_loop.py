"""The closed loop compares what a model says next, and says where it stops comparing."""

import math
from copy import deepcopy

import numpy as np
import pytest
import scipy.special
import torch

from quantlab.errors import InputError
from quantlab.models import closed_loop, run_with_policy
from quantlab.models.agreement import MARGIN_EDGES, agreement_by_margin, compare, divergence
from quantlab.models.forwards import CachedForward
from tests.models.decoding import EACH, SAME

PROMPT, STEPS = 9, 12
POLICIES = ("fp32@1", "fp32@16", "nvfp4@4")
ONE = pytest.mark.parametrize("kind", ["mamba2"], indirect=True)


@torch.no_grad()
def logits_of(model, ids, policy):
    """float64 (sequences, steps, vocabulary) behind each decoded token."""
    with run_with_policy(model, policy):
        forward = CachedForward(model)
        forward(ids[:, :PROMPT])
        steps = [forward(ids[:, at : at + 1]) for at in range(PROMPT, PROMPT + STEPS)]
    return torch.stack(steps, 1).double().numpy()


@EACH
def test_rows_are_those_of_two_runs_one_behind_the_other(model, ids):
    ids = ids[:2]
    found = closed_loop(model, ids, POLICIES, prompt=PROMPT, steps=STEPS)
    assert [run.policy for run in found.runs] == list(POLICIES)
    base = logits_of(model, ids, "fp32@1")
    p = scipy.special.log_softmax(base, -1)
    target = ids[:, PROMPT + 1 : PROMPT + 1 + STEPS, None].numpy()
    for run in found.runs:
        other = logits_of(model, ids, run.policy)
        q = scipy.special.log_softmax(other, -1)
        table = run.table.pivot(index="sequence", columns="step")
        # float64 on both sides; 259 terms of at most about 10 each: 259 * 10 * 2^-53 = 3e-13.
        same = {"rtol": 0, "atol": 1e-12}
        kl = scipy.special.rel_entr(np.exp(p), np.exp(q)).sum(-1)
        np.testing.assert_allclose(table["kl"], kl, **same)
        np.testing.assert_allclose(table["nll"], -np.take_along_axis(q, target, -1)[..., 0], **same)
        np.testing.assert_allclose(table["baseline_nll"], -np.take_along_axis(p, target, -1)[..., 0], **same)
        best = np.sort(base, -1)
        np.testing.assert_allclose(table["margin"], best[..., -1] - best[..., -2], **same)
        agree = base.argmax(-1) == other.argmax(-1)
        assert (table["top1"].to_numpy(bool) == agree).all()
        first = tuple(None if row.all() else int((~row).argmax()) + 1 for row in agree)
        assert run.first_divergence == first
        assert run.metrics["top1_agreement"] == agree.mean()
        assert run.metrics["earliest_divergence"] == min((s for s in first if s), default=None)
        assert run.metrics["kl"] == pytest.approx(kl.mean(), rel=0, abs=1e-12)
        assert (run.status, set(run.table["status"])) == ("ok", {"ok"})
    exact, replayed, rounded = found.runs
    # Against itself the baseline is the same computation: nothing at all.
    assert not exact.measures["kl"].any()
    assert (exact.measures["nll"] == exact.measures["baseline_nll"]).all()
    # Logits within SAME of each other make log q - log p a number within a range of 2 SAME up to a constant, and the
    # KL divergence is then at most range^2 / 8 (Hoeffding's lemma): half of SAME^2.
    assert 0 < replayed.measures["kl"].max() <= SAME**2 / 2
    assert rounded.measures["kl"].max() > 1e-4
    assert len(found.table) == 3 * 2 * STEPS


@EACH
def test_free_running_parts_where_greedy_generation_does(model, ids):
    prompt = ids[:, :PROMPT]
    policies = ["fp32@16", "nvfp4@1", "fp16+sr/nvfp4@4"]
    found = closed_loop(model, prompt, policies, prompt=PROMPT, steps=STEPS, mode="free")

    def generated(policy):
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        with run_with_policy(model, policy):
            mask = torch.ones_like(prompt)
            return model.generate(prompt, attention_mask=mask, max_new_tokens=STEPS + 1, **options)[
                :, PROMPT:
            ]

    base, parted = generated("fp32@1"), 0
    for run in found.runs:
        differs = generated(run.policy) != base
        assert not differs[:, 0].any()  # chosen behind the prefill, which no policy touches
        # The token chosen at step n is the n-th behind that one.
        first = tuple(int(row.int().argmax()) if row.any() else None for row in differs)
        assert run.first_divergence == first
        for sequence, step in enumerate(first):
            rows = run.table[run.table["sequence"] == sequence]
            assert rows["step"].tolist() == list(range(1, (step or STEPS) + 1))
            assert rows["top1"].tolist() == [True] * (len(rows) - 1) + [step is None]
            parted += step is not None
        assert np.isnan(run.measures["nll"]).all()
        assert run.metrics["nll"] is None
        thin = [count for count in run.report["exercised"].values() if count is not None and count < 2]
        advice = "more steps" if None in first else "the choices parted before; mode forced reads on"
        assert (run.metrics["warning"] or "").endswith(advice if thin else "")
    assert 0 < parted < 3 * len(prompt)


@ONE
def test_a_policy_that_diverges_is_a_status_and_the_others_go_on(model, ids):
    model, ids, until = deepcopy(model), ids[:2], 20
    with (
        torch.no_grad()
    ):  # nothing is forgotten, and what is written is large: the state passes 65504 by and by
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.fill_(-30.0)
            if name.endswith("layers.0.mixer.dt_bias"):
                parameter.fill_(120.0)
    found = closed_loop(model, ids, ["fp16@1", "bf16@1"], prompt=PROMPT, steps=until)
    lost, other = found.runs
    assert (lost.status, other.status) == ("diverged", "ok")
    assert 1 < lost.diverged_at < until
    assert f"at step {lost.diverged_at}," in lost.message
    table = lost.table
    assert table["step"].tolist() == [step for step in range(1, lost.diverged_at + 1) for _ in range(2)]
    last = table[table["status"] == "diverged"]
    assert last["sequence"].tolist() == [0, 1]
    assert last[["kl", "margin", "nll", "top1"]].isna().all().all()
    assert not table[table["status"] == "ok"].isna().any().any()
    assert len(other.table) == 2 * until
    with pytest.raises(InputError, match=r"^baseline 'fp16@1': expected one that does not diverge: at step"):
        closed_loop(model, ids, ["fp32@1"], prompt=PROMPT, steps=until, baseline="fp16@1")


@ONE
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_a_divergence(model, ids, value, monkeypatch):
    read = CachedForward.__call__
    calls = []

    def broken(self, tokens):
        calls.append(self)
        logits = read(self, tokens)
        # The baseline and two policies take turns: step 3 of the first policy.
        return logits.index_fill(-1, torch.tensor([5]), value) if len(calls) == 11 else logits

    monkeypatch.setattr(CachedForward, "__call__", broken)
    lost, other = closed_loop(model, ids[:1], ["fp32@1", "bf16@1"], prompt=5, steps=6).runs
    assert (lost.status, lost.diverged_at, lost.message) == (
        "diverged",
        3,
        "at step 3, the logits are NaN or Inf",
    )
    assert lost.table["status"].tolist() == ["ok", "ok", "diverged"]
    assert len(other.table) == 6


@ONE
def test_a_store_that_nobody_read_is_a_status(model, ids):
    (run,) = closed_loop(model, ids[:1], ["fp16/nvfp4@16"], prompt=PROMPT, steps=3).runs
    assert (run.status, run.message) == (
        "not_exercised",
        "no stored state was read back: exercised {'checkpoint': 0, 'read_copy': 1}",
    )


@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0, 2000.0])
def test_divergence_is_that_of_scipy(scale):
    g = torch.Generator().manual_seed(5)
    a, b = (scale * torch.randn(16, 300, generator=g, dtype=torch.float64) for _ in range(2))
    b[::2] = a[::2] + 1e-3 * b[::2]
    a[0, 7], b[0, 7], b[1, 9] = -np.inf, -np.inf, -np.inf  # masked for both; for the policy alone
    p, q = torch.log_softmax(a, -1), torch.log_softmax(b, -1)
    expected = scipy.special.rel_entr(p.exp().numpy(), q.exp().numpy()).sum(-1)
    # Both take logarithms that are rounded, a relative 2^-53 each, and exponentials of them.
    size = max(float(x[x.isfinite()].abs().max()) for x in (p, q))
    underflow = ((p.exp() > 0) & (q.exp() == 0)).any(-1).numpy()  # infinite for scipy
    found = divergence(p, q).numpy()
    same = {"rtol": 1e-12, "atol": (size + 4) * 2**-53}
    np.testing.assert_allclose(found[~underflow], expected[~underflow], **same)
    assert (found >= 0).all()
    assert not np.isnan(found).any()
    # Infinite where the policy excludes what the baseline may say, and nowhere else.
    assert (np.isinf(found) == ((p.exp() > 0) & q.isneginf()).any(-1).numpy()).all()
    assert not divergence(p, p).any()


def test_opposite_certainties_do_not_overflow():
    """p = (1, e^-720), q the other way round: e^d = e^720 is beyond float64, and the divergence is 720."""
    p = torch.tensor([[0.0, -720.0]], dtype=torch.float64)
    assert divergence(p, p.flip(-1)).item() == pytest.approx(720, rel=1e-15)


def test_a_small_divergence_keeps_its_digits():
    """KL = Var_p(d) / 2 - third cumulant / 6 ...: of d = 1e-9 N(0, 1), 1e-9 of it apart."""
    g = torch.Generator().manual_seed(6)
    a, d = (torch.randn(4, 300, generator=g, dtype=torch.float64) for _ in range(2))
    p, mass = torch.log_softmax(a, -1), torch.softmax(a, -1)
    d = 1e-9 * d
    exact = ((mass * d**2).sum(-1) - (mass * d).sum(-1) ** 2) / 2
    # log softmax rounds each of its numbers to a few 2^-53 of 10: 1e-15 to 5e-15 on 1e-9.
    np.testing.assert_allclose(divergence(p, torch.log_softmax(p + d, -1)), exact, rtol=1e-5)


def test_bins_hold_every_token_once():
    margin = np.array([0, 0.0099, 0.01, 0.029, 0.03, 0.2, 0.3, 2.0, 3.0, 50.0, np.inf])
    top1 = np.array([0, 1, 1, 0, 1, 1, 0, 1, 1, 1, 1], bool)
    bins = agreement_by_margin(margin, top1)
    assert [found.low for found in bins] == list(MARGIN_EDGES[:-1])
    assert [found.tokens for found in bins] == [2, 2, 1, 1, 1, 1, 3]
    assert [found.agreement for found in bins] == [0.5, 0.5, 1, 1, 0, 1, 1]
    assert sum(found.tokens * found.agreement for found in bins) == top1.sum()
    assert [found.agreement for found in agreement_by_margin(margin[:0], top1[:0])] == [None] * 7


def test_measures_of_a_pair_by_hand():
    """p = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4): KL = log 2 / 4, tops that differ by log 2; the second token is next."""
    p, q = torch.tensor([[0.5, 0.25, 0.25]]).log(), torch.tensor([[0.25, 0.5, 0.25]]).log()
    found = compare(p + 3, q - 5, torch.tensor([1]))  # logits know no constant
    eps = 1e-6  # of float32 logits of order 5
    assert found.kl[0] == pytest.approx(np.log(2) / 4, abs=eps)
    assert found.margin[0] == pytest.approx(np.log(2), abs=eps)
    assert found.nll[0] == pytest.approx(np.log(2), abs=eps)
    assert found.baseline_nll[0] == pytest.approx(np.log(4), abs=eps)
    assert not found.top1[0]
    assert compare(p, p).top1[0]


@ONE
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"mode": "both"}, "^mode 'both': expected one of forced, free"),
        ({"policies": []}, r"^policies \[\]: expected at least one policy$"),
        ({"policies": ["fp33@1"]}, "^policy 'fp33@1'"),
        ({"baseline": "fp33@1"}, "^policy 'fp33@1'"),
        (
            {"steps": 35},
            "^ids '44 tokens': expected at least 45: a prompt of 9, 35 steps and a token to predict$",
        ),
        ({"mode": "free", "prompt": 45}, "^ids '44 tokens': expected at least 45: a prompt of 45$"),
        ({"steps": 0}, "^steps 0: expected a whole number of at least 1$"),
    ],
)
def test_what_cannot_be_compared_is_refused(model, ids, options, says):
    with pytest.raises(InputError, match=says):
        closed_loop(model, ids, **({"policies": ["fp32@1"], "prompt": 9, "steps": 3} | options))
