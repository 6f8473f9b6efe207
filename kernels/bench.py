"""The speed of a decode step: comparison first, then time, then a record.

    records = run_cases(cases, GraphTimer(), environment=..., folder="results/bench")

``cases`` come from ``bench_cases.expand``.  Cases that are compared with each other (one family, shape and batch) are
a group, and a group is measured in one run: if any of its records is missing, all of them are made anew.

Only the public interfaces of ``quantlab.kernels.steps`` and, for drafts, ``quantlab.kernels.drafts`` are called, which
have the signatures of ``quantlab.schemes``; ``served(policy, family, shape)``, where it is there, says why no kernel
serves a case.  Single kernels are timed by repeating the launches that a round made.
"""

import functools
import importlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from quantlab.errors import InputError
from quantlab.kernels import bench_peer_calls
from quantlab.kernels.bench_cases import OURS, Case, launch_bytes, traffic
from quantlab.kernels.bench_compare import Comparer
from quantlab.kernels.bench_draft_compare import DraftComparer
from quantlab.kernels.bench_peers import Peer
from quantlab.kernels.bench_pools import Layers, desynchronised_pool
from quantlab.kernels.bench_rounds import Rounds
from quantlab.kernels.bench_timing import Timer, copy_bandwidth
from quantlab.kernels.choice import choose
from quantlab.schemes.pool import allocate_pool

CACHES = 4
"""Between two visits to a layer's memory, at least this many times the last cache moves."""
FEWEST_LAYERS, MOST_LAYERS = 8, 400
MEMORY_SHARE = 0.6
"""Of the free device memory, at most, for pools."""
PEER_LIMIT = 1e-2
"""Norm of a peer's error over the norm of the float64 result.  Inputs and outputs are bfloat16, and some peers round
products to it: units of 2^-8 each, of which the norm of a rounding error is a third, three of them in a row."""

Record = dict[str, Any]


@dataclass(frozen=True)
class Schedule:
    """How a graph visits memory: ``groups`` models of ``layers`` layers, each taking ``steps`` steps of the window.

    groups * steps is the window (with drafts the rounds until cursors come back), and the groups are ``steps`` apart:
    every phase of the window is in every replay, whatever the batch.
    """

    groups: int
    layers: int
    steps: int

    @property
    def visits(self) -> int:
        return self.groups * self.layers * self.steps


def schedule(case: Case, l2_bytes: int, slot_bytes: float, free_bytes: float) -> Schedule:
    """slot_bytes: held for one row in one layer.  Raises InputError if not even one layer fits into memory."""
    rounds, moved = case.rounds, traffic(case).bytes
    fit = int(MEMORY_SHARE * free_bytes / (slot_bytes * case.batch))
    if fit < 1:
        need = f"{slot_bytes * case.batch / 2**30:.1f} GiB a layer"
        raise InputError("batch", case.batch, f"rows that fit into the device's memory, not {need}")
    wanted = max(FEWEST_LAYERS, min(MOST_LAYERS, math.ceil(CACHES * l2_bytes / moved)))
    wanted = min(wanted, fit)
    groups = max(n for n in range(1, rounds + 1) if rounds % n == 0 and n <= max(1, wanted // FEWEST_LAYERS))
    return Schedule(groups, min(math.ceil(wanted / groups), max(1, fit // groups)), rounds // groups)


def run_cases(
    cases: Sequence[Case],
    timer: Timer,
    *,
    environment: Mapping[str, Any],
    peers: Mapping[str, Peer] | None = None,
    steps: ModuleType | Any | None = None,
    drafts: ModuleType | Any | None = None,
    folder: Path | None = None,
    again: bool = False,
    bandwidth: float | None = None,
    single_kernels: Callable[[Case], bool] = lambda case: True,
    deadline: float | None = None,
    show: Callable[[Record, bool], None] = lambda record, timed: None,
) -> list[Record]:
    """A record a case, in order; stored in ``folder``, if one is given, as soon as its case is through.

    environment: for the records.  steps, drafts: stand in for the modules of ``quantlab.kernels``.  again: time what
    has a record of the same protocol too.  bandwidth: of the copy in bytes a microsecond, measured here unless given.
    single_kernels: for which cases each kernel is timed by itself as well.  deadline: of ``time.monotonic``; no group
    is begun after it, and the records end there.  show: called with every record and whether it was made now.
    """
    runner: _Runner | None = None
    found = []
    for _, group in groupby(cases, key=lambda case: case.group):
        members = list(group)
        known = [] if again or folder is None else _known(members, folder, timer.name)
        if known:
            for record in known:
                show(record, False)
            found += known
            continue
        if deadline is not None and time.monotonic() > deadline:
            break
        given = steps, drafts, bandwidth, single_kernels
        runner = runner or _Runner(timer, environment, dict(peers or {}), *given)
        for case in members:
            record = runner.run(case)
            if folder is not None:
                from quantlab.records import save_record

                save_record(folder, record)
            show(record, True)
            found.append(record)
    return found


def _known(members: list[Case], folder: Path, device: str) -> list[Record]:
    """The group's records if all are there, under today's protocol, none of ours a failure; else none of them."""
    from quantlab.records import load_record, protocol_fingerprint, record_path

    found = []
    for case in members:
        path = record_path(folder, case.point(device))
        if not path.is_file():
            return []
        record = load_record(path)
        failed = case.implementation == OURS and record["status"] not in ("ok", "not_served")
        if failed or record["protocol"] != protocol_fingerprint("bench"):
            return []
        found.append(record)
    return found


class _Runner:
    """One run: one bandwidth, one comparison with the twin a policy and shape."""

    def __init__(
        self,
        timer: Timer,
        environment: Mapping[str, Any],
        peers: dict[str, Peer],
        steps: ModuleType | Any | None,
        drafts: ModuleType | Any | None,
        bandwidth: float | None,
        single_kernels: Callable[[Case], bool],
    ):
        from quantlab.records import content_hash

        self.timer, self.environment, self.peers = timer, dict(environment), peers
        self.steps: Any = steps
        self._drafts: Any = drafts
        self.single_kernels = single_kernels
        self.missing: str | None = None
        if steps is None:
            try:
                self.steps = importlib.import_module("quantlab.kernels.steps")
            except ImportError as error:
                self.missing = f"no kernels here: {error}"
        self.bandwidth = copy_bandwidth(timer) if bandwidth is None else bandwidth
        self.name = content_hash({"environment": self.environment, "started": time.time_ns()})
        self.comparer = Comparer(self.steps, timer.device)

    @functools.cached_property
    def drafts(self) -> Any:
        return self._drafts or importlib.import_module("quantlab.kernels.drafts")

    @functools.cached_property
    def draft_comparer(self) -> DraftComparer:
        return DraftComparer(self.steps, self.drafts, self.timer.device)

    def run(self, case: Case) -> Record:
        from quantlab.records import complete_record

        started = time.monotonic()
        result: dict[str, Any]
        try:
            result = self._ours(case) if case.implementation == OURS else self._peer(case)
        except InputError as error:
            # What a launcher or the pool has no code for; a mistake of the caller's was refused before.
            result = {"status": "not_served", "message": str(error)}
        except Exception as error:
            result = {"status": "failed", "message": f"{type(error).__name__}: {error}"[:400]}
        finally:
            if self.timer.device.type == "cuda":
                torch.cuda.empty_cache()
        metrics = {"run": self.name, "copy_bandwidth": self.bandwidth, **_bytes(case)}
        result["metrics"] = metrics | result.get("metrics", {})
        return complete_record(
            case.point(self.timer.name),
            result,
            environment=self.environment,
            seconds=time.monotonic() - started,
        )

    def _ours(self, case: Case) -> dict[str, Any]:
        if self.missing:
            return {"status": "not_served", "message": self.missing}
        served = getattr(self.drafts if case.drafts else self.steps, "served", None)
        if served is not None and (reason := served(case.policy, case.family, case.shape)):
            return {"status": "not_served", "message": reason}
        compared = (self.draft_comparer if case.drafts else self.comparer).compare(case)
        comparison = {"against": "torch twin, float32", "error_over_limit": compared.measured}
        if not compared.passed:
            return _refused(compared.reason, comparison)
        plan = self._schedule(case)
        models = self._models(case, plan)
        rounds = Rounds(case, self.steps, self.drafts if case.drafts else None)

        def decode() -> None:
            for _ in range(plan.steps):
                for model in models:
                    rounds.run(model)

        def control() -> None:
            for _ in range(plan.steps):
                for model in models:
                    rounds.control(model)

        times = self.timer.measure(decode).per(plan.visits)
        around = self.timer.measure(control).per(plan.groups * plan.steps)
        metrics = self._speed(case, times) | vars(plan) | {"comparison": comparison}
        if not case.drafts:
            metrics["chosen"] = _chosen(case)
        metrics["control_us"] = around.median
        metrics["control_share"] = around.median / (plan.layers * times.median)
        alone = rounds.recorded(models)
        metrics["kernels"] = list(alone)
        if self.single_kernels(case):
            metrics["launches"] = self._launches(case, alone, plan.groups * plan.layers)
        return {"metrics": metrics}

    def _schedule(self, case: Case) -> Schedule:
        (one,) = allocate_pool(case.parsed, case.family, case.shape, 1, drafts=case.drafts)
        return schedule(case, self.timer.l2_bytes, one.nbytes, self.timer.free_bytes())

    def _models(self, case: Case, plan: Schedule) -> list[Layers]:
        models = []
        for number in range(plan.groups):
            model = desynchronised_pool(
                case, plan.layers, self.steps.load_states, device=self.timer.device, seed=number
            )
            cursor = model.pools[0].counters.cursor
            cursor.copy_((cursor + number * plan.steps * max(case.drafts, 1)) % case.parsed.window)
            models.append(model)
        return models

    def _launches(
        self, case: Case, alone: dict[str, list[Callable[[], object]]], layers: int
    ) -> dict[str, Any]:
        """The time of each part of a step by itself, of all launches that do it in a layer."""
        parts: dict[str, list[str]] = {}
        for name in alone:
            parts.setdefault(part_of(name), []).append(name)
        sizes = launch_bytes(case, window="window" in parts, encode="encode" in parts)
        found = {}
        for part, names in parts.items():
            work = [launch for name in names for launch in alone[name]]
            times = self.timer.measure(lambda work=work: [launch() for launch in work]).per(layers)
            found[part] = {"kernels": names, "us": times.median}
            found[part] |= {"us_lower": times.lower, "us_upper": times.upper}
            if part in sizes:
                rate = sizes[part] / times.median
                found[part] |= {"bytes": sizes[part], "of_copy": rate / self.bandwidth}
        return found

    def _peer(self, case: Case) -> dict[str, Any]:
        peer, device, window = self.peers[case.implementation], self.timer.device, case.parsed.window
        with peer.active():
            call = peer.call(case, device, 0)
            worst: dict[str, float] = {}
            for phase in sorted({0, window // 2, window - 1}):
                for name, error in bench_peer_calls.relative_errors(call, case, phase).items():
                    worst[name] = max(worst.get(name, 0.0), error)
            comparison = {"against": "float64", "relative_error": worst, "limit": PEER_LIMIT}
            if not all(error <= PEER_LIMIT for error in worst.values()):
                wrong = ", ".join(f"{name} off by {error:.2g}" for name, error in worst.items())
                return _refused(f"{wrong}, limit {PEER_LIMIT:g}", comparison)
            # A window's records are a fraction of the state; "fla" has its state twice, before and after.
            held = 2 * max(case.drafts, 1) * _state_bytes(case)
            plan = schedule(case, self.timer.l2_bytes, held, self.timer.free_bytes())
            layers = [call] + [peer.call(case, device, n) for n in range(1, plan.groups * plan.layers)]

            def decode() -> None:
                for step in range(plan.steps):
                    for number, layer in enumerate(layers):
                        layer.run(number % plan.groups * plan.steps + step)

            times = self.timer.measure(decode).per(plan.steps * len(layers))
        metrics = self._speed(case, times) | vars(plan) | {"comparison": comparison}
        metrics |= {"source": peer.how}
        return {"metrics": metrics}

    def _speed(self, case: Case, times: Any) -> dict[str, Any]:
        rate = traffic(case).bytes / times.median
        return {
            "us": times.median,
            "us_lower": times.lower,
            "us_upper": times.upper,
            "replays": times.count,
            "bytes_per_us": rate,
            "of_copy": rate / self.bandwidth,
        }


PARTS = {
    "fold": "flush",
    "flush": "flush",
    "system": "flush",
    "encode": "encode",
    "step": "step",
    "read": "read",
    "window": "window",
}
"""What a kernel's name contains -> the part of ``launch_bytes`` that it does; the first that fits."""


def part_of(kernel: str) -> str:
    """The part of a step that a kernel does; the name of the kernel, if it tells nothing."""
    return next((part for word, part in PARTS.items() if word in kernel), kernel)


def _refused(reason: str | None, comparison: dict[str, Any]) -> dict[str, Any]:
    return {"status": "comparison_failed", "message": reason, "metrics": {"comparison": comparison}}


def _chosen(case: Case) -> dict[str, Any]:
    """Whose kernels are to decode in the case's place; what they take is the record of that policy."""
    choice = choose(case.policy, case.family, case.shape, case.batch)
    return {
        "policy": str(choice.policy),
        "expected_us": choice.expected,
        "slot_bytes": choice.slot_bytes,
    }


def _state_bytes(case: Case) -> float:
    full = (case.shape.heads, case.shape.value_dim, case.shape.key_dim)
    return sum(case.parsed.checkpoint.stored_bits(full).values()) / 8


def _bytes(case: Case) -> dict[str, Any]:
    found = traffic(case)
    return {
        "bytes": found.bytes,
        "read": found.read,
        "written": found.written,
        "token_bytes": found.tokens,
        "checkpoint_bits": case.parsed.checkpoint.element.storage_bits,
    }
