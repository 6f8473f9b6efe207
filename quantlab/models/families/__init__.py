"""How each family of model ops hands its tensors to a decode state: one file a family.

transformers calls its recurrent ops as module globals, with the same names in every model of a family, so
an adapter per family serves all of them.  To add a family: one file with a ``Family``, one line in
``FAMILIES``.  To add a model: nothing, unless it brings new op names.
"""

from quantlab.models.families import gated_delta, mamba2
from quantlab.models.families.base import Family, OpCall

FAMILIES: list[Family] = [mamba2.FAMILY, gated_delta.FAMILY]

# Recurrent ops that we know of and cannot serve yet: meeting one is an error, never a layer left in full
# precision.
UNSUPPORTED_OPS: dict[str, str] = {
    "recurrent_kimi_delta_attention": "kimi_delta",
    "chunk_kimi_delta_attention": "kimi_delta",
    "mamba_selective_state_update": "mamba1",
}

__all__ = ["FAMILIES", "UNSUPPORTED_OPS", "Family", "OpCall"]
