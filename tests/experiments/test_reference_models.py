"""experiments/reference_models without a GPU: its maths, its batches, and training that is stopped and goes on."""

import itertools
import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from experiments.reference_models import chunked, mixture, train
from experiments.reference_models.models import KINDS, attention_parameters, initial_model
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
    """Its ops give what transformers' own give; float32, logits of order 1, three layers."""
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


@pytest.mark.slow
def test_training_that_was_stopped_goes_on_to_the_same_weights(tmp_path):
    """Twice three steps against six, bit for bit; then the model is there."""

    def weights(folder):
        return torch.load(folder / "training.pt", weights_only=True)

    class Clock:
        """Says that time is up once ``steps`` have asked."""

        def __init__(self, steps):
            self.left = steps

        def __call__(self):
            self.left -= 1
            return 0.0 if self.left >= 0 else 1e9

    whole = train.train("mamba2", 1, tmp_path / "whole", 6, 1e9, "cpu")
    parts = train.train("mamba2", 1, tmp_path / "parts", 6, 100, "cpu", Clock(4))
    assert weights(parts)["step"] == 3
    assert not (parts / "model").exists()
    train.train("mamba2", 1, tmp_path / "parts", 6, 1e9, "cpu")
    for name, weight in weights(whole)["model"].items():
        assert torch.equal(weight, weights(parts)["model"][name]), name
    assert json.loads((parts / "curve.json").read_text())["curve"][-1]["step"] == 6
    assert (parts / "model" / "model.safetensors").exists()
