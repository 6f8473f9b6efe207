"""What the predictor takes from the float64 shadow of a run, collected as the run goes."""

import torch

from quantlab.drift.predictor import StreamStatistics
from quantlab.drift.streams import Stream
from quantlab.recurrences import DecayAxis, expand_groups, get_recurrence


class ShadowStatistics:
    """Collects what the predictor and the pooled errors need from the shadow."""

    def __init__(self, stream: Stream):
        self.stream = stream
        self.recurrence = get_recurrence(stream.family)
        shape = (stream.steps, stream.batch, stream.heads)
        names = ("rho", "decay", "write", "state", "output", "gain")
        self.values = {name: torch.empty(shape, dtype=torch.float64) for name in names}
        self.key_dim = stream.initial.shape[-1]
        self.log_decay = None
        if self.recurrence.axis is DecayAxis.HEAD:
            self.log_decay = stream.log_decay.double().flatten(1).numpy()
        self.start = stream.initial.double().square().sum((-1, -2))

    def add(self, t: int, before, after, output, inputs, rates) -> None:
        heads, key_dim = self.stream.heads, after.shape[-1]
        if self.recurrence.axis is not DecayAxis.HEAD:
            # An error is taken to be spread over the elements as the state is.
            kept = (self.recurrence.decay(inputs.log_decay, rates) * before).square().sum((-1, -2))
            total = before.square().sum((-1, -2))
            decay = torch.where(total > 0, kept / total.clamp_min(1e-300), 1.0)
        else:
            decay = torch.exp(2 * inputs.log_decay)
        erase, write = 1.0, 0.0
        if self.recurrence.delta_rule:
            k = expand_groups(inputs.k, heads, 1).square().sum(-1)
            beta = inputs.beta
            erase = 1 - (2 * beta * k - (beta * k).square()) / key_dim
            write = (beta.square() * k.square()) * decay / key_dim
        q = expand_groups(inputs.q, heads, 1).square().sum(-1)
        self.values["rho"][t] = decay * erase
        self.values["decay"][t] = decay
        self.values["write"][t] = write
        self.values["state"][t] = after.square().sum((-1, -2))
        self.values["output"][t] = output.square().sum(-1)
        self.values["gain"][t] = q / key_dim

    def arrays(self) -> StreamStatistics:
        flat = {name: value.flatten(1).numpy() for name, value in self.values.items()}
        start = self.start.flatten().numpy()
        return StreamStatistics(**flat, log_decay=self.log_decay, start=start, key_dim=self.key_dim)
