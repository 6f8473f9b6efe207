"""What is done with a model whose states are in pools, and with the same model whose states are not."""

import contextlib
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quantlab.models import build_tiny
from quantlab.models.interception import Interception, decode_states, reset_rows, select_rows
from quantlab.models.tiny_kinds import TINY_KINDS

from .decoding import forward, new_cache, step_by_step

PROMPT, GREEDY = 5, {"max_new_tokens": 11, "do_sample": False, "pad_token_id": 0}


def build(kind: str, folder: Path) -> Path:
    """A tiny model whose value dim is one that kernels serve: a multiple of 16."""
    fields = TINY_KINDS[kind].fields
    if "linear_value_head_dim" in fields:
        fields = fields | {"linear_value_head_dim": 16}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TINY_KINDS, kind, replace(TINY_KINDS[kind], fields=fields))
        return build_tiny(kind, folder)


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@dataclass
class Run:
    """A model inside a block; the scenarios below return what must not depend on where its states are."""

    model: Any
    ids: Tensor
    interception: Interception

    def prompt(self) -> Any:
        """A cache that has read a prompt."""
        cache = new_cache(self.model)
        forward(self.model, self.ids[:, :PROMPT], cache)
        return cache

    def decode(self, cache: Any, first: int, last: int, ids: Tensor | None = None) -> Tensor:
        """Logits of the tokens from ``first`` on, one forward each."""
        return step_by_step(self.model, (self.ids if ids is None else ids)[:, first:last], cache)


def steps(run: Run) -> list[Tensor]:
    """More than two windows of 4."""
    cache = run.prompt()
    logits = run.decode(cache, PROMPT, PROMPT + 10)
    return [logits, *(state.materialize() for state in decode_states(cache).values())]


def generate(run: Run) -> list[Tensor]:
    """Greedy, the first prompt padded on its left."""
    prompt, mask = run.ids[:2, :9].clone(), torch.ones(2, 9, dtype=torch.int64, device=run.ids.device)
    prompt[0, :4], mask[0, :4] = 0, 0
    return [run.model.generate(prompt, attention_mask=mask, **GREEDY)]


def beams(run: Run) -> list[Tensor]:
    return [run.model.generate(run.ids[:2, :9], num_beams=3, **GREEDY)]


def rows(run: Run) -> list[Tensor]:
    """Rows that swap, repeat, multiply and go."""
    cache, ids = run.prompt(), run.ids
    found = [run.decode(cache, PROMPT, PROMPT + 6)]
    for chosen in ([1, 1, 0], [2, 0, 0, 1], [3, 1]):
        picked = torch.tensor(chosen, device=ids.device)
        select_rows(cache, picked)
        ids = ids[picked]
        found.append(run.decode(cache, PROMPT + 6, PROMPT + 9, ids))
    cache.batch_repeat_interleave(2)
    found.append(run.decode(cache, PROMPT + 9, PROMPT + 12, ids.repeat_interleave(2, 0)))
    return found


def chunks(run: Run) -> list[Tensor]:
    """A prompt in pieces, one of them behind decoded tokens, one at a store."""
    cache = run.prompt()
    found = [forward(run.model, run.ids[:, PROMPT : PROMPT + 3], cache)]
    found.append(run.decode(cache, PROMPT + 3, PROMPT + 9))
    found.append(forward(run.model, run.ids[:, PROMPT + 9 : PROMPT + 11], cache))
    found.append(run.decode(cache, PROMPT + 11, PROMPT + 16))
    return found


def crop(run: Run) -> list[Tensor]:
    """Drafts of 1 to 5 tokens, of which some are taken back; single steps before, between and behind."""
    cache, at = run.prompt(), PROMPT + 2
    found = [run.decode(cache, PROMPT, at)]
    cache.activate_past_recording()
    for count, wrong in ((3, 1), (1, 0), (4, 4), (5, 2), (2, 0)):
        found.append(forward(run.model, run.ids[:, at : at + count], cache))
        cache.crop(-wrong)
        at += count - wrong
    found.append(run.decode(cache, at, at + 2))
    back = min(2, *(int(state.reach.min()) for state in decode_states(cache).values()))
    cache.crop(-back)
    at += 2 - back
    # Five windows of 3 and a token more, so that records stand at odd places when the room for drafts goes.
    found += [forward(run.model, run.ids[:, n : n + 3], cache) for n in (at, at + 3)]
    for layer in cache.layers:
        layer.record_past = False
    found.append(run.decode(cache, at + 6, at + 11))
    return found


def recorded(run: Run) -> list[Tensor]:
    """A prompt whose end can be taken back."""
    cache = new_cache(run.model)
    cache.activate_past_recording()
    found = [forward(run.model, run.ids[:, :9], cache, logits_to_keep=4)]
    cache.crop(-2)
    found.append(run.decode(cache, 7, 12))
    return found


def reset(run: Run) -> list[Tensor]:
    """A row that starts over; the cursors are then different."""
    cache = run.prompt()
    found = [run.decode(cache, PROMPT, PROMPT + 6)]
    reset_rows(cache, torch.tensor([1]))
    found.append(run.decode(cache, PROMPT + 6, PROMPT + 15))
    return found


def fork(run: Run) -> list[Tensor]:
    """A copied cache goes its own way."""
    cache = run.prompt()
    run.decode(cache, PROMPT, PROMPT + 3)
    other = deepcopy(cache)
    found = [run.decode(cache, PROMPT + 3, PROMPT + 7), run.decode(other, PROMPT + 4, PROMPT + 9)]
    return [*found, run.decode(cache, PROMPT + 7, PROMPT + 9)]


SCENARIOS = {f.__name__: f for f in (steps, generate, beams, rows, chunks, crop, recorded, reset, fork)}


@contextlib.contextmanager
def running(model: Any, ids: Tensor, policy: Any, pools: bool | None) -> Iterator[Run]:
    """A run in a block of its own.  pools: as of ``Interception``."""
    interception = Interception(model, policy, seed=3, pools=pools)
    with interception:
        yield Run(model, ids, interception)


def outcome(
    model: Any, ids: Tensor, policy: Any, scenario: str, pools: bool | None
) -> tuple[list[Tensor], Any]:
    """What a scenario returns, and the report."""
    with running(model, ids, policy, pools) as run:
        found = SCENARIOS[scenario](run)
    return [tensor.cpu() for tensor in found], run.interception.report


def decoded(
    folder: Path, ids: Tensor, policy: str, scenario: str, pools: bool | None = None
) -> tuple[list[Tensor], dict[int, str]]:
    """A scenario with the model in ``folder``, for a process of its own: with what decoded each layer."""
    found, report = outcome(loaded(folder), ids, policy, scenario, pools)
    return found, report.backends
