"""What is stored between tokens: the policy, and the decode state that obeys it."""

from quantlab.schemes.files import load_decode_state, save_decode_state
from quantlab.schemes.fits import check_policy_fits
from quantlab.schemes.head_groups import HeadGroups
from quantlab.schemes.layers import LayerState, start_groups, start_layer
from quantlab.schemes.ledger import ByteLedger, StateShape, add_ledgers
from quantlab.schemes.policy import Options, Policy, parse_policy
from quantlab.schemes.rules import HeadGroup, PolicyRules, Rule, parse_rules
from quantlab.schemes.sites import SITES
from quantlab.schemes.slots import SlotPool
from quantlab.schemes.state import DecodeState, start
from quantlab.schemes.store import Diverged

__all__ = [
    "SITES",
    "ByteLedger",
    "DecodeState",
    "Diverged",
    "HeadGroup",
    "HeadGroups",
    "LayerState",
    "Options",
    "Policy",
    "PolicyRules",
    "Rule",
    "SlotPool",
    "StateShape",
    "add_ledgers",
    "check_policy_fits",
    "load_decode_state",
    "parse_policy",
    "parse_rules",
    "save_decode_state",
    "start",
    "start_groups",
    "start_layer",
]
