"""Captured streams are what the model's decode states were fed: they lead to its own states, with its own bits."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from quantlab.drift import load_stream, open_source, run_drift
from quantlab.errors import InputError
from quantlab.models import build_tiny, capture, run_with_policy, write_capture
from quantlab.models.capture import read_index
from quantlab.models.forwards import CachedForward
from quantlab.models.interception import decode_states
from quantlab.records import remove_stale
from quantlab.recurrences import get_recurrence
from quantlab.schemes import DecodeState, start_layer
from tests.models.architectures import ARCHITECTURES, forward

PREFILL, STEPS = 9, 14
SLOW = pytest.mark.slow
ONE = pytest.mark.parametrize("kind", ["mamba2"], indirect=True)
REQUEST = {"model": "tiny", "text_hash": "0" * 16}


def bound(stream):
    """Of a float32 recurrence against float64 on equal inputs, relative to the largest norm of a state.

    A step rounds the decay (and its exponential), their product, the sum, and in a delta rule a product over K keys of
    norm 1: at most (K + 4) 2^-24 of the state. No step makes an older error larger (decays are at most 1, and so is
    the norm of I - beta k k^T for beta in (0, 2)). So the errors of all steps add up, at most.
    """
    return stream.steps * (stream.initial.shape[-1] + 4) * 2**-24


def replay(stream):
    """(final state, largest norm of a state) of the recurrence in float64."""
    step, rates = get_recurrence(stream.family).step, stream.rates
    state, largest = stream.initial.double(), 0.0
    for t in range(stream.steps):
        inputs = stream.step(t).to(torch.float64)
        state, _ = step(state, inputs) if rates is None else step(state, inputs, rates.double())
        largest = max(largest, float(state.norm()))
    return state, largest


@torch.no_grad()
def check_states(model, ids, key_dim):
    """Replayed streams end where the states of the model do: under fp32@1, and in its first layer without us."""
    ids = ids[:, : PREFILL + STEPS]
    streams = capture(model, ids, prefill=PREFILL, steps=STEPS)
    with run_with_policy(model, "fp32@1"):
        ours = DynamicCache(config=model.config)
        decode_on(model, ids, ours)
        states = {layer: state.materialize() for layer, state in decode_states(ours).items()}
    stock = DynamicCache(config=model.config)
    decode_on(model, ids, stock)
    assert streams.keys() == states.keys()
    for layer, stream in streams.items():
        final, largest = replay(stream)
        assert (final - states[layer]).norm() <= bound(stream) * largest
        assert (final - stream.initial).norm() > 0.1 * largest  # the tokens did move it
        assert stream.meta["layer"] == layer
        if layer == min(streams):  # what feeds it does not depend on any state: the same bits
            own = stock.layers[layer].recurrent_states[0].float()
            own = own.transpose(-1, -2) if key_dim == 2 and own.ndim == 4 else own
            # The model's own step rounds as often as ours.
            assert (final - own.reshape(final.shape)).norm() <= 2 * bound(stream) * largest


def decode_on(model, ids, cache):
    forward(model, ids[:, :PREFILL], cache)
    for at in range(PREFILL, PREFILL + STEPS):
        forward(model, ids[:, at : at + 1], cache, past=at)


def test_a_replayed_stream_ends_in_the_state_of_the_model(model, ids, kind):
    check_states(model, ids, 2 if kind == "gated_delta" else 3)


@SLOW
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_is_captured(name, ids, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(build_tiny(name, tmp_path / name), dtype=torch.float32)
    check_states(model, ids, ARCHITECTURES[name].key_dim)
    architecture = ARCHITECTURES[name]
    streams = capture(model, ids, prefill=PREFILL, steps=STEPS)
    *files, _ = write_capture(streams, tmp_path / "captured", request=REQUEST)
    for file, stream in zip(files, streams.values(), strict=True):
        # Read in blocks, as long runs do, a stream gives the numbers that it gives in memory.
        replayed, known = (
            run_drift(given, ["int8@4"]) for given in (open_source({"file": str(file)}), stream)
        )
        np.testing.assert_equal(replayed.metrics(replayed.runs[0]), known.metrics(known.runs[0]))
        assert replayed.runs[0].status == "ok"
    assert tuple(streams) == architecture.layers
    for stream in streams.values():
        assert stream.family == architecture.family
        assert tuple(stream.initial.shape) == (len(ids), *architecture.shape)
        assert stream.key_heads == architecture.key_heads
        assert (stream.rates is not None) == (architecture.family == "mamba1")
        if stream.beta is not None:  # the op adds 1e-6 to the square of a norm
            assert (stream.k.norm(dim=-1) - 1).abs().max() < 1e-2
            assert stream.q.norm(dim=-1).max() <= stream.q.shape[-1] ** -0.5 * (1 + 1e-6)


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("mamba2", "fp32@1"),
        ("gated_delta", "fp16+sr/nvfp4@4"),
        pytest.param("gated_delta", "fp32@1", marks=SLOW),
        pytest.param("mamba2", "fp16+sr/nvfp4@4", marks=SLOW),
    ],
    indirect=["kind"],
)
def test_the_replay_is_the_decode_state_of_the_model_bit_for_bit(model, ids, policy, monkeypatch):
    """Logits too: whoever watches changes nothing."""
    seen, logits = {}, {True: [], False: []}
    step = DecodeState.step

    def spy(self, inputs):
        output = step(self, inputs)
        seen.setdefault(self.layer, []).append(output)
        return output

    ids = ids[:, : PREFILL + STEPS]
    hook = model.register_forward_hook(lambda *call: logits[watched].append(call[-1].logits[:, -1].clone()))
    watched = True
    streams = capture(model, ids, prefill=PREFILL, steps=STEPS, policy=policy, seed=3)
    watched = False
    monkeypatch.setattr(DecodeState, "step", spy)
    with run_with_policy(model, policy, seed=3), torch.no_grad():
        read = CachedForward(model)
        for first, last in [(0, PREFILL), *((at, at + 1) for at in range(PREFILL, PREFILL + STEPS))]:
            read(ids[:, first:last])
    monkeypatch.undo()
    hook.remove()
    assert len(logits[True]) == STEPS + 1
    assert all(map(torch.equal, logits[True], logits[False]))
    for layer, stream in streams.items():
        state = start_layer(
            policy, stream.family, stream.initial, key_heads=stream.key_heads, seed=3, layer=layer
        )
        outputs = [state.step(stream.step(t)) for t in range(STEPS)]
        assert all(map(torch.equal, outputs, seen[layer]))
        assert stream.meta["policy"] == policy


@ONE
def test_layers_by_number_and_rows_by_themselves(model, ids):
    both = capture(model, ids, prefill=5, steps=2)
    one = capture(model, ids[0].tolist(), layers=[1], prefill=5, steps=2)
    assert list(one) == [1]
    assert one[1].batch == 1
    # Other sums in the products of a smaller batch: 64 terms, a few ops, values of order 10.
    assert (one[1].v[:, 0] - both[1].v[:, 0]).abs().max() < 1e-4
    assert (both[1].v[:, 1] - both[1].v[:, 0]).abs().max() > 0.1


@ONE
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": [2]}, r"^layers 2: expected recurrent layers, which are 0-1$"),
        ({"layers": []}, r"^layers \[\]: expected recurrent layers, which are 0-1$"),
        ({"steps": 40}, "^ids '44 tokens': expected at least 45: a prefill of 5 and 40 steps$"),
        ({"steps": 0}, "^steps 0: expected a whole number of at least 1$"),
        ({"prefill": 0}, "^prefill 0: expected a whole number of at least 1$"),
        ({"policy": "fp33@1"}, "^policy 'fp33@1'"),
        (
            {"ids": [[1, -2, 3]], "prefill": 1},
            "^ids -2: expected tokens of the model's vocabulary, 0 to 258$",
        ),
        (
            {"ids": [[1, 259, 3]], "prefill": 1},
            "^ids 259: expected tokens of the model's vocabulary, 0 to 258$",
        ),
        ({"ids": torch.zeros(1, 9)}, "^ids 'torch.float32': expected whole numbers$"),
        ({"ids": torch.zeros(1, 1, 9, dtype=int)}, r"^ids \(1, 1, 9\): expected shape"),
        ({"ids": [[1, 2], [3]]}, "^ids 'list': expected token ids"),
    ],
)
def test_what_cannot_be_captured_is_refused(model, ids, options, says):
    with pytest.raises(InputError, match=says):
        capture(model, **({"ids": ids, "prefill": 5, "steps": 2} | options))


def test_a_model_without_recurrent_layers_is_refused(ids):
    with pytest.raises(InputError, match="a model with recurrent layers"):
        capture(torch.nn.Linear(2, 2), ids, prefill=5, steps=2)


@ONE
def test_memory_is_asked_for_before_the_first_token(model, ids, monkeypatch):
    values = sum(
        sum(value.numel() for value in stream.tensors().values())
        for stream in capture(model, ids, prefill=5, steps=8).values()
    )
    pages = {
        "SC_PAGE_SIZE": 1,
        "SC_PHYS_PAGES": 4 * values,
    }  # room for the streams, not for the bytes of a file
    monkeypatch.setattr("quantlab.drift.streams.os.sysconf", pages.__getitem__)
    with pytest.raises(InputError, match=r"^capture 'steps 8, layers 2': expected sizes that fit"):
        capture(model, ids, prefill=5, steps=8, on_step=lambda _: pytest.fail("a token was decoded"))
    pages["SC_PHYS_PAGES"] *= 2
    capture(model, ids, prefill=5, steps=8)


@pytest.fixture(scope="module")
def streams():
    """Of one sequence, without a model."""
    from quantlab.drift import synthetic_stream

    size = {"heads": 2, "steps": 24, "alpha": 0.9, "value_dim": 8, "key_dim": 32, "sequences": 1}
    return {layer: synthetic_stream("gated_delta", seed=layer, **size) for layer in (0, 3)}


def test_files_hold_the_streams_and_the_index_says_which(streams, tmp_path):
    paths = write_capture(streams, tmp_path / "a" / "out", request=REQUEST, environment={"threads": 1})
    assert [path.name for path in paths] == ["layer-0.safetensors", "layer-3.safetensors", "index.json"]
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["out"]
    index = json.loads(paths[-1].read_text())
    assert index["request"] == REQUEST
    for entry, path in zip(index["streams"], paths, strict=False):
        stream = load_stream(path)
        assert stream.hash == streams[entry["layer"]].hash == entry["hash"]
        assert run_drift(stream, ["nvfp4@4"]).table.equals(
            run_drift(streams[entry["layer"]], ["nvfp4@4"]).table
        )
    # The same once more is nothing; anything else is in the way.
    assert write_capture(streams, tmp_path / "a" / "out", request=REQUEST) == paths
    for other in ({"streams": {0: streams[0]}}, {"request": REQUEST | {"text_hash": "1" * 16}}):
        with pytest.raises(InputError, match=r"^output .*the same capture; something else is there$"):
            write_capture(
                **({"streams": streams, "folder": tmp_path / "a" / "out", "request": REQUEST} | other)
            )
    paths[0].unlink()
    with pytest.raises(InputError, match=r"layer-0.safetensors is gone; remove the folder$"):
        read_index(tmp_path / "a" / "out")


def test_a_folder_of_something_else_is_not_touched(streams, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path, tmp_path / "file"):
        with pytest.raises(InputError, match=r"^output .*something else is there$"):
            write_capture(streams, place, request=REQUEST)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "notes.txt"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError(28, "No space left on device")])
def test_what_stops_halfway_leaves_nothing(streams, tmp_path, stop, monkeypatch):
    from quantlab.drift import save_stream

    def failing(stream, path):
        if stream is streams[3]:
            raise stop
        save_stream(stream, path)

    monkeypatch.setattr(sys.modules["quantlab.models.capture"], "save_stream", failing)
    with pytest.raises((KeyboardInterrupt, OSError)):
        write_capture(streams, tmp_path / "out", request=REQUEST)
    assert list(tmp_path.iterdir()) == []


def test_a_killed_run_is_cleaned_up_by_the_next(tmp_path):
    script = (
        "import os, signal, sys; from quantlab.records import atomic_folder\n"
        "with atomic_folder(sys.argv[1]) as folder:\n"
        "    (folder / 'half').write_text('x'); os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", script, tmp_path / "out"], check=False)
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.")
    assert remove_stale(tmp_path) == 1
    assert list(tmp_path.iterdir()) == []
