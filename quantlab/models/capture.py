"""The real decode inputs of a model's recurrent layers, as streams that replay without the model."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quantlab.drift import Stream, check_memory, save_stream
from quantlab.errors import InputError
from quantlab.models.forwards import CachedForward, check_count, check_tokens
from quantlab.models.handles import Prefill
from quantlab.models.interception import Interception
from quantlab.models.recurrent_layers import recurrent_layers
from quantlab.records import STREAM_SCHEMA_VERSION, atomic_folder, encode
from quantlab.recurrences import StepInputs, get_recurrence
from quantlab.schemes import Diverged, Policy, PolicyRules
from quantlab.schemes.rules import number_text

INDEX = "index.json"


@torch.no_grad()
def capture(
    model: nn.Module,
    ids: Any,
    *,
    layers: Sequence[int] | None = None,
    prefill: int,
    steps: int,
    policy: str | Path | Policy | PolicyRules = "fp32@1",
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> dict[int, Stream]:
    """What ``steps`` tokens behind a prefill feed to the decode state of each recurrent layer; {layer: stream}.

    ids: token ids (sequences, tokens) or (tokens,), no padding.  The first ``prefill`` of each sequence are the prompt,
    the next ``steps`` are decoded one by one (teacher-forced: the model's own choice is not followed); what comes
    behind is not read.  layers: layer numbers (default: every recurrent layer).  policy: what the state is held under
    meanwhile, as of ``run_with_policy``; the inputs of deeper layers and of later tokens depend on it.  seed: of
    stochastic rounding.  on_step: called with the number of decoded tokens.

    A stream holds what the recurrence gets, in float32: q scaled, k normalised, each key head once, and as ``initial``
    the state after the prefill before any rounding.  Its meta names the layer, so that rules for it apply.  Captured
    are the inputs of a layer, not its outputs, nor anything of attention layers and convolutions.

    Raises InputError for layers that are not recurrent, too few tokens, more than the memory holds (before the first
    decoded token), a state that the policy loses, and as ``run_with_policy`` does.
    """
    prefill, steps = check_count("prefill", prefill), check_count("steps", steps)
    interception = Interception(model, policy, seed=seed)
    chosen = check_layers(model, layers)
    tokens = check_tokens(model, ids, prefill + steps, f"a prefill of {prefill} and {steps} steps")
    recorder = interception.observer = _Recorder(chosen, steps)
    forward = CachedForward(model)
    at = 0
    try:
        with interception:
            forward(tokens[:, :prefill])
            recorder.check_memory()
            for at in range(1, steps + 1):
                position = prefill + at - 1
                forward(tokens[:, position : position + 1])
                if on_step is not None:
                    on_step(at)
    except Diverged as error:
        expected = f"one whose state stays finite for {steps} steps: at step {at}, {error}"
        raise InputError("policy", interception.rules.text, expected) from None
    interception.require_effect()
    meta = {"source": "capture", "model": type(model).__name__, "policy": interception.rules.text}
    meta |= {"prefill": prefill, "policy_seed": seed}
    return {layer: recorder.stream(layer, meta) for layer in chosen}


def check_layers(model: nn.Module, layers: Sequence[int] | None) -> tuple[int, ...]:
    """The recurrent layers of ``model`` that are asked for, ascending; all for None.  InputError for others."""
    known = sorted(recurrent_layers(model))
    if layers is None:
        return tuple(known)
    wrong = [layer for layer in layers if isinstance(layer, bool) or layer not in known]
    if wrong or not layers:
        found = wrong[0] if len(wrong) == 1 else wrong
        raise InputError("layers", found, f"recurrent layers, which are {number_text(known)}")
    return tuple(sorted(set(layers)))


class _Recorder:
    """Keeps what the chosen layers are fed; an ``Observer``."""

    def __init__(self, layers: Sequence[int], steps: int):
        self._steps = steps
        self._chosen = set(layers)
        self._family: dict[int, str] = {}
        self._fixed: dict[int, dict[str, Tensor]] = {}
        self._values: dict[int, int] = {}  # of one stream
        self._arrays: dict[int, dict[str, Tensor]] = {}
        self._taken = dict.fromkeys(layers, 0)

    def started(self, prefill: Prefill, initial: Tensor) -> None:
        layer, recurrence = prefill.layer, get_recurrence(prefill.family.recurrence)
        if layer not in self._chosen:
            return
        fixed = {"initial": initial} | ({} if prefill.rates is None else {"rates": prefill.rates})
        self._fixed[layer] = {name: _plain(value) for name, value in fixed.items()}
        self._family[layer] = recurrence.name
        batch, heads, value_dim, key_dim = initial.shape
        gate = 1
        for size in recurrence.gate_shape(heads, value_dim, key_dim):
            gate *= size
        token = 2 * prefill.key_heads * key_dim + heads * value_dim + gate + heads * recurrence.delta_rule
        self._values[layer] = self._steps * batch * token + sum(
            v.numel() for v in self._fixed[layer].values()
        )

    def check_memory(self) -> None:
        """InputError if all streams, and the largest once more as the bytes of its file, do not fit."""
        sizes = {"steps": self._steps, "layers": len(self._values)}
        check_memory("capture", sizes, sum(self._values.values()) + max(self._values.values()))

    def decoded(self, layer: int, inputs: StepInputs) -> None:
        if layer not in self._chosen:
            return
        given = {name: value for name, value in vars(inputs).items() if value is not None}
        if layer not in self._arrays:
            self._arrays[layer] = {
                name: torch.empty((self._steps, *value.shape), dtype=torch.float32)
                for name, value in given.items()
            }
        for name, value in given.items():
            self._arrays[layer][name][self._taken[layer]] = value
        self._taken[layer] += 1

    def stream(self, layer: int, meta: Mapping[str, Any]) -> Stream:
        arrays = self._arrays[layer] | self._fixed[layer]
        return Stream(family=self._family[layer], meta={**meta, "layer": layer}, **arrays)


def _plain(tensor: Tensor) -> Tensor:
    """A copy that is float32, on the CPU and contiguous."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


def write_capture(
    streams: Mapping[int, Stream],
    folder: str | os.PathLike[str],
    *,
    request: Mapping[str, Any],
    environment: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write one stream file a layer (``layer-<number>.safetensors``) and index.json; the files, the index last.

    The folder appears whole or not at all.  request: what decides the streams (plain values; never any text), into the
    index; environment: what the numbers may depend on besides.  A folder that holds the same capture is left alone.
    Raises InputError for one that holds anything else, and for a place that cannot be written to.
    """
    folder = Path(folder)
    listed = [
        {
            "file": f"layer-{layer}.safetensors",
            "layer": layer,
            "family": stream.family,
            "hash": stream.hash,
            "steps": stream.steps,
            "sequences": stream.batch,
            "heads": stream.heads,
            "key_heads": stream.key_heads,
            "value_dim": stream.initial.shape[2],
            "key_dim": stream.initial.shape[3],
        }
        for layer, stream in sorted(streams.items())
    ]
    paths = [folder / entry["file"] for entry in listed] + [folder / INDEX]
    found = read_index(folder)
    if found is not None:
        if found["request"] != encode(request) or found["streams"] != listed:
            raise _occupied(folder)
        return paths
    index = {
        "schema_version": STREAM_SCHEMA_VERSION,
        "request": dict(request),
        "streams": listed,
        "environment": dict(environment or {}),
    }
    text = json.dumps(encode(index), indent=1, allow_nan=False) + "\n"
    with atomic_folder(folder) as temporary:
        for entry in listed:
            save_stream(streams[entry["layer"]], temporary / entry["file"])
        (temporary / INDEX).write_text(text, encoding="utf-8")
    return paths


def read_index(folder: str | os.PathLike[str]) -> dict[str, Any] | None:
    """The index of the capture in ``folder``; None for a free name and for an empty folder.

    Raises InputError for anything else that is there, and for a capture that lacks one of its files.
    """
    folder = Path(folder)
    if not os.path.lexists(folder) or (folder.is_dir() and not any(folder.iterdir())):
        return None
    try:
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["schema_version"] != STREAM_SCHEMA_VERSION or not isinstance(index["request"], dict):
            raise _occupied(folder)
        files = [folder / entry["file"] for entry in index["streams"]]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        raise _occupied(folder) from None
    for file in files:
        if not file.is_file():
            raise InputError(
                "output", str(folder), f"a whole capture, but {file.name} is gone; remove the folder"
            )
    return index


def check_free(folder: str | os.PathLike[str], request: Mapping[str, Any]) -> dict[str, Any] | None:
    """The index in ``folder`` if it is of this ``request``, None if the folder is free; InputError otherwise."""
    index = read_index(folder)
    if index is not None and index["request"] != encode(request):
        raise _occupied(folder)
    return index


def _occupied(folder: str | os.PathLike[str]) -> InputError:
    return InputError(
        "output", str(folder), "a free name, an empty folder, or the same capture; something else is there"
    )
