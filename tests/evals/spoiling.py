"""Logits of one policy, altered at one token."""

from quantlab.models.forwards import CachedForward
from quantlab.models.policy_decoder import PolicyDecoder


def spoil(monkeypatch, rules, step, change):
    """Let ``change`` alter the logits of the decoder of ``rules`` behind its step-th token."""
    read = CachedForward.__call__

    def broken(self, tokens):
        logits = read(self, tokens)
        return change(logits) if self is decoder._forward and self.length == step else logits

    decoder = None
    begin = PolicyDecoder.begin

    def seen(self, ids):
        nonlocal decoder
        if self.rules.text == rules:
            decoder = self
        begin(self, ids)

    monkeypatch.setattr(PolicyDecoder, "begin", seen)
    monkeypatch.setattr(CachedForward, "__call__", broken)
