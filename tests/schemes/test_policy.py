"""The policy text: canonical form, round trip, and one clear line for whatever is wrong."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantlab.errors import InputError
from quantlab.schemes import Options, check_policy_fits, parse_policy

STORES = [
    "fp64",
    "fp32",
    "bf16",
    "fp16+sr13",
    "fp8",
    "fp8_e5m2",
    "int8:block32+sr",
    "int8+ef",
    "nvfp4",
    "nvfp4:row",
]


def test_options_list_every_key_of_the_grammar():
    keys = [
        "buffer",
        "contents",
        "key_read",
        "flush_read",
        "current",
        "flush",
        "schedule",
        "dot",
        "ef_read",
        "sites",
    ]
    assert [f.name for f in dataclasses.fields(Options)] == keys


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("fp32@1", "fp32@1"),
        ("fp8@1", "fp8_e4m3@1"),
        ("fp32/nvfp4@16:key_read=copy:flush_read=exact:buffer=fp32", "fp32/nvfp4@16"),
        ("int8:row@8", "int8@8"),
        ("fp32/nvfp4@16:flush_read=copy:contents=derived", "fp32/nvfp4@16:contents=derived:flush_read=copy"),
        ("fp16+sr/nvfp4@16:buffer=bf16", "fp16+sr/nvfp4@16:buffer=bf16"),
        ("int8+ef.fp16@1", "int8+ef@1"),
    ],
)
def test_canonical_text(text, canonical):
    policy = parse_policy(text)
    assert str(policy) == canonical
    assert parse_policy(canonical) == policy
    assert not set("/:,") & set(policy.file_name)


@given(
    checkpoint=st.sampled_from(STORES),
    copy=st.sampled_from([None, "nvfp4", "fp8", "fp16"]),
    window=st.integers(2, 64),
    options=st.sets(st.sampled_from(["buffer=bf16", "contents=derived"])),
    reads=st.sets(st.sampled_from(["key_read=checkpoint", "flush_read=copy"])),
)
@settings(max_examples=60, deadline=None)
def test_round_trip(checkpoint, copy, window, options, reads):
    keys = sorted(options | (reads if copy else set()))
    text = "".join([checkpoint, f"/{copy}" if copy else "", f"@{window}", *(f":{key}" for key in keys)])
    policy = parse_policy(text)
    assert parse_policy(str(policy)) == policy
    for order in itertools.permutations(keys):
        shuffled = text.split("@")[0] + f"@{window}" + "".join(f":{key}" for key in order)
        assert str(parse_policy(shuffled)) == str(policy)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("fp33@1", "nearest: fp32"),
        ("fp32", "for example fp32/nvfp4@16"),
        ("fp32@0", "window of at least 1"),
        ("fp32@-1", "window of at least 1"),
        ("fp32@1.5", "window of at least 1"),
        ("fp32@²", "window of at least 1"),
        ("@16", "checkpoint/read copy"),
        ("fp32/@16", "checkpoint/read copy"),
        ("fp32/nvfp4/nvfp4@16", "checkpoint/read copy"),
        ("fp32@16@16", "for example fp32/nvfp4@16"),
        ("fp32@16:buffr=bf16", "nearest: buffer"),
        ("fp32@16:buffer", "key=value"),
        ("fp32@16:buffer=fp31", "one of fp32, bf16, fp16, hilo"),
        ("fp32@16:buffer=hilo", "buffer=hilo is not built yet"),
        ("fp32@16:dot=tf32", "dot=tf32 is not built yet"),
        ("fp32@16:current=buffer", "current=buffer is not built yet"),
        ("fp32@16:flush=early", "flush=early is not built yet"),
        ("fp32@16:schedule=chunk", "schedule=chunk is not built yet"),
        ("int8+ef@16:ef_read=include", "ef_read=include is not built yet"),
        ("fp32@16:sites=beta", "sites=beta is not built yet"),
        ("fp32@16:buffer=bf16:buffer=bf16", "given twice"),
        ("fp32@16:key_read=checkpoint", "a read copy"),
        ("fp32@16:flush_read=copy", "a read copy"),
        ("fp32/nvfp4@1", "not exercised"),
        ("fp32@1:buffer=bf16", "window 1 has no buffer"),
        ("fp32/int8+ef@16", "error feedback on the checkpoint only"),
        ("fp32/nvfp4:tensor@16", "a scale of one sequence"),
        (7, "for example"),
    ],
)
def test_wrong_text_says_what_was_expected(text, says):
    with pytest.raises(InputError) as caught:
        parse_policy(text)
    message = str(caught.value)
    assert message.startswith(f"policy {text!r}: expected ")
    assert says in message
    assert "\n" not in message


def test_options_of_a_delta_rule_are_refused_elsewhere():
    for option in ("contents=derived", "key_read=checkpoint"):
        policy = parse_policy(f"fp32/nvfp4@16:{option}")
        check_policy_fits(policy, "gated_delta")
        with pytest.raises(InputError, match="delta rule only"):
            check_policy_fits(policy, "mamba2")
