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
        ("fp32@16:sites=output+beta.bf16+k.fp16", "fp32@16:sites=beta+k.fp16+output"),
        ("fp32@16:dot=ieee:flush=full:schedule=flush", "fp32@16"),
        ("bf16@16:schedule=step:buffer=hilo", "bf16@16:buffer=hilo:schedule=step"),
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
        ("fp32@16:dot=tf64", "one of ieee, tf32, tf32x3, bf16"),
        ("fp32@1:dot=tf32", "without a matrix product"),
        ("fp32@16:dot=tf32:sites=dot", "dot= or sites=dot, not both"),
        ("fp32@16:current=buffer", "buffer= of a narrower format"),
        ("fp32@1:current=buffer", "window 1 has no buffer"),
        ("fp32@1:flush=early", "a window above 1 for flush=early"),
        ("fp32@16:schedule=chunk", "a rounded checkpoint"),
        ("bf16@1:schedule=step", "every token is stored anyhow"),
        ("bf16/nvfp4@16:schedule=step", "no read copy with schedule=step"),
        ("bf16@16:schedule=step:flush=early", "flush=full with schedule=step"),
        ("int8@16:ef_read=include", "error feedback and no read copy"),
        ("int8+ef/nvfp4@16:ef_read=include", "error feedback and no read copy"),
        ("fp32@16:sites=", "at least one site"),
        ("fp32@16:sites=betta", "nearest: beta"),
        ("fp32@16:sites=beta+beta.fp16", "given twice"),
        ("fp32@16:sites=beta.int8", "an element without scale"),
        ("fp32@16:sites=beta.fp17", "a known format after"),
        ("fp32@1:sites=buffer", "window 1 has no buffer"),
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
    for option in ("contents=derived", "key_read=checkpoint", "sites=beta"):
        policy = parse_policy(f"fp32/nvfp4@16:{option}")
        check_policy_fits(policy, "gated_delta")
        check_policy_fits(policy, "kimi_delta")
        with pytest.raises(InputError, match="delta rule only"):
            check_policy_fits(policy, "mamba2")


def test_products_are_refused_where_there_are_none():
    for option in ("dot=tf32", "sites=dot", "sites=decay"):
        policy = parse_policy(f"fp32@16:{option}")
        check_policy_fits(policy, "mamba2")
        with pytest.raises(InputError, match="every element decays by itself"):
            check_policy_fits(policy, "mamba1")
