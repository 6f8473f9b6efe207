"""experiments/decode_step without a GPU: what its report makes of records, and its models' geometry."""

import dataclasses

import pytest
import torch
from transformers import AutoModelForCausalLM

from experiments.decode_step import report
from experiments.decode_step.check import cut
from experiments.decode_step.models import MODELS, random_model
from quantlab.errors import InputError
from quantlab.models.published import published
from quantlab.models.recurrent_layers import recurrent_layers
from quantlab.records import complete_record, save_record

SSM = {report.BASELINE: 10_000.0, report.REPLAY: 5_000.0, report.DUAL: 2_500.0}


def made_up(folder, batches=(256,), policies=tuple(SSM), slower=1.0, chosen=None, **changes):
    """Steps of 5 ms beside the recurrent ops; ``slower``: how much longer than their parts policies but fp32@1 take."""
    for batch in batches:
        for policy in policies:
            us = (5_000 + SSM[policy]) * (1.0 if policy == report.BASELINE else slower)
            metrics = {"us": us, "us_lower": us, "us_upper": us, "ssm": SSM[policy], "rest": 5_000.0}
            metrics |= {
                "chosen": chosen or policy,
                "attention": 1_000.0,
                "mlp": 2_000.0,
                "other": 2_000.0,
                "gaps": 100.0,
            }
            point = {"kind": "decode_step", "model": "nano_4b", "policy": policy, "batch": batch}
            point |= {"length": 512, "device": "x"}
            result = {"metrics": metrics} | changes
            save_record(folder, complete_record(point, result, environment={}))


def test_the_bound_is_amdahls(tmp_path):
    """Steps that are the sum of their parts reach it exactly; 15 ms over 10 and over 7.5."""
    made_up(tmp_path)
    rows = {row["policy"]: row for row in report.load(tmp_path)}
    assert [rows[p]["speedup"] for p in SSM] == pytest.approx([1, 1.5, 2])
    assert [rows[p]["bound"] for p in SSM] == pytest.approx([1, 1.5, 2])


def test_targets_compare_what_was_measured(tmp_path):
    made_up(tmp_path, batches=(1, 256), slower=1.2)
    lines = list(report.targets(report.load(tmp_path)))
    assert [line.split()[1] for line in lines] == ["met", "NOT", "NOT", "met", "met"]
    assert lines[2].split()[0] == "0.833"


def test_at_one_row_the_chosen_kernels_count(tmp_path):
    made_up(tmp_path, batches=(1,), slower=1.6, chosen=report.BASELINE)
    lines = [line for line in report.targets(report.load(tmp_path)) if "batch 1 " in line]
    assert [line.split()[:2] for line in lines] == [["1.000", "met"]] * 2
    assert "by the chosen kernels, fp32@1 (its own 0.938)" in lines[0]


def test_what_was_not_measured_is_no_number(tmp_path):
    made_up(tmp_path, policies=(report.REPLAY,))
    lines = report.write_report(tmp_path)
    assert sum(line.startswith("no record") for line in lines) == 5
    assert any(line.split()[-6:-4] == ["-", "-"] for line in lines)
    assert (tmp_path / "decode-step-nano_4b.png").stat().st_size > 10_000


def test_a_failed_comparison_is_shown_without_a_time(tmp_path):
    made_up(tmp_path, status="comparison_failed", message="logits differ", metrics={})
    lines = report.write_report(tmp_path)
    assert sum("comparison_failed: logits differ" in line for line in lines) == 3
    assert not list(tmp_path.glob("*.png"))


def test_a_step_that_gave_nothing_finite_has_no_speed(tmp_path):
    made_up(tmp_path, policies=(report.BASELINE,))
    made_up(tmp_path, policies=(report.DUAL,), status="diverged", message="logits are not finite")
    rows = {row["policy"]: row for row in report.load(tmp_path)}
    assert rows[report.DUAL]["speedup"] is None
    assert sum("diverged: logits are not finite" in line for line in report.write_report(tmp_path)) == 1


def test_no_records_are_an_error(tmp_path):
    with pytest.raises(InputError, match=r"^records folder .*decode_step/run\.py"):
        report.load(tmp_path)


PUBLISHED_AS = {
    "nano_4b": "Nemotron-3-Nano-4B",
    "nano_30b": "Nemotron-3-Nano-30B-A3B",
    "qwen35_4b": "Qwen3.5-4B",
    "kimi_block": "Kimi-Linear-48B-A3B",
}


@pytest.mark.parametrize("name", MODELS)
def test_geometry_is_the_published_one(name):
    """Of the recurrent layers, as ``quantlab.models.published`` has them from other sources."""
    with torch.device("meta"):
        model = MODELS[name].build()
    layers, wanted = recurrent_layers(model), published(PUBLISHED_AS[name])
    assert {layer.heads for layer in layers.values()} == {wanted.heads}
    assert {layer.family.recurrence for layer in layers.values()} == {wanted.family}
    assert len(layers) == (3 if name == "kimi_block" else wanted.layers)
    channels = sum(
        weight.shape[0]
        for part, weight in layers[min(layers)].module.named_parameters()
        if "conv" in part and part.endswith("weight")
    )
    assert channels == wanted.conv_channels
    assert {MODELS[name].attention, *MODELS[name].mlp} <= {type(part).__name__ for part in model.modules()}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_cut_model_decodes(name):
    """One layer of each kind, through two windows on the CPU, every recurrent layer under the policy."""
    from experiments.decode_step.check import _forced
    from quantlab.models import DecodeGraph

    model = random_model(cut(name), torch.device("cpu"), torch.float32)
    ids = torch.randint(0, 512, (1, 9), generator=torch.Generator().manual_seed(0))
    graph = DecodeGraph(model, "fp32/nvfp4@4", 1, 9)
    assert _forced(graph, ids).isfinite().all()
    assert set(graph.report.backends) == set(recurrent_layers(model))
    assert graph.report.stores == 1


@pytest.mark.parametrize("policy", ["fp32@16", "fp16+sr/nvfp4@16:buffer=bf16"])
def test_a_prepared_step_reads_nothing_that_was_not_written(policy, tmp_path):
    """A capture warms up on pools whose memory nobody wrote: here it is all NaN, which the layers pass on."""
    from experiments.decode_step.split import prepare
    from quantlab.models import DecodeGraph, build_tiny

    model = AutoModelForCausalLM.from_pretrained(build_tiny("nemotron_h", tmp_path))
    graph = DecodeGraph(model, policy, 3, 40)
    for pool in graph.pools.values():
        for stored in (getattr(pool, field.name) for field in dataclasses.fields(pool)):
            if isinstance(stored, torch.Tensor) and stored.dtype != torch.int32:
                stored.view(torch.uint8).fill_(255)
    graph.replay()
    assert not graph.logits.isfinite().all()
    prepare(graph, 8)
    for _ in range(17):
        graph.replay()
    assert graph.logits.isfinite().all()
