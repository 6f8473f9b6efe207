"""Teacher-forced decode scoring: equal to a parallel prefill in fp32, blind to the batch layout, forked
exactly.
"""

import pytest
import torch

from quantlab.evals.scoring import Item, score_batch, sequence_id
from quantlab.models.interception import Interception

# Sums of up to 4 log-probabilities; each differs by the float32 rounding of logits of order 8 that went
# through the recurrent layers in another order of sums (2e-5, see tests/models/test_interception.py).
SAME = 8e-5


@pytest.fixture(scope="module")
def model(folder):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def items():
    generator = torch.Generator().manual_seed(2)
    draw = lambda n: tuple(torch.randint(0, 256, (n,), generator=generator).tolist())  # noqa: E731
    shared = draw(2)
    # Contexts and continuations of many lengths, single tokens and a common prefix among them.
    return [
        Item(draw(9), (draw(1), shared + draw(1), shared + draw(2))),
        Item(draw(1), (draw(3),)),
        Item(draw(23), (draw(4), draw(2))),
        Item(draw(23), (draw(1), draw(1))),
        Item(draw(14), (draw(2), draw(2), draw(2))),
    ]


def scores(model, policy, items, *, prefill=False, size=None):
    interception = Interception(model, policy)
    size = size or len(items)
    found = []
    for start in range(0, len(items), size):
        found += score_batch(model, interception, items[start : start + size], prefill=prefill)
    return found, interception.report


def flat(found):
    return torch.tensor([value for item in found for value, _ in item], dtype=torch.float64)


@torch.no_grad()
def parallel(model, item):
    """(log-likelihood, greedy) of each continuation by one dense forward pass."""
    found = []
    for continuation in item.continuations:
        logits = model(torch.tensor([item.context + continuation]), use_cache=False).logits[0]
        lines = logits[len(item.context) - 1 : -1].log_softmax(-1)
        target = torch.tensor(continuation)
        found.append(
            (float(lines.gather(1, target[:, None]).sum()), bool((lines.argmax(-1) == target).all()))
        )
    return found


@pytest.mark.parametrize("prefill", [False, True])
def test_fp32_decode_scores_are_the_parallel_ones(model, items, prefill):
    expected = [parallel(model, item) for item in items]
    found, _ = scores(model, "fp32@1", items, prefill=prefill, size=1 if prefill else None)
    assert (flat(found) - flat(expected)).abs().max() < SAME
    assert [[g for _, g in item] for item in found] == [[g for _, g in item] for item in expected]


def test_greedy_is_true_for_what_the_model_would_say(model, items):
    with torch.no_grad():
        said = model.generate(torch.tensor([items[2].context]), max_new_tokens=3, do_sample=False)[
            0, -3:
        ].tolist()
    other = [said[0], (said[1] + 1) % 256, said[2]]
    found, _ = scores(model, "fp32@1", [Item(items[2].context, (tuple(said), tuple(other)))])
    assert [greedy for _, greedy in found[0]] == [True, False]


@pytest.mark.parametrize("policy", ["fp32@1", "fp32@16"])
def test_the_batch_layout_does_not_matter(model, items, policy):
    alone, _ = scores(model, policy, items, size=1)
    pairs, _ = scores(model, policy, items, size=2)
    together, _ = scores(model, policy, items, size=4)
    assert (flat(alone) - flat(together)).abs().max() < 1e-5
    assert (flat(alone) - flat(pairs)).abs().max() < 1e-5


def test_stochastic_bits_do_not_see_the_batch_layout(model, items):
    # One fp16 rounding step moves a score by less than 1e-2; other random bits move all of them by more
    # than SAME.
    alone, _ = scores(model, "fp16+sr@1", items, size=1)
    together, _ = scores(model, "fp16+sr@1", list(reversed(items)))
    together.reverse()
    difference = (flat(alone) - flat(together)).abs()
    assert difference.median() < SAME
    assert difference.max() < 1e-2


def test_a_fork_scores_as_its_own_sequence(model, items):
    item = items[0]
    alone = [scores(model, "int8@4", [Item(item.context, (c,))])[0][0][0] for c in item.continuations]
    forked, _ = scores(model, "int8@4", [item])
    assert (flat(forked) - flat([alone])).abs().max() < 1e-2
    exact, _ = scores(model, "fp32@1", [item])
    assert (flat(forked) - flat(exact)).abs().max() > SAME  # the policy is at work


def test_the_shortest_sequence_decides_what_was_exercised(model, items):
    _, report = scores(model, "bf16@1", items)
    # The shortest: one context token is handed over, two continuation tokens are read; the third is only
    # scored.
    assert report.exercised["checkpoint"] == 2
    _, report = scores(model, "bf16@1", [items[2]])
    # 23 + 4 tokens: the hand-off after the first, then 22 + 3 steps; the last continuation of length 2 ends
    # after one.
    assert report.exercised["checkpoint"] == 22 + 1


def test_sequence_ids_are_a_function_of_the_tokens():
    assert sequence_id((1, 2, 3)) == sequence_id((1, 2, 3))
    assert len({sequence_id((1, 23)), sequence_id((12, 3)), sequence_id((1, 2, 3))}) == 3
    assert all(0 <= sequence_id((n,)) < 2**31 for n in range(100))
