"""What is timed: one round of a case over all layers of a model, a step or a verification and its commit."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

from quantlab.kernels import bench_timing
from quantlab.kernels.bench_cases import Case
from quantlab.kernels.bench_pools import Layers

Launches = dict[str, list[Callable[[], object]]]


class Rounds:
    """Of one case: ``begin_step``, ``decode_token`` once a layer and ``end_step``; with drafts a verification of them,
    and the commit of all.

    steps, drafts: ``quantlab.kernels.steps`` and ``quantlab.kernels.drafts``, or what stands in for them.
    """

    def __init__(self, case: Case, steps: ModuleType | Any, drafts: ModuleType | Any):
        self.case, self.steps, self.drafts = case, steps, drafts

    def run(self, model: Layers) -> None:
        self._work(model, lambda layer: layer())

    def control(self, model: Layers) -> None:
        """What the layers share."""
        self._work(model, lambda layer: None)

    def recorded(self, models: list[Layers]) -> Launches:
        """The launches of a round in every layer, by name of the kernel."""
        found: Launches = {}

        def record(layer: Callable[[], object]) -> None:
            for name, launch in bench_timing.recorded_launches(layer):
                found.setdefault(name, []).append(launch)

        for model in models:
            self._work(model, record)
        return found

    def _work(self, model: Layers, each: Callable[[Callable[[], object]], object]) -> None:
        steps, drafts, window = self.steps, self.drafts, self.case.parsed.window
        counters, count = model.pools[0].counters, self.case.drafts
        token = steps.decode_token if count == 0 else drafts.verify_tokens
        plan = steps.begin_step(counters, model.slots, window)
        for pool, inputs, output in zip(model.pools, model.inputs, model.outputs, strict=True):
            each(functools.partial(token, pool, inputs, plan, output))
        if count == 0:
            steps.end_step(plan)
            return
        drafts.end_verify(plan, count)
        commit = drafts.begin_commit(counters, model.slots, model.accepted, window)
        for pool in model.pools:
            each(functools.partial(drafts.commit_tokens, pool, commit))
        drafts.end_commit(commit)
