"""Policies by layer and head: which rule decides, what a file may say, and what is refused."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from quantlab.errors import InputError
from quantlab.schemes import HeadGroup, PolicyRules, Rule, parse_policy, parse_rules
from quantlab.schemes.rules import number_text, parse_numbers

WIDE, NARROW, BASE = (parse_policy(text) for text in ("fp32@16", "fp16+sr/nvfp4@16", "fp32@1"))
TEXT = """
# long memory stays wide
default = "fp16+sr/nvfp4@16"

[[rule]]
layers = "0-1,3"
policy = "fp32@16"

[[rule]]
layers = [1, "3-4"]
heads = "5, 7"
policy = "fp32@1"

[[rule]]
heads = 0
policy = "fp32@16:buffer=bf16"
"""
LAYERS = {0: 8, 1: 8, 3: 8, 4: 8, 7: 8}


def rules_of(tmp_path, text=TEXT, name="mixed.toml"):
    path = tmp_path / name
    path.write_text(text)
    return parse_rules(str(path))


def refusal(action, *arguments):
    with pytest.raises(InputError) as refused:
        action(*arguments)
    message = str(refused.value)
    assert "\n" not in message
    return message


def test_the_last_rule_that_matches_decides_every_head(tmp_path):
    """Against the definition, written out head by head."""
    rules = rules_of(tmp_path)
    zero = parse_policy("fp32@16:buffer=bf16")

    def decided(layer, head):
        if head == 0:
            return zero
        if layer in (1, 3, 4) and head in (5, 7):
            return BASE
        return WIDE if layer in (0, 1, 3) else NARROW

    for layer in range(9):
        groups = rules.of_layer(layer, 8)
        found = {head: group.policy for group in groups for head in group.heads}
        assert found == {head: decided(layer, head) for head in range(8)}
        assert len({group.policy for group in groups}) == len(groups)
        assert [group.heads[0] for group in groups] == sorted(group.heads[0] for group in groups)
        assert all(list(group.heads) == sorted(group.heads) for group in groups)
    rules.check(LAYERS, "mamba2")


def test_the_order_of_rules_counts():
    first, second = Rule(frozenset([2]), None, WIDE), Rule(None, frozenset([1]), BASE)
    assert PolicyRules(NARROW, (first, second)).of_layer(2, 2) == (
        HeadGroup(WIDE, (0,)),
        HeadGroup(BASE, (1,)),
    )
    assert PolicyRules(NARROW, (second, first)).of_layer(2, 2) == (HeadGroup(WIDE, (0, 1)),)


def test_one_policy_is_one_group_everywhere():
    for value in ("fp32/nvfp4@16", parse_policy("fp32/nvfp4@16"), PolicyRules(parse_policy("fp32/nvfp4@16"))):
        rules = parse_rules(value)
        assert rules.of_layer(5, 3) == (HeadGroup(parse_policy("fp32/nvfp4@16"), (0, 1, 2)),)
        assert rules.text == str(rules) == "fp32/nvfp4@16"
        assert rules.file_name == "fp32--nvfp4@16"
        assert rules.policies == (parse_policy("fp32/nvfp4@16"),)
        rules.check({5: 3}, "gated_delta")


def test_the_canonical_file_gives_the_rules_again(tmp_path):
    rules = rules_of(tmp_path)
    again = rules_of(tmp_path, rules.toml(), "again.toml")
    assert again == rules
    assert hash(again) == hash(rules)
    assert again.toml() == rules.toml()
    assert (
        again.text
        == rules.text
        == (
            "fp16+sr/nvfp4@16; layers 0-1,3: fp32@16; layers 1,3-4 heads 5,7: fp32@1; heads 0: fp32@16:buffer=bf16"
        )
    )
    assert rules.policies == (NARROW, WIDE, BASE, parse_policy("fp32@16:buffer=bf16"))
    # The name is of the file, the hash of what it says.
    assert rules.file_name.startswith("mixed-")
    assert again.file_name == rules.file_name.replace("mixed", "again")
    other = replace(rules, rules=rules.rules[:2])
    assert other.file_name.startswith("mixed-")
    assert other.file_name != rules.file_name


def test_the_example_of_the_docs_is_what_it_says(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    rules = rules_of(tmp_path, example)
    assert rules.text == "fp16+sr/nvfp4@16; layers 0-3,9: fp32@16; layers 5 heads 5,7: fp32@16"
    rules.check(dict.fromkeys(range(0, 12), 8), "mamba2")


def test_paths_are_files_and_texts_are_policies(tmp_path):
    rules = rules_of(tmp_path, name="RULES.TOML")
    assert parse_rules(tmp_path / "RULES.TOML") == rules
    (tmp_path / "rules").write_text(TEXT)
    assert parse_rules(tmp_path / "rules") == rules
    message = refusal(parse_policy, "rules.toml")
    assert message.startswith("policy 'rules.toml': expected one policy for all layers and heads")


@pytest.mark.parametrize(
    ("value", "numbers", "text"),
    [
        ("0-3,7", {0, 1, 2, 3, 7}, "0-3,7"),
        (" 7 , 0 - 3", {0, 1, 2, 3, 7}, "0-3,7"),
        ("3-3,4,5", {3, 4, 5}, "3-5"),
        (11, {11}, "11"),
        ([2, "4-5", 2], {2, 4, 5}, "2,4-5"),
    ],
)
def test_numbers_are_read_and_written(value, numbers, text):
    found = parse_numbers("heads", value)
    assert found == numbers
    assert number_text(found) == text
    assert parse_numbers("heads", text) == found


@pytest.mark.parametrize(
    "value",
    [
        "",
        "a",
        "-1",
        "1-",
        "1-2-3",
        "3-1",
        "1,,2",
        "1;2",
        True,
        1.0,
        None,
        [],
        [[]],
        -1,
        65536,
        "0-99999",
        "9" * 5000,
    ],
)
def test_what_are_no_numbers_is_refused(value):
    assert refusal(parse_numbers, "heads", value).startswith("heads ")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("default = ", ["TOML"]),
        ("default = " + "[" * 100_000, ["TOML"]),
        (f'default = "fp32@1"\n[[rule]]\nlayers = 0x{"f" * 6000}\npolicy = "fp32@4"', ["layers <int>"]),
        ('default = "fp32@1"\ndefault = "fp32@1"', ["TOML"]),
        ("", ["default = ... among them"]),
        ("default = 3", ["policy 3: expected policy text"]),
        ('default = "nvfp3@1"', ["nvfp3"]),
        ('default = "other.toml"', ["not a file of rules"]),
        ('default = "fp32@1"\nrules = []', ["'rules'", "nearest: rule"]),
        ('default = "fp32@1"\nrule = "a"', ["each headed [[rule]]"]),
        ('default = "fp32@1"\n[rule]\nheads = 1\npolicy = "fp32@1"', ["each headed [[rule]]"]),
        ('default = "fp32@1"\n[[rule]]\nheads = 1', ["rule 1 key ['heads']", "policy = ..."]),
        ('default = "fp32@1"\n[[rule]]\npolicy = "fp32@16"', ["rule 1 policy 'fp32@16'", "layers or heads"]),
        (
            'default = "fp32@1"\n[[rule]]\nlayer = 1\npolicy = "fp32@16"',
            ["rule 1 key 'layer'", "nearest: layers"],
        ),
        ('default = "fp32@1"\n[[rule]]\nlayers = "5-2"\npolicy = "fp32@16"', ["rule 1 layers '5-2'"]),
        ('default = "fp32@1"\n[[rule]]\nheads = 1\npolicy = "fp32@0"', ["rule 1 policy 'fp32@0'", "window"]),
    ],
)
def test_a_file_that_says_something_else_is_refused_by_name(tmp_path, text, words):
    message = refusal(rules_of, tmp_path, text)
    assert message.startswith(f"policy '{tmp_path / 'mixed.toml'}': expected ")
    for word in words:
        assert word in message


def test_files_that_cannot_be_read_are_named(tmp_path):
    assert "No such file" in refusal(parse_rules, str(tmp_path / "absent.toml"))
    assert "directory" in refusal(parse_rules, Path(tmp_path))
    (tmp_path / "latin.toml").write_bytes(b'default = "fp32@1" # \xe9')
    assert "TOML" in refusal(parse_rules, tmp_path / "latin.toml")


def rule(layers=None, heads=None, policy=WIDE):
    return Rule(
        None if layers is None else frozenset(layers), None if heads is None else frozenset(heads), policy
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([rule(layers=[2])], ["rules, rule 1 (layers 2: fp32@16)", "recurrent state: 0-1,3-4,7"]),
        ([rule(layers=[0, 1, 2, 5, 6])], ["rule 1", "recurrent state: 0-1,3-4,7"]),
        ([rule(layers=[8], heads=[0])], ["rule 1 (layers 8 heads 0: fp32@16)"]),
        ([rule(layers=[0]), rule(heads=[3, 8])], ["rule 2 (heads 3,8: fp32@16)", "heads from 0 to 7"]),
        ([rule(layers=[0], heads=[8])], ["rule 1 (layers 0 heads 8: fp32@16)", "heads from 0 to 7"]),
        ([rule(layers=[3], heads=[1]), rule(layers=[3])], ["rule 1", "later rules override all of it"]),
    ],
)  # fmt: skip
def test_a_rule_that_decides_nothing_is_refused(given, words):
    message = refusal(PolicyRules(NARROW, tuple(given)).check, LAYERS, "mamba2")
    assert message.startswith("policy ")
    for word in words:
        assert word in message


def test_ranges_may_run_over_other_layers_and_layers_may_differ_in_heads():
    rules = PolicyRules(NARROW, (rule(layers=range(8)), rule(heads=[11], policy=BASE)))
    rules.check(LAYERS | {7: 12}, "mamba2")
    assert rules.of_layer(0, 8) == (HeadGroup(WIDE, tuple(range(8))),)
    assert rules.of_layer(7, 12)[1] == HeadGroup(BASE, (11,))
    assert "heads from 0 to 7" in refusal(
        PolicyRules(NARROW, (rule(layers=[0, 1], heads=[11]),)).check, LAYERS | {7: 12}, "mamba2"
    )


def test_a_policy_must_suit_the_heads_that_follow_it_and_no_others():
    derived = parse_policy("nvfp4@4:contents=derived")
    rules = PolicyRules(NARROW, (rule(layers=[1], policy=derived),))
    rules.check({0: 4, 1: 4}, "gated_delta")
    assert "delta rule" in refusal(rules.check, {0: 4, 1: 4}, "mamba2")
    rules.check({0: 4, 1: 4}, {0: "mamba2", 1: "gated_delta"})
    # A default that no head follows is none of the family's business.
    PolicyRules(derived, (rule(layers=[1]),)).check({1: 4}, "mamba2")


def test_wrong_arguments_are_refused():
    assert "layers or heads" in refusal(Rule, None, None, WIDE)
    for numbers in (frozenset(), [1], frozenset([-1]), frozenset([True]), frozenset(["1"])):
        assert refusal(Rule, numbers, None, WIDE).startswith("layers ")
    rules = PolicyRules(WIDE)
    assert refusal(rules.of_layer, -1, 4).startswith("layer ")
    assert refusal(rules.of_layer, 0, 0).startswith("heads ")
    assert refusal(rules.check, {}, "mamba2").startswith("layers ")
    for value in (None, 3, b"rules.toml"):
        assert refusal(parse_rules, value).startswith("policy ")
