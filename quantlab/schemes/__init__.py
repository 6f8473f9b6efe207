"""What is stored between tokens: the policy, and the decode state that obeys it."""

from quantlab.schemes.ledger import ByteLedger, StateShape
from quantlab.schemes.policy import Options, Policy, parse_policy
from quantlab.schemes.state import DecodeState, check_policy_fits, start
from quantlab.schemes.store import Diverged

__all__ = [
    "ByteLedger",
    "DecodeState",
    "Diverged",
    "Options",
    "Policy",
    "StateShape",
    "check_policy_fits",
    "parse_policy",
    "start",
]
