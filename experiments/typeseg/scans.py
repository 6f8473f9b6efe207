"""The network's scans: once in float64 (the shadow), and under a policy with its errors against the shadow."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from experiments.typeseg import network
from experiments.typeseg.measures import Array, Energies
from experiments.typeseg.network import ScanInputs
from quantlab.drift.gains import Gain, is_scaled, relative_rounding_error
from quantlab.recurrences import RECURRENCES, StepInputs
from quantlab.schemes import DecodeState, Diverged, Policy, start

FAMILY = "mamba1"
#: States are compared every 7th step: cheap, and coprime with windows of 2^n, so that every cursor position counts.
SAMPLE_EVERY = 7
#: A scan's own error is measured on every other document: the labels need many texts, an error needs few.
MEASURE_EVERY = 2
SAMPLES = slice(SAMPLE_EVERY - 1, None, SAMPLE_EVERY)


def step_inputs(inputs: ScanInputs) -> list[StepInputs]:
    """The decode inputs of each step: one head whose value dim is d_inner, dt as its log decay, v = dt x."""
    value = inputs.dt * inputs.x
    columns = [part[:, :, None].unbind(1) for part in (inputs.query, inputs.key, value, inputs.dt)]
    return [StepInputs(q=q, k=k, v=v, log_decay=dt) for q, k, v, dt in zip(*columns, strict=True)]


@dataclass
class Reference:
    """The network with every scan in float64, on the float32 inputs that typeseg's dense parts hand to it.

    logits (documents, T, labels) float32; per layer, of the measured rows alone: the inputs, the outputs (rows, T, V)
    and the states at the sampled steps (rows, samples, V, K), both float64, and the error gains by (window, scaled).
    """

    logits: Array
    inputs: list[ScanInputs]
    outputs: list[torch.Tensor]
    states: list[torch.Tensor]
    gains: list[dict[tuple[int, bool], Gain]]


def sampled(step: int) -> bool:
    """Whether states are compared after this step (0-based)."""
    return step % SAMPLE_EVERY == SAMPLE_EVERY - 1


def measured_rows(rows: int) -> torch.Tensor:
    """The measured ones of a layer's ``rows`` (direction-major): both directions of every ``MEASURE_EVERY``-th text."""
    return torch.arange(rows).view(len(network.DIRECTIONS), -1)[:, ::MEASURE_EVERY].flatten()


def shadow_scan(
    inputs: ScanInputs, measured: torch.Tensor, gains: Iterable[Gain] = ()
) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer's scans in float64 from a zero state.

    Returns the outputs (rows, T, V) and the states of the measured rows at the sampled steps (measured, samples, V, K).
    """
    recurrence = RECURRENCES[FAMILY]
    rates = inputs.rates.to(torch.float64)[None]
    state = torch.zeros(len(inputs.x), *rates.shape, dtype=torch.float64)
    outputs, states = [], []
    for step, float32_values in enumerate(step_inputs(inputs)):
        state, output = recurrence.step(state, float32_values.to(torch.float64), rates)
        outputs.append(output[:, 0])
        if sampled(step):
            states.append(state[measured, 0])
        if gains:
            # float32 is plenty for a variance.
            decay = recurrence.decay(float32_values.log_decay[measured], inputs.rates[None])[:, 0]
            narrow = state[measured, 0].to(torch.float32)
            for gain in gains:
                gain.step(decay, narrow, float32_values.q[measured, 0])
    return torch.stack(outputs, 1), torch.stack(states, 1)


def run_reference(byte_tokens: Array, policies: Iterable[Policy] = ()) -> Reference:
    """The reference network on byte tokens (documents, T), T at least ``SAMPLE_EVERY``, with gains for ``policies``."""
    reference = Reference(byte_tokens, [], [], [], [])
    keys = {(p.window, is_scaled(store)) for p in policies for store in (p.checkpoint, p.read_copy) if store}

    def scan(_layer: int, inputs: ScanInputs) -> torch.Tensor:
        measured = measured_rows(len(inputs.x))
        gains = {key: Gain(*key, length=inputs.x.shape[1]) for key in keys}
        outputs, states = shadow_scan(inputs, measured, list(gains.values()))
        reference.inputs.append(inputs.select(measured))
        reference.outputs.append(outputs[measured])
        reference.states.append(states)
        reference.gains.append(gains)
        return outputs

    reference.logits = network.forward(byte_tokens, scan)
    return reference


class DivergedError(ArithmeticError):
    """A scan's state or output is no longer finite."""

    def __init__(self, layer: int, step: int):
        self.layer, self.step = layer, step
        super().__init__(f"layer {layer} holds NaN or Inf at step {step}")


class PolicyScan:
    """Every scan of the network under one policy; pass ``scan`` to ``network.forward``.

    Each layer's batch holds two kinds of rows: the inputs that the network hands over, whose answers go forward, and
    the reference's inputs of the measured rows, whose states and outputs are compared with the shadow's.  So a scan's
    error is its own, and the labels carry the errors of all scans together.
    """

    def __init__(
        self,
        policy: Policy,
        reference: Reference,
        seed: int = 0,
        after_layer: Callable[[int], None] = lambda _layer: None,
    ):
        self.policy, self.reference, self.seed, self.after_layer = policy, reference, seed, after_layer
        steps = reference.logits.shape[1]
        self.output, self.state, self.read = Energies(steps), Energies(steps), Energies(steps)
        self.layers: list[DecodeState] = []

    @property
    def rows(self) -> int:
        """Measured scans of one layer: directions x measured documents."""
        return len(self.reference.inputs[0].x)

    def scan(self, layer: int, inputs: ScanInputs) -> torch.Tensor:
        """Outputs (rows, T, V) float32 of one layer's scans.  Raises DivergedError at the first NaN or Inf."""
        rows = len(inputs.x)
        both = inputs.cat(self.reference.inputs[layer])
        rates = both.rates[None]
        initial = torch.zeros(len(both.x), *rates.shape)
        state = start(self.policy, FAMILY, initial, key_heads=1, rates=rates, seed=self.seed, layer=layer)
        outputs, states, reads = [], [], []
        for step, values in enumerate(step_inputs(both)):
            try:
                outputs.append(state.step(values)[:, 0])
            except Diverged:
                raise DivergedError(layer, step) from None
            if sampled(step):
                states.append(state.materialize()[rows:, 0])
                reads.append(state.read_state()[rows:, 0])
        answer = torch.stack(outputs, 1)
        finite = answer.isfinite().all(-1).all(0)
        if not finite.all():
            raise DivergedError(layer, int((~finite).nonzero()[0]))
        self.output.add(answer[rows:], self.reference.outputs[layer])
        self.state.add(torch.stack(states, 1), self.reference.states[layer], SAMPLES)
        self.read.add(torch.stack(reads, 1), self.reference.states[layer], SAMPLES)
        self.layers.append(state)
        self.after_layer(layer)
        return answer[:rows]

    def predicted_output_error(self) -> float | None:
        """The pooled output error that independent rounding predicts; None with error feedback or no rounding."""
        policy = self.policy
        if policy.checkpoint.error_feedback:
            return None
        error = reference = 0.0
        for layer, gains in enumerate(self.reference.gains):
            states, outputs = self.reference.states[layer], self.reference.outputs[layer]
            for store, part in ((policy.checkpoint, "checkpoint"), (policy.read_copy, "copy")):
                if store and store.rounded:
                    gain = getattr(gains[policy.window, is_scaled(store)], part)
                    error += relative_rounding_error(store, states, self.seed) ** 2 * gain
            reference += float(outputs[:, outputs.shape[1] // 2 :].square().sum())
        return (error / reference) ** 0.5 if error > 0 else None
