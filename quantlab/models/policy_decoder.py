"""A model that reads tokens under one policy, with caches of its own: several stand side by side on one model."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quantlab.models.agreement import chosen
from quantlab.models.decode_rows import by_row
from quantlab.models.forwards import CachedForward
from quantlab.models.interception import Interception, decode_states, select_rows
from quantlab.schemes import Diverged, PolicyRules


class PolicyDecoder:
    """A model under one policy, with a cache of its own.

    message: why it ended, or None.  diverged_at: the step at which it did.  logits: (B, vocabulary) behind the last
    token.
    """

    def __init__(self, model: nn.Module, rules: PolicyRules, seed: int):
        self.rules = rules
        self.interception = Interception(model, rules, seed=seed)
        self.message: str | None = None
        self.diverged_at: int | None = None
        self.logits: Tensor = torch.empty(0)
        self._model = model
        self._forward: CachedForward | None = CachedForward(model)

    def begin(self, sequence_ids: Sequence[int]) -> None:
        """Read new sequences, of these names for stochastic rounding, from their first token on."""
        self.interception.sequence_ids = torch.tensor(list(sequence_ids))
        self._forward = CachedForward(self._model)

    def read(self, tokens: Tensor | None, step: int) -> bool:
        """Read tokens (B, T), or what it chose itself; whether there are logits behind them."""
        assert self._forward is not None
        try:
            with self.interception:
                self.logits = self._forward(chosen(self.logits)[:, None] if tokens is None else tokens)
        except Diverged as error:
            self.message = str(error)
        else:
            # The largest of a row is NaN if one is, and -inf if the row leaves no token.
            if not bool(self.logits.amax(-1).isfinite().all()):
                self.message = "the logits are NaN or Inf"
        if self.message is not None:
            self.message = f"at step {step}, {self.message}"
            self.diverged_at = step
            self.end()
        return self.message is None

    def keep(self, rows: Tensor) -> None:
        """Row i becomes the old row ``rows[i]``."""
        assert self._forward is not None
        with self.interception:
            select_rows(self._forward.cache, rows)

    def exercised(self, rows: Tensor) -> list[dict[str, int | None]]:
        """Of each of ``rows``: stores that a later step read back, by copy, the least over the layers."""
        assert self._forward is not None
        states = decode_states(self._forward.cache).values()
        return by_row([state.exercised_rows(rows) for state in states], len(rows))

    def end(self) -> None:
        """Let the cache go."""
        self._forward = None
