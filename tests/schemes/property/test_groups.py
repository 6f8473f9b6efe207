"""Random schedules on a pool whose heads follow three policies, beside a pool of each policy for all heads.

Heads share nothing but keys and queries, so every head must hold, bit for bit once it is rounded, and read what it does
in the pool of its own policy; what that one does right, ``test_property`` proves.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from quantlab.errors import InputError
from quantlab.recurrences import StepInputs
from quantlab.schemes import (
    HeadGroups,
    PolicyRules,
    Rule,
    SlotPool,
    StateShape,
    load_decode_state,
    parse_policy,
    save_decode_state,
)
from tests.schemes.property.driver import DRAFTS, SLOTS, TOLERANCE, Operation, World
from tests.schemes.property.schedule import OPERATIONS, Generator, counted

HEADS, KEY_HEADS = 6, 3
GROUPS = ((0, 1, 3), (2, 5), (4,))
SHAPES = {"mamba2": (4, 16), "gated_delta": (4, 16), "kimi_delta": (4, 16), "mamba1": (6, 16)}
CASES = (
    ("gated_delta", ("fp16+sr/nvfp4+sr8@4", "fp32@5:buffer=bf16", "int8+ef@1")),
    ("gated_delta", ("fp8/nvfp4@4:flush=early:flush_read=copy", "nvfp4@4:contents=derived", "fp16+sr@4:flush=early")),
    ("kimi_delta", ("int8+ef.int4@3:schedule=step", "fp32/nvfp4@4:key_read=checkpoint", "bf16@4:schedule=turn")),
    ("mamba2", ("nvfp4@4:schedule=chunk", "fp16+sr@3", "int8+ef@4:ef_read=include")),
    ("mamba1", ("fp32@4:flush=early", "bf16+sr@1", "fp16/nvfp4@3")),
)  # fmt: skip
"""The first policy has the least room for drafts, which is what the schedule must know."""
CELL, FAST_LIMIT = 20, 40


class Pools:
    """The mixed pool and the plain ones: an operation is done on all of them, and they are compared."""

    def __init__(self, policies: tuple[str, ...], family: str, null: str, seed: int):
        value_dim, key_dim = SHAPES[family]
        draw = np.random.default_rng(seed)
        rates = torch.from_numpy(-draw.uniform(0.2, 4.0, (HEADS, value_dim, key_dim)))
        options: dict[str, Any] = {
            "rates": rates if family == "mamba1" else None,
            "seed": seed,
            "layer": 3,
            "null": null,
            "drafts": DRAFTS,
            "arithmetic": torch.float64,
        }
        shape = StateShape(HEADS, value_dim, key_dim, KEY_HEADS)
        parsed = [parse_policy(policy) for policy in policies]
        rules = [Rule(None, frozenset(h), p) for p, h in zip(parsed[1:], GROUPS[1:], strict=True)]
        self.family, self.shape, self.delta = family, shape, "delta" in family
        self.mixed = SlotPool(PolicyRules(parsed[0], tuple(rules)), family, shape, SLOTS, **options)
        self.plain = {policy: SlotPool(policy, family, shape, SLOTS, **options) for policy in parsed}
        self.saved: dict[int, list[Any]] = {id(pool): [] for pool in self.all}
        assert isinstance(self.mixed._state, HeadGroups)
        assert {g.policy: g.heads for g in self.mixed._state.groups} == dict(zip(parsed, GROUPS, strict=True))

    @property
    def all(self) -> list[SlotPool]:
        return [self.mixed, *self.plain.values()]

    def apply(self, operation: Operation, legal: bool, held: list[int]) -> None:
        """held: slots that hold a sequence afterwards."""
        act = self.action(operation)
        if not legal:
            # What one group has no room for, another may have: the plain pools are not asked.
            with pytest.raises(InputError):
                act(self.mixed)
        else:
            found = act(self.mixed)
            for heads, pool in zip(GROUPS, self.plain.values(), strict=True):
                self.same(found, act(pool), heads, operation[0])
        self.compare(held)

    def same(self, found: Any, expected: Any, heads: tuple[int, ...], what: str) -> None:
        """Outputs of the group's heads, or slot numbers."""
        if not isinstance(found, torch.Tensor):
            assert found == expected, what
            return
        difference = found[..., list(heads), :] - expected[..., list(heads), :]
        assert float(difference.abs().max() if difference.numel() else 0.0) <= TOLERANCE, what

    def compare(self, held: list[int]) -> None:
        state: Any = self.mixed._state
        assert self.mixed.free_slots == next(iter(self.plain.values())).free_slots
        for group, own in zip(state.groups, state.states, strict=True):
            plain: Any = self.plain[group.policy]._state
            heads = list(group.heads)
            assert torch.equal(own.cursor[held], plain.cursor[held])
            assert torch.equal(own.pending[held], plain.pending[held])
            for part, store in plain._stores().items():
                mine = own._stores()[part]
                difference = (mine.decoded[held] - store.decoded[held][:, heads]).abs().flatten(1)
                # A live row has not been rounded: it shows the order of sums.
                bound = torch.where(store.live[held], TOLERANCE, 0.0)
                assert bool((difference <= bound[:, None]).all()), f"{group}: {part}"
                for name in ("numbers", "sequence_ids", "live"):
                    assert torch.equal(getattr(mine, name)[held], getattr(store, name)[held]), name
                for name in ("_unread", "_read_stores"):
                    assert torch.equal(getattr(own, name)[part][held], getattr(plain, name)[part][held]), name
                if store.residual is not None:
                    values = [s.format.residual_values(s.residual)[held] for s in (mine, store)]
                    assert torch.equal(values[0], values[1][:, heads])

    def action(self, operation: Operation) -> Callable[[SlotPool], Any]:
        name, a = operation[0], dict(operation[1])
        if name in ("step", "verify", "extend"):
            inputs = self.tokens(len(a["slots"]), a.get("count", 1), a["seed"], a.get("spoil"))
            if name == "step":
                return lambda pool: pool.step(inputs.token(0), a["slots"])
            lengths = None if a.get("lengths") is None else torch.tensor(a["lengths"])
            return lambda pool: getattr(pool, name)(inputs, a["slots"], lengths)
        if name == "commit":
            return lambda pool: pool.commit(torch.tensor(a["counts"]), a["slots"])
        if name in ("allocate", "reset"):
            draw = np.random.default_rng(a.pop("seed"))
            initial = torch.from_numpy(draw.standard_normal((HEADS, *SHAPES[self.family])))
            a["initial"] = initial if a.pop("state") else None
        if name in ("preempt", "snapshot"):
            return lambda pool: self.saved[id(pool)].append(getattr(pool, name)(a["slot"]))
        if name == "restore":
            return self.restore(a["index"])
        if name == "read":
            return lambda pool: pool.materialize(a["slot"]).flatten(1)
        if name == "file":
            return self.file
        return lambda pool: getattr(pool, name)(**a)

    def restore(self, index: int) -> Callable[[SlotPool], int]:
        def restored(pool: SlotPool) -> int:
            slot = pool.restore(self.saved[id(pool)][index])
            del self.saved[id(pool)][index]
            return slot

        return restored

    def file(self, pool: SlotPool) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "state.safetensors"
            save_decode_state(pool._state, path)
            pool._state = load_decode_state(path)

    def tokens(self, rows: int, count: int, seed: int, spoil: str | None) -> StepInputs:
        draw, lead = np.random.default_rng(seed), (rows, count)
        value_dim, key_dim = SHAPES[self.family]
        gates = {"kimi_delta": (HEADS, key_dim), "mamba1": (HEADS, value_dim)}.get(self.family, (HEADS,))
        gate = draw.exponential(0.3, (*lead, *gates))
        k = draw.standard_normal((*lead, KEY_HEADS, key_dim))
        arrays = {
            "q": draw.standard_normal((*lead, KEY_HEADS, key_dim)) / 4,
            "k": k / np.linalg.norm(k, axis=-1, keepdims=True),
            "v": draw.standard_normal((*lead, HEADS, value_dim)),
            "log_decay": gate if self.family == "mamba1" else -gate,
        }
        if self.delta:
            arrays["beta"] = draw.uniform(0.0, 2.0, (*lead, HEADS))
        if spoil is not None:
            arrays[spoil] = arrays[spoil][..., :-1]
        return StepInputs(**{name: torch.from_numpy(value) for name, value in arrays.items()})


def explore(family: str, policies: tuple[str, ...], null: str, seed: int, cell: int, limit: int) -> int:
    """Random operations until each was done ``cell`` times or there were ``limit``; how many that took."""
    other = "pad<0" if null == "zero" else "pad=0"
    generator = Generator(Random(seed), {name: cell for name in OPERATIONS if name != other})
    guide = World(policies[0], family, null, seed)
    pools, done = Pools(policies, family, null, seed), 0
    while not generator.done and done < limit:
        operation = generator.next(guide)
        cells = counted(guide.naive, operation) if not guide.naive.objections(*operation) else None
        legal = guide.apply(operation)
        pools.apply(operation, legal, sorted(guide.naive.held))
        generator.counts += cells if legal and cells else {"refused": 1}
        done += 1
    return done


@pytest.mark.parametrize(("family", "policies"), CASES[:2], ids=lambda value: value[0])
def test_heads_in_groups_are_those_of_their_policies(family, policies):
    assert explore(family, policies, "negative", 3, CELL, FAST_LIMIT) == FAST_LIMIT


@pytest.mark.slow
@pytest.mark.parametrize(("family", "policies"), CASES, ids=lambda value: value[0])
def test_random_schedules_on_groups(family, policies):
    for seed, null in enumerate(("negative", "zero")):
        assert explore(family, policies, null, seed, CELL, 100_000) >= 10 * CELL
