"""Teacher-forced decode of the tiny models, and what a test may call the same."""

import pytest
import torch
from transformers import DynamicCache

from quantlab.models.interception import cache_keyword

# Logits are of order 8 and pass through two recurrent layers.  Both sides compute in float32 and differ in
# the order of sums only: state sums of 32 to 44 terms and matrix products of 32 to 64 terms, each a
# relative 2^-24 * sqrt(64) = 5e-7 in the worst case, on 8: 4e-6 a layer; replay over a window re-associates
# once more.  Both layers and both effects: 2e-5.
SAME = 2e-5

EACH = pytest.mark.parametrize(
    "kind", ["mamba2", pytest.param("gated_delta", marks=pytest.mark.slow)], indirect=True
)
"""For what does not look at the family: one in the fast tier."""


def new_cache(model):
    return DynamicCache(config=model.config)


@torch.no_grad()
def forward(model, ids, cache, **options):
    """Logits (B, T, vocabulary) of T tokens on top of ``cache``."""
    return model(ids, **{cache_keyword(model): cache, "use_cache": True}, **options).logits


def step_by_step(model, ids, cache):
    """Logits (B, T, vocabulary), one forward a token."""
    return torch.cat([forward(model, ids[:, t : t + 1], cache) for t in range(ids.shape[1])], 1)
