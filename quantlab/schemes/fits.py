"""Which policies a recurrence can use."""

from quantlab.errors import InputError
from quantlab.recurrences import DecayAxis, get_recurrence
from quantlab.schemes.policy import Policy
from quantlab.schemes.sites import parse_sites


def check_policy_fits(policy: Policy, family: str) -> None:
    """Raise InputError if ``policy`` sets an option that ``family`` has no use for."""
    recurrence, options = get_recurrence(family), policy.options
    sites = parse_sites(options.sites)
    if not recurrence.delta_rule:
        given = {
            "contents=": options.contents is not None,
            "key_read=": options.key_read != "copy",
            "sites=beta": "beta" in sites,
        }
        for key, refused in given.items():
            if refused:
                expected = f"{key} with a delta rule only (gated_delta, kimi_delta): {family} has none"
                raise InputError("policy", str(policy), expected)
    if recurrence.axis is DecayAxis.ELEMENT:
        given = {
            "dot=": options.dot != "ieee",
            "sites=dot": "dot" in sites,
            "sites=decay": "decay" in sites,
        }
        for key, refused in given.items():
            if refused:
                expected = f"no {key} with {family}: every element decays by itself, record by record"
                raise InputError("policy", str(policy), expected)
