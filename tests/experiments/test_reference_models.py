"""experiments/reference_models without a GPU: its maths, its batches, and training that is stopped and goes on."""

import contextlib
import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from experiments.reference_models import chunked, measure, mechanism, mixture, train
from experiments.reference_models.models import KINDS, attention_parameters, initial_model
from quantlab.drift import Stream
from quantlab.errors import InputError
from quantlab.evals.state_recall import Level, questions
from quantlab.models.reference import vocabulary as v
from quantlab.recurrences import StepInputs, get_recurrence

CPU = torch.device("cpu")


def random_tokens(family, count, seed=0, key_heads=2, heads=4, value_dim=3, key_dim=8):
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes):
        return torch.randn(2, count, *sizes, generator=generator, dtype=torch.float64)

    recurrence = get_recurrence(family)
    gate = recurrence.gate_shape(heads, value_dim, key_dim)
    return recurrence, StepInputs(
        q=normal(key_heads, key_dim),
        k=F.normalize(normal(key_heads, key_dim), dim=-1),
        v=normal(heads, value_dim),
        log_decay=-normal(*gate).abs(),
        beta=torch.sigmoid(normal(heads)) if recurrence.delta_rule else None,
    )


@pytest.mark.parametrize("count", [1, 16, 64, 131])
@pytest.mark.parametrize("family", ["mamba2", "gated_delta", "kimi_delta"])
def test_chunks_at_once_are_the_steps_one_after_the_other(family, count):
    """float64; a sum of at most 131 terms of order 1 in two orders: 1e-12 leaves three digits to spare."""
    recurrence, tokens = random_tokens(family, count)
    state, expected = torch.zeros(2, 4, 3, 8, dtype=torch.float64), []
    for t in range(count):
        state, output = recurrence.step(state, tokens.token(t), None)
        expected.append(output)
    found = chunked.outputs(recurrence, tokens)
    torch.testing.assert_close(found, torch.stack(expected, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("family", ["mamba2", "gated_delta", "kimi_delta"])
def test_decays_that_underflow_have_gradients(family):
    recurrence, tokens = random_tokens(family, 20)
    leaves = tokens.map(lambda t: t.clone().requires_grad_())
    fast = StepInputs(leaves.q, leaves.k, leaves.v, leaves.log_decay * 2000, leaves.beta)
    chunked.outputs(recurrence, fast).square().sum().backward()
    for name, leaf in vars(leaves).items():
        assert leaf is None or bool(leaf.grad.isfinite().all()), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_in_training_is_the_model_that_is_shipped(kind):
    """Its ops give what transformers' own give: sums of up to 118 float32 terms in another order, some 1e-5 on logits
    of order 1 through three layers (measured: 2e-5); a step size clamped at 1e-3 would show as .06.
    """
    model = initial_model(kind, 0, CPU).eval()
    ids = torch.from_numpy(mixture.batch(0, 0, 0).tokens[::12])
    with torch.no_grad():
        expected = model(ids, use_cache=False).logits
        with train._all_chunks_at_once(model):
            found = model(ids, use_cache=False).logits
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-4)


def test_a_batch_is_a_function_of_seed_stage_and_step():
    for stage, wanted in enumerate(mixture.STAGES):
        one, two = mixture.batch(3, stage, 7), mixture.batch(3, stage, 7)
        assert np.array_equal(one.tokens, two.tokens)
        assert one.tokens.shape == (
            mixture.ROWS + mixture.ARITHMETIC_ROWS + mixture.TEXT_ROWS,
            wanted.tokens,
        )
        for other in (mixture.batch(4, stage, 7), mixture.batch(3, stage, 8)):
            assert not np.array_equal(one.tokens, other.tokens)


@pytest.mark.parametrize("stage", range(len(mixture.STAGES)))
def test_what_a_batch_asks_stands_where_it_says(stage):
    """The loss reads these places from the first row, so all rows must agree."""
    found = mixture.batch(0, stage, 1)
    asked = found.questions
    for places, word in ((asked.recall, "?"), (asked.letter, "ANS")):
        assert (places == places[0]).all()
        assert (found.tokens[: mixture.ROWS][:, places[0]] == v.token(word)).all()
    assert (asked.options == asked.options[0]).all()
    options = found.tokens[: mixture.ROWS, asked.options[0].reshape(-1)].reshape(asked.options.shape)
    right = mixture.option_is_right(asked)
    assert (right.sum(-1) == 1).all()
    assert (options[right].reshape(asked.value.shape) - v.token("v00") == asked.value).all()
    follow, rest = found.follow, found.tokens[mixture.ROWS :, 1:]
    assert (follow[mixture.ARITHMETIC_ROWS :] == rest[mixture.ARITHMETIC_ROWS :]).all()
    said = follow[: mixture.ARITHMETIC_ROWS]
    assert (said[said >= 0] == rest[: mixture.ARITHMETIC_ROWS][said >= 0]).all()
    for row, tokens in zip(said, found.tokens[mixture.ROWS :], strict=False):
        words = [v.WORDS[i - v.FIRST_WORD] for i in tokens[1:][row >= 0]]
        assert not {"Start", "Work"} & set(words), "what is given is not to be predicted"


@pytest.mark.parametrize("kind", [kind for kind, each in KINDS.items() if each.inert])
def test_attention_that_is_to_be_inert_is_not_trained(kind):
    model = initial_model(kind, 0, CPU)
    parts = list(attention_parameters(model))
    assert parts
    assert not any(parameter.requires_grad for _, parameter in parts)
    assert not any(bool(parameter.any()) for name, parameter in parts if "o_proj" in name)
    assert {id(p) for _, p in parts}.isdisjoint(
        id(p) for group in train._optimizer(model, "cpu").param_groups for p in group["params"]
    )


def test_the_rate_rises_stays_and_falls():
    rates = [train._schedule(step, 4000) for step in range(4001)]
    assert rates[0] == 1 / train.WARM_UP
    assert rates[train.WARM_UP : 2000] == [1.0] * (2000 - train.WARM_UP)
    assert all(a >= b for a, b in itertools.pairwise(rates[2000:]))
    assert rates[-1] == pytest.approx(train.LAST_RATE)


class Clock:
    """Reads 0 ``times`` times, then says that time is up, or interrupts."""

    def __init__(self, times, interrupts=False):
        self.left, self.interrupts = times, interrupts

    def __call__(self):
        self.left -= 1
        if self.left >= 0:
            return 0.0
        if self.interrupts:
            raise KeyboardInterrupt
        return 1e9


@pytest.mark.slow
@pytest.mark.parametrize("interrupts", [False, True])
def test_training_that_was_stopped_goes_on_to_the_same_weights(interrupts, tmp_path, monkeypatch):
    """Stopped in order or in the middle of step 4, then once more to the end, against six steps; bit for bit."""

    def weights(folder):
        return torch.load(folder / "training.pt", weights_only=True)

    monkeypatch.setattr(train, "KEPT_EVERY", 2)
    whole = train.train("mamba2", 1, tmp_path / "whole", 6, 1e9, "cpu")
    parts = tmp_path / "parts" / "mamba2-1"
    # Read at the start, before each of the first three steps, and when the second was kept.
    with pytest.raises(KeyboardInterrupt) if interrupts else contextlib.nullcontext():
        train.train("mamba2", 1, tmp_path / "parts", 6, 100, "cpu", Clock(5, interrupts))
    assert weights(parts)["step"] == (2 if interrupts else 3)
    assert not (parts / "model").exists()
    train.train("mamba2", 1, tmp_path / "parts", 6, 1e9, "cpu")
    for name, weight in weights(whole)["model"].items():
        assert torch.equal(weight, weights(parts)["model"][name]), name
    assert json.loads((parts / "curve.json").read_text())["curve"][-1]["step"] == 6
    assert (parts / "model" / "model.safetensors").exists()
    assert not list(parts.glob("*.partial"))


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_right_answers_survive_a_record(right):
    assert measure.right_answers(measure.bits(np.array(right)), len(right)).tolist() == right


def test_chunks_of_one_token_change_nothing_but_memory():
    model, ids = initial_model("mamba2", 0, CPU).eval(), torch.arange(12).view(2, 6)
    with torch.no_grad():
        before = model(ids).logits
        after = measure.one_token_chunks(model)(ids).logits
    chunks = {module.chunk_size for module in model.modules() if hasattr(module, "chunk_size")}
    assert chunks == {1}
    assert (after - before).abs().max() < 1e-4 * before.abs().max()  # float32 sums in another order


def recorded(family, steps=40, decay=0.9, batch=3, heads=2, value_dim=4, key_dim=16, seed=0):
    """A stream with one decay, and unit keys."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*sizes):
        return torch.randn(steps, batch, *sizes, generator=generator)

    recurrence = get_recurrence(family)
    gate = recurrence.gate_shape(heads, value_dim, key_dim)
    return Stream(
        family=family,
        q=normal(heads, key_dim),
        k=F.normalize(normal(heads, key_dim), dim=-1),
        v=normal(heads, value_dim),
        log_decay=torch.full((steps, batch, *gate), decay).log(),
        initial=torch.zeros(batch, heads, value_dim, key_dim),
        beta=torch.full((steps, batch, heads), 0.5) if recurrence.delta_rule else None,
    )


def asked_twice(stream, change):
    """The stream, and behind its sequences the same with ``change`` added to v of token 0."""

    def twice(x):
        return None if x is None else torch.cat([x, x], 1)

    v = twice(stream.v)
    v[0, stream.v.shape[1] :] += change
    rest = {name: twice(getattr(stream, name)) for name in ("q", "k", "log_decay", "beta")}
    return dataclasses.replace(stream, **rest, v=v, initial=torch.cat([stream.initial] * 2))


def facts(stream, written):
    """``state_facts`` of a stream whose facts have another value the second time, as plain numbers."""
    both = asked_twice(stream, 1.0)
    return mechanism.plain(mechanism.state_facts(both, mechanism.exact(both)[0], written))


@pytest.mark.parametrize("family", ["mamba2", "gated_delta", "kimi_delta"])
def test_retention_is_what_decay_leaves(family):
    """A fact at place p of the sequence is token p - 1 of the stream, which decays at every later one."""
    stream, written = recorded(family), torch.tensor([1, 10, 40])
    found = facts(stream, written)
    assert found["retention"] == pytest.approx([0.9 ** (40 - 10)] * 2, rel=1e-5)
    assert found["decay"]["0.5"] == pytest.approx(0.9, rel=1e-5)


def test_a_state_that_was_written_along_one_key_has_rank_one():
    stream = recorded("mamba2")
    same = dataclasses.replace(stream, k=stream.k[:1].expand(40, -1, -1, -1).contiguous())
    found = facts(same, torch.tensor([1, 1, 1]))
    assert found["rank_one"] == pytest.approx([1.0] * 2, abs=1e-9)
    assert found["read_rank"] == [1.0, 1.0]
    assert max(facts(stream, torch.tensor([1, 1, 1]))["rank_one"]) < 0.9


def test_the_spread_of_columns_is_that_within_a_block():
    """Powers of two in the columns of keys pass through to the state: one column in sixteen 2^5 above equal ones."""
    stream = recorded("mamba2")
    k = torch.zeros_like(stream.k).index_fill(-1, torch.tensor([3]), 2.0**5)
    k[k == 0] = 1.0
    found = facts(dataclasses.replace(stream, k=k), torch.tensor([1, 1, 1]))
    blocks = [2.0**5] + [1.0] * (-(-stream.k.shape[-1] // mechanism.BLOCK) - 1)
    assert found["column_spread"] == pytest.approx(
        [sum(math.log2(b) for b in blocks) / len(blocks)] * 2, abs=1e-9
    )


def test_what_outputs_tell_of_a_fact():
    """float32 loses 40 roundings of 6e-8 at most of what the fact is 1e-3 of; an NVFP4 read errs by .02 to .2 of the
    state, which is more than the fact.
    """
    stream = asked_twice(recorded("mamba2", decay=1.0), 0.01)
    exact = mechanism.exact(stream)[1]
    right = mechanism.fact_in_outputs(stream, "fp32@1", exact)
    assert right["of_fact"]["error"] < 1e-2
    assert right["kept"] == pytest.approx([1.0] * 2, abs=1e-2)
    coarse = mechanism.fact_in_outputs(stream, "fp32/nvfp4@16", exact)
    assert coarse["of_fact"]["error"] > 1
    assert (coarse["spread"] <= coarse["error"] * (1 + 1e-6)).all()


def test_a_fact_is_kept_beyond_its_decay_where_rounding_swallows_it():
    """A thousandth a token is below half a step of E2M1, a sixth of 6 and an eighth of 2: nothing moves under nearest
    rounding, while stochastic rounding is fair on average.
    """
    steps, decay = 200, 0.999
    empty = recorded("mamba2", batch=64, steps=steps, decay=decay)
    # The fact stands in key column 0; column 1 is written so that it stays at 6, and the scales with it.
    q, k = torch.zeros_like(empty.q), torch.zeros_like(empty.k)
    q[..., 0] = k[:1, ..., 0] = k[1:, ..., 1] = 1.0
    v = torch.full_like(empty.v, 6 * (1 - decay))
    v[0] = 6.0
    start = empty.initial.clone()
    start[..., 1] = 6.0 / decay
    stream = asked_twice(dataclasses.replace(empty, q=q, k=k, v=v, initial=start), -4.0)
    exact = mechanism.exact(stream)[1]
    assert exact[:64] == pytest.approx(6 * decay ** (steps - 1), rel=1e-5)
    held = mechanism.fact_in_outputs(stream, "nvfp4@1", exact)["of_fact"]
    assert held["kept"] == pytest.approx(decay ** -(steps - 2), rel=1e-3)
    fair = mechanism.fact_in_outputs(stream, "nvfp4+sr@1", exact)["of_fact"]
    assert 0.8 < fair["kept"] < 1.1 < held["kept"]
    assert fair["spread"] > held["spread"]


def test_where_a_fact_was_written_is_found(monkeypatch):
    """``look`` reads the places from the questions; the place of the value, behind its key."""
    asked, seen = questions(Level(6, 4, 10), 5, 0), []
    model = initial_model("gated_delta", 0, CPU).eval()
    monkeypatch.setattr(mechanism, "state_facts", lambda stream, state, written: seen.append(written) or {})
    layers = mechanism.look(model, asked)
    assert [layer.number for layer in layers] == [0, 1, 2]
    assert all(0 < share < 2 for layer in layers for share in layer.facts["share"].tolist())
    for row, place in enumerate(seen[0].tolist()):
        words = v.text(asked.tokens[row]).split()
        assert words[place] == v.VALUES[asked.value[row, 0]]
        assert words[place - 1] == words[int(asked.recall[row, 0]) - 1]


@pytest.mark.parametrize(
    ("script", "arguments", "expected"),
    [
        (train, ["--kind", "mamba2", "--steps", "0"], "--steps"),
        (train, ["--kind", "mamba2", "--seed", "-1"], "--seed"),
        (train, ["--kind", "mamba2", "--device", "tpu"], "device 'tpu'"),
        (measure, ["--items", "0"], "--items"),
        (measure, ["--policy", "zz@1"], "policy"),
        (measure, ["--device", "tpu"], "device 'tpu'"),
        (mechanism, ["--policy", "zz@1"], "policy 'zz@1'"),
        (mechanism, ["--items", "-5"], "--items"),
    ],
)
def test_bad_arguments_end_with_status_2_and_leave_no_file(
    script, arguments, expected, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr("sys.argv", ["script", *arguments, "--output", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 2
    assert expected in capsys.readouterr().err.splitlines()[-1]
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize("script", [train, measure, mechanism])
def test_a_file_in_the_way_is_one_line(script, tmp_path, monkeypatch, capsys):
    (tmp_path / "out").write_text("")
    more = ["--kind", "mamba2"] if script is train else []
    monkeypatch.setattr("sys.argv", ["script", *more, "--output", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        script.main()
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("error: output")


@pytest.mark.parametrize("damage", ["nothing of torch", None])
def test_training_that_cannot_go_on_says_so(damage, tmp_path):
    folder = tmp_path / "mamba2-1"
    folder.mkdir()
    if damage:
        (folder / "training.pt").write_text(damage)
    else:
        torch.save({"steps": 7}, folder / "training.pt")
    with pytest.raises(InputError) as error:
        train.train("mamba2", 1, tmp_path, 5, 1, "cpu")
    assert error.value.argument == ("training.pt" if damage else "steps")
