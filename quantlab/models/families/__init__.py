"""How each family of model ops hands its tensors to a decode state: one file a family.

transformers calls its recurrent ops as module globals, with the same names in every model of a family, so
an adapter per family serves all of them.  To add a model: nothing, unless it brings new op names.  To add a
family here: one file with a ``Family``, one line in ``FAMILIES``.  To add one from outside: ``register_family``, or the
attribute ``QUANTLAB_FAMILIES``, a tuple of families, in the file that calls the ops.
"""

from types import ModuleType

from quantlab.errors import InputError
from quantlab.models.families import fla, gated_delta, kimi_delta, mamba1, mamba2
from quantlab.models.families.base import Family, OpCall, key_dim_last, key_dim_swapped
from quantlab.recurrences import get_recurrence

FAMILIES: list[Family] = [
    mamba2.FAMILY,
    gated_delta.FAMILY,
    kimi_delta.FAMILY,
    mamba1.FAMILY,
    fla.GATED_DELTA,
    fla.KIMI_DELTA,
]

# Files whose mixers do with the state what no handle can stand: meeting one is an error, never a layer left in full
# precision.
UNSUPPORTED: dict[str, str] = {"modeling_zamba": "it slices its state head by head"}


def register_family(family: Family) -> None:
    """Serve one more family of ops, before any model that calls them is run with a policy.

    Raises InputError if the recurrence is not known, or if another family has one of the two op names.
    """
    check_family(family)
    for known in FAMILIES:
        if known == family:
            return
        taken = {known.step_op, known.prefill_op} & {family.step_op, family.prefill_op}
        if taken:
            raise InputError(
                "family", ", ".join(sorted(taken)), f"op names that {known.recurrence} has not taken"
            )
    FAMILIES.append(family)


def check_family(family: Family) -> None:
    """InputError unless ``family`` is a Family of a known recurrence, with rates where that needs them."""
    if not isinstance(family, Family):
        raise InputError("family", type(family).__name__, "a quantlab.models.families.Family")
    if get_recurrence(family.recurrence).needs_rates != (family.rates is not None):
        raise InputError("family", family.step_op, "rates exactly where the recurrence needs them (mamba1)")


def families_of(file: ModuleType) -> list[Family]:
    """The families whose step op the module ``file`` has as a global: those that it declares itself, then ours."""
    declared = getattr(file, "QUANTLAB_FAMILIES", ())
    if not isinstance(declared, (tuple, list)):
        raise InputError(
            "QUANTLAB_FAMILIES", type(declared).__name__, f"a tuple of families in {file.__name__}"
        )
    for family in declared:
        check_family(family)
        if family.step_op in vars(file) and family.prefill_op not in vars(file):
            raise InputError(
                "family",
                family.prefill_op,
                f"a prefill op that is a global of {file.__name__}, as the step op is",
            )
    taken = {family.step_op for family in declared}
    known = [family for family in FAMILIES if family.step_op not in taken]
    return [family for family in (*declared, *known) if family.step_op in vars(file)]


__all__ = [
    "FAMILIES",
    "UNSUPPORTED",
    "Family",
    "OpCall",
    "families_of",
    "key_dim_last",
    "key_dim_swapped",
    "register_family",
]
