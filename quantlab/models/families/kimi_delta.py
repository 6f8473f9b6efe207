"""Kimi delta attention: the arguments of the gated delta rule, with one log decay a key channel, g (B, T, H, K)."""

from dataclasses import replace

from quantlab.models.families import gated_delta

FAMILY = replace(
    gated_delta.FAMILY,
    recurrence="kimi_delta",
    step_op="recurrent_kimi_delta_attention",
    prefill_op="chunk_kimi_delta_attention",
)
