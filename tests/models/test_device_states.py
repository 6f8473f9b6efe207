"""A model whose decode states are in pools is that model with decode states on the CPU: the same bits from the twins.

``cuda`` needs a GPU and compares what kernels decode there with torch on the CPU, behind the same model on the GPU:
``pytest tests/models/test_device_states.py -k cuda``.
"""

from copy import deepcopy

import pytest
import torch

from quantlab.errors import InputError
from quantlab.models import load
from quantlab.models.device_layer import DeviceHeadGroups, DeviceLayer
from quantlab.models.device_states import DeviceLayers, served
from quantlab.models.interception import decode_states
from quantlab.recurrences import StepInputs
from quantlab.schemes import LayerState, StateShape, parse_policy, parse_rules
from quantlab.schemes.rules import HeadGroup
from quantlab.testing import in_triton_process

from .decoding import SAME, forward
from .pooled import PROMPT, build, decoded, loaded, outcome, running

DUAL = "fp16+sr/nvfp4@4:buffer=bf16"
# Behind a rounding step that fell to the other side, the typical logit moves by a step of the format.
ROUNDING, QUIET = 1e-2, 3


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    found = {}

    def folder(kind):
        if kind not in found:
            found[kind] = build(kind, tmp_path_factory.mktemp("pooled") / kind)
        return found[kind]

    return folder


@pytest.fixture(scope="session")
def model_on(folders):
    found = {}

    def model(kind, device):
        if (kind, device) not in found:
            found[kind, device] = loaded(folders(kind)).to(device)
        return found[kind, device]

    return model


@pytest.fixture
def device(request, runnable, monkeypatch):
    """For ``parametrize("device", ..., indirect=True)``."""
    runnable(request.param)
    # A convolution in TF32 would differ between batches of other sizes.
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    return request.param


def jobs(kind, policy, *scenarios, slow=()):
    return [
        pytest.param(
            device,
            kind,
            policy,
            scenario,
            marks=pytest.mark.slow if scenario in slow and device == "cpu" else (),
        )
        for device in ("cpu", "cuda")
        for scenario in scenarios
    ]


JOBS = [
    *jobs("mamba2", DUAL, "steps", "rows", "chunks", "crop", "recorded", "reset", "fork"),
    *jobs("mamba2", "fp32@4", "generate", "beams"),
    *jobs("mamba2", "fp32@3", "crop"),  # a ring that windows do not fill
    *jobs("mamba2", "fp32@1", "crop", "reset", slow=("reset",)),
    *jobs("qwen3_5", DUAL, "steps", "crop", "chunks", slow=("chunks",)),
    *jobs("qwen3_5", "fp32@4", "generate", "recorded", slow=("generate", "recorded")),
    *jobs("kimi_linear", DUAL, "steps", "crop", slow=("crop",)),
    *jobs("nemotron_h", "fp32@4", "steps", "generate", slow=("generate",)),
]
# What the twins serve beyond that: every checkpoint, copy, buffer format and option that a pool has a layout for.
MORE = {
    "mamba2": ("bf16+sr@1", "int8@4", "fp8+sr/mxfp4@3", "fp32/fp8@4", "fp16/nvfp4@1:flush_read=copy"),
    "qwen3_5": ("fp8@4:buffer=fp16", "int8+sr/fp8@2:contents=derived", "fp32/nvfp4@4:key_read=checkpoint"),
    "kimi_linear": ("fp32@4", "fp8+sr/nvfp4@4:contents=derived", "int8@1"),
}


def check_near(ours, theirs, policy, scenario):
    """Kernels and torch, behind the same products on the same GPU."""
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        assert one.shape == other.shape
        difference = (one - other).abs().float()
        if policy != DUAL:
            assert difference.max() < SAME
        else:
            assert difference.median() < ROUNDING
            if scenario == "steps" and number == 0:  # up to the first flush both read the same stored bits
                assert difference[:, :QUIET].max() < SAME


@pytest.mark.parametrize(("device", "kind", "policy", "scenario"), JOBS, indirect=["device"])
def test_pools_decode_as_decode_states_do(device, kind, policy, scenario, model_on, ids):
    model, given = model_on(kind, device), ids.to(device)
    ours, report = outcome(model, given, policy, scenario, True if device == "cpu" else None)
    theirs, expected = outcome(model, given, policy, scenario, False)
    if device == "cuda":
        assert all(text.startswith("triton on cuda:0: ") for text in report.backends.values())
        check_near(ours, theirs, policy, scenario)
    else:
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))
    assert report.exercised == expected.exercised
    assert report.op_hits == expected.op_hits
    assert report.ledger == expected.ledger
    assert report.effective_policy == expected.effective_policy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "policy"), [(kind, policy) for kind, found in MORE.items() for policy in found]
)
def test_every_policy_with_a_layout_decodes_as_a_decode_state_does(kind, policy, model_on, ids):
    for scenario in ("steps", "rows", "chunks", "crop"):
        ours, report = outcome(model_on(kind, "cpu"), ids, policy, scenario, True)
        theirs, expected = outcome(model_on(kind, "cpu"), ids, policy, scenario, False)
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True)), scenario
        assert report.exercised == expected.exercised


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "policy", "scenario"),
    [("mamba2", DUAL, "steps"), ("qwen3_5", "fp32@4", "steps"), ("mamba2", "fp32@3", "crop")],
)
def test_kernels_in_the_interpreter_decode_as_the_twins_do(kind, policy, scenario, folders, ids):
    """Kernels sum in another order than torch does.  Without rounding that is all; with it, a number of fp16 may fall
    to the other side, once in a few thousand, and moves by 2^-11 of itself.
    """
    kernels, backends = in_triton_process(decoded, folders(kind), ids[:2], policy, scenario, interpret=True)
    assert set(backends.values()) == {"triton on cpu: Triton interpreter"}
    (logits, *states), _ = decoded(folders(kind), ids[:2], policy, scenario, True)
    assert (kernels[0] - logits).abs().max() < 10 * SAME
    for ours, theirs in zip(kernels[1:], states, strict=True):
        difference = (ours - theirs).abs()
        assert (difference > 1e-5 * theirs.abs().max()).float().mean() < 1e-3
        assert difference.max() < 2**-10 * theirs.abs().max()


def test_pools_are_for_where_kernels_run(model_on, ids):
    model, shape = model_on("mamba2", "cpu"), StateShape(4, 16, 32, 2)
    _, report = outcome(model, ids, "fp32@4", "fork", None)
    assert report.backends == dict.fromkeys((0, 1), "torch on cpu: no CUDA device, TRITON_INTERPRET not set")
    assert report.as_dict()["backends"]["1"] == report.backends[1]
    one = [HeadGroup(parse_policy("int8+ef@1"), (0, 1, 2, 3))]
    pooled, reason = served(one, "mamba2", shape, torch.device("cpu"), True)
    assert not pooled
    assert "a checkpoint of fp32" in reason


RULES = 'default = "fp32@4"\n[[rule]]\nlayers = 1\npolicy = "fp16+sr/nvfp4@4:buffer=bf16"\n'
HEADS = 'default = "fp32@4"\n[[rule]]\nheads = "1,3"\npolicy = "bf16/nvfp4@2"\n'
SPREAD = 'default = "fp32@4"\n[[rule]]\nlayers = 0\nheads = "1,3"\npolicy = "fp16+sr@2"\n'


@pytest.fixture
def rules(tmp_path):
    def read(text):
        (tmp_path / "rules.toml").write_text(text)
        return parse_rules(tmp_path / "rules.toml")

    return read


def test_layers_of_one_window_share_counters_whatever_their_policies(model_on, ids, rules):
    model = model_on("mamba2", "cpu")
    with running(model, ids, rules(RULES), True) as run:
        cache = run.prompt()
        run.decode(cache, PROMPT, PROMPT + 5)
        one, two = decode_states(cache).values()
        assert str(one.policy) != str(two.policy)
        assert one.pool.counters is two.pool.counters
    for scenario in ("steps", "crop"):
        ours, _ = outcome(model, ids, rules(RULES), scenario, True)
        theirs, _ = outcome(model, ids, rules(RULES), scenario, False)
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_groups_of_heads_have_pools_of_their_own(model_on, ids, rules):
    """Windows of two lengths in one layer.  Sums beside other heads may run in another order, nothing else differs."""
    model = model_on("mamba2", "cpu")
    with running(model, ids, rules(HEADS), True) as run:
        state = decode_states(run.prompt())[0]
        assert isinstance(state, DeviceHeadGroups)
        assert [part.group.window for part in state.parts] == [4, 2]
    for scenario in ("rows", "chunks"):
        ours, report = outcome(model, ids, rules(HEADS), scenario, True)
        theirs, expected = outcome(model, ids, rules(HEADS), scenario, False)
        for one, other in zip(ours, theirs, strict=True):
            assert (one - other).abs().median() < 1e-6
        assert report.exercised == expected.exercised
        assert report.ledger == expected.ledger
        assert report.effective_policy == expected.effective_policy


def test_heads_whose_random_bits_kernels_would_misname_stay_decode_states(model_on, ids, rules, caplog):
    with running(model_on("mamba2", "cpu"), ids, rules(SPREAD), True) as run:
        states = decode_states(run.prompt())
    assert [isinstance(state, DeviceLayer) for state in states.values()] == [False, True]
    reason = run.interception.report.backends[0]
    assert reason.startswith("torch on cpu: no kernel serves stochastic rounding of heads 1,3")
    assert sum("heads 1,3" in record.getMessage() for record in caplog.records) <= 1


def test_random_bits_are_named_by_the_models_layer_numbers(model_on, ids, monkeypatch):
    model = model_on("nemotron_h", "cpu")  # recurrent layers 0 and 2
    ours, _ = outcome(model, ids, DUAL, "steps", True)
    assert all(map(torch.equal, ours, outcome(model, ids, DUAL, "steps", False)[0]))
    add = DeviceLayers.add
    monkeypatch.setattr(DeviceLayers, "add", lambda self, layer, *rest: add(self, layer // 2, *rest))
    shifted, _ = outcome(model, ids, DUAL, "steps", True)
    assert torch.equal(shifted[1], ours[1])
    assert not torch.equal(shifted[2], ours[2])


def test_two_caches_and_a_second_prompt_keep_apart(model_on, ids):
    def run_of(pools):
        with running(model_on("mamba2", "cpu"), ids, "int8@4", pools) as run:
            first, second = run.prompt(), run.prompt()
            found = [
                run.decode(cache, PROMPT + n, PROMPT + n + 3) for n in (0, 3) for cache in (first, second)
            ]
            first.reset()
            forward(run.model, ids[:, :7], first)
            return [*found, run.decode(first, 7, 12), run.decode(second, PROMPT + 6, PROMPT + 9)]

    assert all(map(torch.equal, run_of(True), run_of(False)))


def test_memory_made_in_inference_mode_can_be_used_outside(model_on, ids):
    with running(model_on("mamba2", "cpu"), ids, DUAL, True) as run:
        with torch.inference_mode():
            cache = run.prompt()
            run.decode(cache, PROMPT, PROMPT + 2)
            other = deepcopy(cache)
        for one in (cache, other):
            one.reorder_cache(torch.tensor([0, 2, 1]))
            one.batch_select_indices(torch.tensor([0, 1]))
            run.decode(one, PROMPT + 2, PROMPT + 7, ids[:2])


LOST = r"^cache '.*': expected every layer once a forward, .* start again from a prompt$"


def test_a_forward_that_was_left_in_the_middle_ends_in_an_error(model_on, ids):
    model = model_on("mamba2", "cpu")

    def fail(*_):
        raise KeyError("inside the model")

    with running(model, ids, "fp32@4", True) as run:
        for part, lost in ((model.backbone.layers[0], False), (model.backbone.layers[1], True)):
            cache = run.prompt()
            run.decode(cache, PROMPT, PROMPT + 1)
            hook = part.register_forward_pre_hook(fail)
            with pytest.raises(KeyError):
                run.decode(cache, PROMPT + 1, PROMPT + 2)
            hook.remove()
            if not lost:  # no layer has taken the token
                run.decode(cache, PROMPT + 1, PROMPT + 2)
                continue
            for attempt in (
                lambda cache=cache: run.decode(cache, PROMPT + 1, PROMPT + 2),
                lambda cache=cache: forward(model, ids[:, 6:9], cache),
                lambda cache=cache: cache.reorder_cache(torch.tensor([0, 0, 0])),
                lambda cache=cache: decode_states(cache)[0].materialize(),
            ):
                with pytest.raises(InputError, match=LOST):
                    attempt()


def test_a_layer_that_is_passed_over_or_comes_twice_is_an_error():
    shape, layers = StateShape(2, 16, 32, 1), DeviceLayers(1, torch.device("cpu"), drafts=4)
    initial = torch.randn(1, 2, 16, 32, generator=torch.Generator().manual_seed(0))
    group = [HeadGroup(parse_policy("fp32@4"), (0, 1))]
    first, second, third = (layers.add(n, group, "mamba2", initial, shape.key_heads) for n in (3, 5, 9))
    inputs = StepInputs(torch.ones(1, 1, 32), torch.ones(1, 1, 32), torch.ones(1, 2, 16), -torch.ones(1, 2))
    with pytest.raises(InputError, match=LOST) as error:
        second.step(inputs)
    assert "'layer 5 comes first, not at layers 3,5,9'" in str(error.value)
    first.step(inputs)
    with pytest.raises(InputError, match="layer 9 comes after step at layers 3, not at layers 5,9"):
        third.step(inputs)
    with pytest.raises(InputError, match="layer 3 comes after step at layers 3, not at layers 5,9"):
        first.step(inputs)
    with pytest.raises(InputError, match="layer 5 comes after step at layers 3"):
        second.verify(inputs.map(lambda t: t[:, None]))
    with pytest.raises(InputError, match=r"^v "):  # of another shape: nothing has happened to this layer
        second.step(StepInputs(inputs.q, inputs.k, inputs.v[:, :1], inputs.log_decay))
    second.step(inputs)
    third.step(inputs)
    assert first.cursor.tolist() == third.cursor.tolist() == [1]


def test_drafts_wait_until_somebody_decides(model_on, ids):
    with running(model_on("mamba2", "cpu"), ids, "fp32@4", True) as run:
        cache = run.prompt()
        states = list(decode_states(cache).values())
        shape = states[0].shape
        tokens = StepInputs(
            *(torch.ones(3, 2, shape.key_heads, shape.key_dim) for _ in "qk"),
            torch.ones(3, 2, shape.heads, shape.value_dim),
            -torch.ones(3, 2, shape.heads),
        )
        assert not states[0].pool.records > 4  # there is no room for drafts before there are any
        for state in states:
            state.verify(tokens)
        assert states[1].reach.tolist() == states[0].pending.tolist() == [2, 2, 2]
        with pytest.raises(InputError, match="step with drafts pending at layer 0"):
            states[0].step(tokens.token(0))
        with pytest.raises(InputError, match=r"^counts '3 at row 0': expected 0 to 2 tokens since"):
            states[0].take_back(torch.tensor([3, 0, 0]))
        for state in states:
            state.commit(state.pending)
        with pytest.raises(InputError, match="expected 1 to 8"):
            states[0].verify(tokens.map(lambda t: t.repeat_interleave(5, 1)))
        for state in states:
            state.step(tokens.token(0))
        assert states[0].cursor.tolist() == [3, 3, 3]
        assert states[0].pool.records == 4  # and none behind them


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_steps_never_wait_for_the_device_and_are_captured_in_a_graph(device):
    """Past two flushes: what replays leave is what as many steps leave, random bits included."""
    draw, shape = torch.Generator().manual_seed(0), StateShape(4, 16, 32, 2)
    initial = torch.randn(3, 4, 16, 32, generator=draw).to(device)
    q, k = (torch.randn(3, 2, 32, generator=draw).to(device) for _ in "qk")
    # As a mixer has them, in the middle of what a convolution returns.
    v = torch.randn(3, 5, 16, generator=draw).to(device)[:, 1:]
    inputs = StepInputs(q, k, v, -torch.rand(3, 4, generator=draw).to(device))
    group = [HeadGroup(parse_policy(DUAL), (0, 1, 2, 3))]

    def batch():
        layers = DeviceLayers(3, initial.device, seed=3)
        return [layers.add(n, group, "mamba2", initial, shape.key_heads) for n in (0, 2)]

    def step(layers):
        return [layer.step(inputs) for layer in layers]

    eager, captured = batch(), batch()
    step(eager)  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(11):
            expected = step(eager)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.cuda.stream(torch.cuda.Stream()):
        step(captured)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(captured)
    for _ in range(11):
        graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, found, expected))
    for one, other in zip(captured, eager, strict=True):
        assert torch.equal(one.pool.checkpoint, other.pool.checkpoint)
        assert torch.equal(one.materialize(), other.materialize())
        assert one.pool.counters.store_numbers.tolist() == [3, 3, 3]
    graph.replay()
    assert all(map(torch.equal, found, step(eager)))


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_what_no_kernel_serves_is_decoded_by_torch_on_the_device(device, model_on, ids, rules):
    for kind, policy, layers in (("mamba", "fp32@4", (0, 1)), ("mamba2", rules(SPREAD), (0,))):
        model, given = model_on(kind, device), ids.to(device)
        with running(model, given, policy, None) as run:
            cache = run.prompt()
            found = run.decode(cache, PROMPT, PROMPT + 4)
            assert all(isinstance(decode_states(cache)[n], LayerState) for n in layers)
            cache.reorder_cache(torch.tensor([2, 0, 1], device=device))
            moved = run.decode(deepcopy(cache), PROMPT + 4, PROMPT + 6, given[[2, 0, 1]])
        assert found.device == moved.device == given.device
        backends = run.interception.report.backends
        assert all(backends[n].startswith("torch on cuda:0: no kernel serves ") for n in layers)
        # On the CPU products of the same size are summed in another order.
        with running(model_on(kind, "cpu"), ids, policy, False) as run:
            cache = run.prompt()
            expected = run.decode(cache, PROMPT, PROMPT + 4)
        assert (found.cpu() - expected).abs().median() < SAME


@pytest.mark.parametrize("device", ["cuda"], indirect=True)
def test_a_model_is_loaded_onto_a_device(device, folders, ids):
    model = load(folders("mamba2"), DUAL, device=device)
    prompt, greedy = ids[:2, :9].to(device), {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    found = model.generate(prompt, **greedy)
    model.quantlab_interception.require_effect()
    assert found.shape == (2, 21)
    assert all(text.startswith("triton on cuda:0: ") for text in model.quantlab_report.backends.values())
    assert model.quantlab_report.exercised["checkpoint"] >= 2
    model.quantlab_close()
