"""Rows that are refilled one by one: each gives the logits of its sequence alone, whatever else is there or was."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from quantlab.errors import InputError
from quantlab.models import build_tiny, run_with_policy
from quantlab.models.decode_rows import ROWS_TOGETHER, EagerRows, GraphRows
from quantlab.models.interception import Interception
from tests.models.architectures import ARCHITECTURES, decode

FAST = ("falcon_h1",)
PROMPTS, LENGTHS = (5, 3, 11), (17, 9, 24)
CAPACITY = 32
# As PADDED in test_architectures.py, and for its reason: a row of a batch differs from a batch of one in every product.
SAME = 5e-5


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    models = {}

    def get(name):
        if name not in models:
            folder = build_tiny(name, tmp_path_factory.mktemp("rows") / name)
            models[name] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return models[name]

    return get


def sequences():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 100, (1, n), generator=generator) for n in LENGTHS]


def alone(model, policy, names=(7, 8, 9), seed=1):
    found = []
    for ids, prompt, name in zip(sequences(), PROMPTS, names, strict=True):
        with run_with_policy(model, policy, seed=seed, sequence_ids=[name]):
            found.append(decode(model, ids, prompt)[0])
    return found


def refilled(rows, names=(7, 8, 9)):
    """Logits of each sequence: the first in row 0, the second in row 1, and the third there when that one ends."""
    ids, got, exercised = sequences(), [[], [], []], {}

    def admit(row, number):
        prefix = rows.read(ids[number][:, : PROMPTS[number]])
        rows.admit([row], prefix, [0], [names[number]])
        got[number].append(prefix.logits[0].clone())
        return number, PROMPTS[number]

    at = {0: admit(0, 0), 1: admit(1, 1)}
    while at:
        tokens = torch.zeros(rows.count, dtype=torch.int64)
        for row, (number, place) in at.items():
            tokens[row] = ids[number][0, place]
        logits = rows.step(tokens)
        for row, (number, place) in list(at.items()):
            got[number].append(logits[row].clone())
            at[row] = number, place + 1
            if place + 1 == LENGTHS[number]:
                (exercised[number],) = rows.exercised([row], [place + 1 - PROMPTS[number]])
                del at[row]
                if number == 1:
                    at[row] = admit(row, 2)
    rows.close()
    return [torch.stack(logits) for logits in got], exercised


def close(found, expected):
    return all((one - other).abs().max() < SAME for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    "name", [n if n in FAST else pytest.param(n, marks=pytest.mark.slow) for n in ARCHITECTURES]
)
@pytest.mark.parametrize("engine", ["eager", "graph"])
def test_a_row_gives_what_its_sequence_alone_gives(built, name, engine):
    """fp32@4: no rounding that could turn on the last place of a sum, cursors of rows at different places."""
    model, policy = built(name), "fp32@4"
    if engine == "graph" and ARCHITECTURES[name].family == "mamba1":
        with pytest.raises(InputError, match="states a pool holds"):
            GraphRows(model, policy, 3, CAPACITY)
        return
    rows = (
        GraphRows(model, policy, 3, CAPACITY, seed=1)
        if engine == "graph"
        else EagerRows(model, Interception(model, policy, seed=1), 2, CAPACITY)
    )
    found, exercised = refilled(rows)
    assert close(found, alone(model, policy))
    # 12, 6 and 13 tokens behind the prompts, a store each four of them; the last one is read if a token follows.
    assert {n: counts["checkpoint"] for n, counts in exercised.items()} == {0: 3, 1: 2, 2: 4}


def test_a_sequence_has_the_random_bits_of_its_name(built):
    """int4+sr@1 turns every bit that differs into another logit."""
    model, policy = built("falcon_h1"), "int4+sr@1"

    def eager():
        return EagerRows(model, Interception(model, policy, seed=1), 2, CAPACITY)

    found, _ = refilled(eager())
    assert close(found, alone(model, policy))
    assert not close(refilled(eager(), names=(7, 8, 10))[0], found)


def test_forks_of_a_prompt_round_on_their_own(built):
    """The hand-off too: two continuations of one prompt under other names differ from the first step on."""
    model = built("falcon_h1")
    rows = EagerRows(model, Interception(model, "int4+sr@1", seed=1), 3, CAPACITY)
    rows.admit([0, 1, 2], rows.read(sequences()[0][:, :5]), [0, 0, 0], [7, 8, 7])
    logits = rows.step(torch.full((rows.count,), 9))
    assert torch.equal(logits[0], logits[2])
    assert not torch.equal(logits[0], logits[1])
    rows.close()


def test_rows_can_be_kept_and_dropped(built):
    model, policy, ids = built("falcon_h1"), "fp32@4", sequences()
    expected = alone(model, policy)
    rows = EagerRows(model, Interception(model, policy, seed=1), 12, CAPACITY)
    for row, number in enumerate((0, 1, 2)):
        rows.admit([row], rows.read(ids[number][:, : PROMPTS[number]]), [0], [7 + number])
    tokens = torch.zeros(12, dtype=torch.int64)
    tokens[:3] = torch.tensor([int(ids[n][0, PROMPTS[n]]) for n in range(3)])
    rows.step(tokens)
    rows.keep([2, 0])
    assert rows.count == ROWS_TOGETHER
    after = [int(ids[n][0, PROMPTS[n] + 1]) for n in (2, 0)]
    logits = rows.step(torch.tensor(after + [after[0]] * (ROWS_TOGETHER - 2)))
    assert close([logits[0], logits[1]], [expected[2][2], expected[0][2]])
    assert torch.equal(logits[2:], logits[:1].expand(ROWS_TOGETHER - 2, -1))
    rows.close()


@pytest.mark.parametrize("count", [8, 24])
def test_a_row_has_the_same_bits_in_any_batch(built, count):
    """What makes samples independent of a batch on a CPU: from eight rows on nothing is summed in another order."""
    model = built("falcon_h1")

    def logits(rows):
        rows.admit([0], rows.read(sequences()[0][:, :5]), [0], [7])
        found = torch.stack([rows.step(torch.full((rows.count,), 9))[0] for _ in range(6)])
        rows.close()
        return found

    few, many = (EagerRows(model, Interception(model, "nvfp4@1"), n, CAPACITY) for n in (1, count))
    assert torch.equal(logits(few), logits(many))


def test_the_report_counts_what_the_caller_says(built):
    """Rows are counted one by one; those that the cache happens to hold in the end are nobody's sequences."""
    model = built("falcon_h1")
    interception = Interception(model, "bf16@1")
    rows = EagerRows(model, interception, 2, CAPACITY)
    refilled(rows)
    del rows
    assert interception.report.exercised == {"checkpoint": None, "read_copy": None}
    interception.report.count_stores({"checkpoint": 5, "read_copy": None})
    assert interception.report.exercised["checkpoint"] == 5


def test_policies_by_head_are_counted_by_row(built, tmp_path):
    path = tmp_path / "mixed.toml"
    path.write_text('default = "fp32@1"\n[[rule]]\nheads = "0-1"\npolicy = "fp32/nvfp4@4"\n')
    model = built("falcon_h1")
    found, exercised = refilled(EagerRows(model, Interception(model, path), 2, CAPACITY))
    assert close(found, alone(model, path))
    # The group with a window is the one that reads its checkpoint least: by its folds.
    assert exercised[0] == {"checkpoint": 3, "read_copy": 3}


def test_idle_rows_of_a_graph_are_zeros(built):
    """A capture leaves in caches what it makes of undefined memory; what a mask leaves out is multiplied by 0."""
    model = built("falcon_h1")
    rows = GraphRows(model, "fp32@4", 3, CAPACITY)
    for layer in rows.cache.layers:
        assert not layer.keys.any()
        assert not layer.conv_states[0].any()
    for pool in rows.pools.values():
        assert not pool.checkpoint.any()
    rows.cache.layers[0].keys.fill_(torch.nan)
    rows.cache.layers[0].values.fill_(torch.nan)
    rows.admit([0], rows.read(sequences()[0][:, :5]), [0], [7])
    assert rows.step(torch.zeros(3, dtype=torch.int64))[0].isfinite().all()


def test_attention_that_cannot_go_by_rows_is_refused(built):
    model = copy.deepcopy(built("falcon_h1"))
    rows = EagerRows(model, Interception(model, "fp32@1"), 2, CAPACITY)
    rows.admit([0], rows.read(sequences()[0][:, :5]), [0], [7])
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(InputError, match="attn_implementation 'flash_attention_2'"):
        rows.step(torch.zeros(rows.count, dtype=torch.int64))
    rows._cache.layers[0].is_sliding = True
    with pytest.raises(InputError, match="not a sliding window"):
        rows._lengths.serve(rows._cache.layers[0], 2)
