"""Layers with head groups saved, copied and placed: they go on bit for bit, and what is no save of one is refused."""

import copy
import pickle

import pytest
import torch

from quantlab.schemes import (
    DecodeState,
    HeadGroups,
    load_decode_state,
    save_decode_state,
)
from quantlab.schemes.layers import restore_layer
from tests.schemes.grouped import all_bits, begin_mixed, changed, mixed_stream, refusal
from tests.schemes.streams import begin, run, same_bits, tokens
from tests.schemes.test_all_or_nothing import with_meta


@pytest.mark.parametrize("family", ["gated_delta", "mamba1"])
def test_saves_files_forks_and_pickles_continue_bit_for_bit(family, tmp_path):
    s = mixed_stream(family)
    state = begin_mixed(s, layer=4)
    run(state, s, 0, 6)
    path = tmp_path / "state.safetensors"
    save_decode_state(state, path)
    others = [
        HeadGroups.restore(state.save()),
        load_decode_state(path),
        restore_layer(state.save()),
        copy.deepcopy(state),
        pickle.loads(pickle.dumps(state)),
    ]
    others.append(begin_mixed(s, layer=4))
    others[-1].place(torch.tensor([2, 0, 1]), HeadGroups.restore(state.save(torch.tensor([2, 0, 1]))))
    expected = run(state, s, 6)
    for other in others:
        assert torch.equal(run(other, s, 6), expected)
        assert same_bits(other, state)
    assert type(restore_layer(begin("fp32@4", s).save())) is DecodeState


def test_rows_of_another_grouping_are_not_placed():
    s = mixed_stream()
    state, rows = begin_mixed(s), torch.tensor([0, 1, 2])
    run(state, s, 0, 2)
    before = all_bits(state)
    for other, word in (
        (begin_mixed(s, heads=((0, 1, 2), (4,), (3, 5))), "groups of the state to place"),
        (begin_mixed(s, policies=("fp16+sr/nvfp4@4", "fp32@4", "int8+ef@1")), "groups of the state to place"),
        (begin("fp32@1", s), "groups of the state to place"),
        (begin_mixed(s, seed=12), "seed of the state to place"),
        (begin_mixed(s, arithmetic=torch.float64), "arithmetic of the state to place"),
    ):
        assert refusal(state.place, rows, other).startswith(word)
    assert refusal(begin("fp32@1", s).place, rows, state.states[2]).startswith("policy of the state to place")
    # Both of these have a float64 checkpoint first: the groups behind it differ.
    wide = {"policies": ("fp64@4", "fp32@4", "int8+ef@1")}
    mine, theirs = begin_mixed(s, **wide), begin_mixed(s, arithmetic=torch.float64, **wide)
    run(theirs, s, 0, 2)
    held = all_bits(mine)
    assert refusal(mine.place, rows, theirs).startswith("arithmetic of the state to place")
    assert changed(held, mine) == []
    drafted = begin_mixed(s)
    drafted.verify(tokens(s, 0, 2))
    assert "drafts pending" in refusal(state.place, rows, drafted)
    assert changed(before, state) == []


def test_tampered_saves_are_refused():
    s = mixed_stream()
    state = begin_mixed(s)
    run(state, s, 0, 3)
    saved = state.save()
    inner = {n.removeprefix("group1."): t for n, t in saved.items() if n.startswith("group1.")}

    def with_group_1(**changes):
        other = with_meta(inner, **changes)
        return saved | {f"group1.{n}": t for n, t in other.items()}

    for wrong in (
        with_meta(saved, groups=2),
        with_meta(saved, groups=4),
        with_meta(saved, groups="3"),
        with_meta(saved, groups=0),
        with_meta(saved, key_heads=4),
        with_meta(saved, key_heads=1),
        with_meta(saved, key_heads=None),
        with_meta(saved, version=2),
        {n: t for n, t in saved.items() if n != "meta"},
        {n: t for n, t in saved.items() if n != "group1.buffer.cursor"},
        saved | {"more": saved["meta"]},
        with_group_1(heads=[3]),
        with_group_1(heads=[6]),
        with_group_1(heads=None),
        with_group_1(heads=[4, 4]),
        with_group_1(heads="4"),
        with_group_1(seed=5),
        with_group_1(layer=5),
        with_group_1(drafts=5),
        {},
        None,
    ):
        assert "saved state" in refusal(HeadGroups.restore, wrong)
    assert "saved state version" in refusal(DecodeState.restore, saved)
    assert refusal(HeadGroups.restore, begin("fp32@1", s).save()).startswith("saved state version")
