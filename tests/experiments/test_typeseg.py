"""The trained Mamba-1 study: our scans against typeseg's own, the measures, the capture."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.typeseg import capture, corpus, network, run
from experiments.typeseg.measures import label_divergence, label_flips
from experiments.typeseg.network import ScanInputs
from experiments.typeseg.scans import (
    FAMILY,
    DivergedError,
    PolicyScan,
    Reference,
    run_reference,
    shadow_scan,
    step_inputs,
)
from quantlab.drift.gains import Gain
from quantlab.errors import InputError
from quantlab.records import load_stream_file, save_stream_file
from quantlab.schemes import parse_policy, start

needs_typeseg = pytest.mark.skipif(
    importlib.util.find_spec("typeseg") is None, reason="typeseg is not installed"
)

ULP = 2.0**-24  # relative error of one float32 rounding
DOCUMENTS = ("html+json", "python-heapq+topic-execmodel")


@pytest.fixture(scope="module")
def byte_tokens():
    return network.tokens([corpus.document(name, 64) for name in DOCUMENTS])


@pytest.fixture(scope="module")
def reference(byte_tokens):
    return run_reference(byte_tokens)


def as_inputs(scan):
    """One recorded scan of typeseg as a batch of one row."""
    x, dt, key, query = (torch.from_numpy(np.ascontiguousarray(part))[None] for part in scan[:4])
    return ScanInputs(x, dt, key, query, torch.from_numpy(scan.rates))


def policy_outputs(policy, inputs):
    rates = inputs.rates[None]
    state = start(policy, FAMILY, torch.zeros(len(inputs.x), *rates.shape), key_heads=1, rates=rates)
    return torch.stack([state.step(values)[:, 0] for values in step_inputs(inputs)], 1)


def float32_bound(inputs, window):
    """Bound of |output - exact output| (rows, T, V) for a float32 evaluation that folds every ``window`` steps.

    Let M be the recurrence on absolute values, so that |S| <= M.  One step of one element computes
    exp(dt A) s + v k: the product dt A is off by |dt A| u, which is a relative error of the factor; the exponential is
    good to 4 u (numpy's vector code stays within 2.5 ulp, 1 ulp <= 2 u); one product (u) with the state, two roundings
    in v k and one addition (u on the sum).  With a window of n records the factor of a record is exp(A (total - g_j)):
    cumsum and difference are off by at most (n + 1) u total, total being the sum of the window's dt, and the n + 1
    terms are added with at most n + 1 roundings.  So each step adds at most u (|A| (n + 2) total + n + 9) M, first
    order; 1.01 covers the higher orders.  A read then multiplies by q and adds 16 terms: 17 u sum_k |q| M.
    """
    rates = inputs.rates.double()
    dt, key, query = inputs.dt.double(), inputs.key.double().abs(), inputs.query.double().abs()
    value = (inputs.dt.double() * inputs.x.double()).abs()
    magnitude = torch.zeros(len(dt), *rates.shape, dtype=torch.float64)
    error, folded, bounds = magnitude.clone(), magnitude.clone(), []
    total = torch.zeros_like(dt[:, 0])
    for t in range(dt.shape[1]):
        decay = torch.exp(dt[:, t, :, None] * rates)
        total = total + dt[:, t]
        magnitude = decay * magnitude + value[:, t, :, None] * key[:, t, None]
        folded = decay * folded
        local = ULP * (rates.abs() * (window + 2) * total[..., None] + window + 9) * magnitude
        error = folded + local
        read = 17 * ULP * magnitude
        bounds.append(1.01 * ((error + read) * query[:, t, None]).sum(-1))
        if (t + 1) % window == 0:
            folded, total = error, torch.zeros_like(total)
    return torch.stack(bounds, 1)


@needs_typeseg
def test_every_trained_scan_under_fp32_equals_typesegs_own(byte_tokens):
    scans = network.stock_scans(byte_tokens[0])
    assert len(scans) == 2 * network.layer_count()
    for scan in scans:
        inputs = as_inputs(scan)
        ours, theirs = policy_outputs("fp32@1", inputs)[0], torch.from_numpy(network.stock_scan(scan))
        # Both are within the bound of the exact value, so within twice of each other.
        bound = 2 * float32_bound(inputs, 1)[0]
        assert ((ours - theirs).abs() <= bound).all()
        # The bound says something: far below the outputs themselves.
        assert bound.norm() < 1e-4 * theirs.norm()


@needs_typeseg
def test_a_window_of_16_changes_fp32_outputs_within_rounding_only(byte_tokens):
    for scan in network.stock_scans(byte_tokens[0])[::2]:
        inputs = as_inputs(scan)
        difference = (policy_outputs("fp32@16", inputs) - policy_outputs("fp32@1", inputs)).abs()
        bound = float32_bound(inputs, 1) + float32_bound(inputs, 16)
        assert (difference <= bound).all()
        assert bound.norm() < 1e-2 * shadow_scan(inputs, torch.arange(1))[0].norm()


@needs_typeseg
def test_the_network_around_typesegs_own_scan_is_typesegs_forward_bit_for_bit(byte_tokens):
    scans = iter([network.stock_scans(row) for row in byte_tokens])
    recorded = [list(s) for s in scans]

    def scan(layer, inputs):
        rows = [recorded[d][2 * layer + r] for r in range(2) for d in range(len(byte_tokens))]
        assert torch.equal(inputs.x, torch.from_numpy(np.stack([row.x for row in rows])))
        return torch.from_numpy(np.stack([network.stock_scan(row) for row in rows]))

    logits = network.forward(byte_tokens, scan)
    for row, tokens in zip(logits, byte_tokens, strict=True):
        assert np.array_equal(row, network.stock_logits(tokens))


@needs_typeseg
def test_fp32_gives_typesegs_labels_and_not_by_luck(byte_tokens, reference):
    logits = network.forward(byte_tokens, PolicyScan(parse_policy("fp32@1"), reference).scan)
    for row, tokens in zip(logits, byte_tokens, strict=True):
        stock = network.stock_logits(tokens)
        assert np.array_equal(row.argmax(-1), stock.argmax(-1))
        first, second = np.sort(stock, -1)[:, [-1, -2]].T
        assert 2 * np.abs(row - stock).max() < (first - second).min()


@needs_typeseg
def test_fp64_reproduces_the_shadow(byte_tokens, reference):
    scans = PolicyScan(parse_policy("fp64@1"), reference)
    logits = network.forward(byte_tokens, scans.scan)
    # Sums of 16 products and 64 steps in another order, each worth 2^-53.
    assert scans.output.pooled() < 100 * 2.0**-53
    assert scans.state.pooled() < 100 * 2.0**-53
    assert np.abs(logits - reference.logits).max() <= 1e-5 * np.abs(reference.logits).max()


@needs_typeseg
def test_records_of_a_small_run():
    policies = ("fp32@1", "fp32@16", "nvfp4@1", "fp32/nvfp4@16")
    points = run.make_points(policies, documents=list(DOCUMENTS), length=64)
    seen = []
    results = list(run.run_points(points, threads=1, on_progress=lambda *told: seen.append(told)))
    assert [point for point, _ in results] == points
    assert seen[-1] == (30, 30)
    assert seen == sorted(seen)
    by_policy = {point["policy"]: record for point, record in results}
    metrics = {policy: record["metrics"] for policy, record in by_policy.items()}
    assert all(record["status"] == "ok" and record["kind"] == "scan" for record in by_policy.values())
    assert all(
        m["kl"] >= 0 and 0 <= m["label_flips"] <= 1 and m["positions"] == 128 for m in metrics.values()
    )
    # float32 rounding of the logits' relative size 1e-6 squared, against four-bit states.
    assert max(metrics["fp32@1"]["kl"], metrics["fp32@16"]["kl"]) < 1e-9 < 1e-3 < metrics["nvfp4@1"]["kl"]
    assert metrics["fp32/nvfp4@16"]["kl"] < metrics["nvfp4@1"]["kl"]
    # The read copy never enters the checkpoint: on equal inputs the logical states are equal bit for bit.
    assert metrics["fp32/nvfp4@16"]["state_error"] == metrics["fp32@16"]["state_error"]
    assert metrics["fp32/nvfp4@16"]["read_error"] > 1e-3 > metrics["fp32@16"]["read_error"]
    # 64 steps read the hand-off and 63 stores; with a window of 16, the hand-off and three flushes, and as many copies.
    assert metrics["nvfp4@1"]["exercised"] == {"checkpoint": 64, "read_copy": None}
    assert metrics["fp32/nvfp4@16"]["exercised"] == {"checkpoint": 4, "read_copy": 4}
    # 12 scans of 256 x 16 values, four bytes, read and written once a token.
    assert metrics["fp32@1"]["bytes_per_token"] == 12 * 256 * 16 * 4 * 2
    assert len(metrics["nvfp4@1"]["scans"]) == 12
    for record in by_policy.values():
        assert len({len(values) for values in record["curve"].values()}) == 1
        json.dumps(record)


@needs_typeseg
def test_rows_of_the_batch_do_not_depend_on_each_other(byte_tokens, reference):
    alone = run_reference(byte_tokens[1:])
    together = PolicyScan(parse_policy("nvfp4@1"), reference)
    single = PolicyScan(parse_policy("nvfp4@1"), alone)
    assert np.array_equal(
        network.forward(byte_tokens, together.scan)[1], network.forward(byte_tokens[1:], single.scan)[0]
    )


@needs_typeseg
def test_capture_is_deterministic_and_is_what_the_scans_see(tmp_path, byte_tokens):
    arrays, meta = capture.capture(DOCUMENTS, 64)
    first = save_stream_file(tmp_path / "a.safetensors", arrays, meta)
    assert first == save_stream_file(tmp_path / "b.safetensors", *capture.capture(DOCUMENTS, 64))
    assert first != save_stream_file(tmp_path / "c.safetensors", *capture.capture(DOCUMENTS[::-1], 64))
    stored, stored_meta = load_stream_file(tmp_path / "a.safetensors")
    assert stored_meta["family"] == FAMILY
    assert stored_meta["text_hash"] == corpus.corpus_hash(DOCUMENTS, 64)
    assert arrays["v"].shape == (64, 2, 12, 256)
    assert arrays["k"].shape == (64, 2, 12, 16)
    # Head 3 of document 1 is layer 1 on the reversed text.
    scan = network.stock_scans(byte_tokens[1])[3]
    assert np.array_equal(stored["v"][:, 1, 3], scan.dt * scan.x)
    assert np.array_equal(stored["rates"][3], scan.rates)


@needs_typeseg
def test_capture_feeds_a_drift_stream(tmp_path, capsys):
    from quantlab.drift.streams import load_stream

    path = tmp_path / "typeseg.safetensors"
    assert capture.main([str(path), "--length", "16"]) == 0
    assert len(capsys.readouterr().out.strip()) == 16
    stream = load_stream(path)
    assert (stream.family, stream.steps, stream.batch, stream.heads, stream.key_heads) == (
        FAMILY,
        16,
        1,
        12,
        12,
    )


def test_a_missing_package_says_what_to_install(monkeypatch, capsys):
    network._typeseg.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    try:
        assert run.main(["--policy", "fp32@1"]) == 2
    finally:
        network._typeseg.cache_clear()
    message = capsys.readouterr().err
    assert "pip install 'quantlab[study]'" in message
    assert message.count("\n") == 1


def test_documents_are_ascii_of_the_asked_length_and_named_by_their_hash():
    for name in corpus.DOCUMENTS:
        text = corpus.document(name, 512)
        assert len(text) == len(text.encode()) == 512
        parts = [corpus.document(part, 256) for part in name.split("+")]
        assert text == "".join(parts)
    assert len({corpus.document(name, 512) for name in corpus.DOCUMENTS}) == len(corpus.DOCUMENTS)
    assert corpus.corpus_hash(["html"], 64) == corpus.corpus_hash(["html"], 64)
    assert len({corpus.corpus_hash(names, n) for names in (["html"], ["json"]) for n in (64, 66)}) == 4


@pytest.mark.parametrize(
    ("name", "length", "word"), [("htlm", 64, "html"), ("html+json", 65, "2"), ("html", 10**6, "at most")]
)
def test_a_wrong_document_is_an_input_error(name, length, word):
    with pytest.raises(InputError, match=word):
        corpus.document(name, length)


@pytest.mark.parametrize(
    ("change", "argument"),
    [
        ({"kind": "drift"}, "kind"),
        ({"documents": []}, "documents"),
        ({"length": 8}, "length"),
        ({"seed": -1}, "seed"),
        ({"lenght": 512}, "point field"),
        ({"policy": "nvfp5@1"}, "policy"),
    ],
)
def test_a_wrong_point_is_refused_before_any_work(change, argument):
    point = {**run.make_points(["fp32@1"])[0], **change}
    with pytest.raises(InputError) as caught:
        next(run.run_points([point]))
    assert caught.value.argument == argument


def test_points_must_differ_in_the_policy_only():
    points = run.make_points(["fp32@1"]) + run.make_points(["fp32@16"], length=1024)
    with pytest.raises(InputError, match="policy only"):
        next(run.run_points(points))
    assert list(run.run_points([])) == []


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 10))
def test_label_divergence_obeys_its_bounds(seed, size):
    generator = np.random.default_rng(seed)
    reference = 5 * generator.standard_normal((4, 35))
    change = size * generator.uniform(-1, 1, (4, 35))
    divergence = label_divergence(reference, reference + change)
    # log E exp(change) - E change <= range^2 / 8 (Hoeffding's lemma); 1e-12 for the rounding of float64 logs.
    assert (divergence >= -1e-12).all()
    assert (divergence <= np.ptp(change, axis=-1) ** 2 / 8 + 1e-12).all()
    # A constant added to all logits is no change.
    assert np.abs(label_divergence(reference, reference + size)).max() < 1e-12


def test_label_divergence_and_flips_of_a_case_done_by_hand():
    reference, logits = np.log([[0.75, 0.25]]), np.log([[0.25, 0.75]])
    assert label_divergence(reference, logits) == pytest.approx(0.5 * np.log(3), rel=1e-12)
    assert label_flips(reference, logits).tolist() == [True]
    assert label_flips(reference, 2 * reference).tolist() == [False]


@pytest.mark.parametrize("window", [1, 4])
def test_the_gain_of_one_constant_decay_is_the_closed_form(window):
    decay, periods = 0.9, 200
    length = 2 * periods * window
    gain = Gain(window, scaled=True, length=length)
    state = torch.tensor([[[1.0, 2.0, 3.0]]])
    for _ in range(length):
        gain.step(torch.full((1, 1, 3), decay), state, torch.tensor([[1.0, 1.0, 2.0]]))
    rho, noise, weight = decay**2, 14 / 3, 6.0
    after_store = noise / (1 - rho**window)
    # The counted half is long past the start (rho^400 < 1e-16); float32 sums of positive terms: 1e-4.
    held = sum(rho**j for j in range(1, window + 1))
    assert gain.checkpoint == pytest.approx(periods * weight * after_store * held, rel=1e-4)
    read = sum(rho**j for j in range(1, window))
    assert gain.copy == pytest.approx(periods * weight * noise * read, rel=1e-4, abs=1e-9)


def test_an_unscaled_format_rounds_each_element_by_its_own_size():
    gain = Gain(1, scaled=False, length=2)
    for _ in range(2):
        gain.step(torch.ones(1, 1, 2), torch.tensor([[[1.0, 3.0]]]), torch.tensor([[1.0, 0.0]]))
    # Only the second step counts; it sees the first store's error of the element that q reads.
    assert gain.checkpoint == 1.0


def test_divergence_names_the_layer_and_the_step():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 9, 4, generator=generator)
    x[:, 5] = 3e38
    rows = (x, torch.full((2, 9, 4), 2.0), torch.ones(2, 9, 3), torch.ones(2, 9, 3))
    inputs = ScanInputs(*rows, rates=-torch.ones(4, 3))
    outputs, states = shadow_scan(inputs, torch.arange(2))
    reference = Reference(np.zeros((1, 9, 35)), [inputs], [outputs], [states], [{}])
    with pytest.raises(DivergedError, match=r"layer 0 .* step 5"):
        PolicyScan(parse_policy("fp32@1"), reference).scan(0, inputs)


def test_the_spec_and_the_command_line_run_the_same_policies():
    from quantlab.sweep.spec import expand, load_study

    spec = Path(run.__file__).with_name("study.toml")
    jobs = expand(load_study(spec), spec.parent)
    assert [p["policy"] for job in jobs for p in job.points] == [str(parse_policy(p)) for p in run.POLICIES]
    quick = expand(load_study(spec), spec.parent, quick=True)
    # A point of the sweep is one that the runner takes: names, length and seed are read without complaint.
    assert {run._params(point)[1] for job in quick for point in job.points} == {64}
