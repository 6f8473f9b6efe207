"""Load a model that decodes under a policy for as long as it lives."""

import weakref
from pathlib import Path
from typing import Any

import torch

from quantlab.errors import InputError
from quantlab.models.interception import Interception
from quantlab.models.reference import PREFIX, reference_folder
from quantlab.schemes import Policy, PolicyRules, parse_rules
from quantlab.schemes.rows import DRAFTS


def load(
    path: str | Path,
    policy: str | Path | Policy | PolicyRules,
    *,
    dtype: torch.dtype | str | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    drafts: int = DRAFTS,
) -> Any:
    """The causal language model in ``path`` (a folder, "reference:NAME", or a name on the hub), under ``policy``.

    As within ``run_with_policy``, until ``model.quantlab_close()`` or until the model is gone; no other block can be
    entered before.  ``model.quantlab_report`` is the report, ``model.quantlab_interception`` the ``Interception`` (its
    ``require_effect`` checks that every decode step went through the policy).  dtype: of the weights (default: as they
    are stored).  device: where they go (default: the CPU).

    Raises InputError for a model that cannot be loaded, and as ``run_with_policy`` does.
    """
    from transformers import AutoModelForCausalLM

    if str(path).startswith(PREFIX):
        path = reference_folder(str(path))
    elif str(path).startswith("builtin:"):
        expected = "a folder or a name on the hub; quantlab.models.build_tiny makes folders of tiny models"
        raise InputError("path", str(path), expected)
    if Path(path).is_absolute() and not Path(path).is_dir():
        raise InputError("path", str(path), "a folder with a Hugging Face model, or a name on the hub")
    rules = parse_rules(policy)  # a mistake in it shows before the weights are read
    options = {} if dtype is None else {"dtype": dtype}
    if (
        isinstance(dtype, str)
        and dtype != "auto"
        and not isinstance(getattr(torch, dtype, None), torch.dtype)
    ):
        raise InputError("dtype", dtype, "a dtype of torch, such as bfloat16")
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(str(path), **options)
    except Exception as error:  # whatever a broken file raises inside the library
        raise InputError("path", str(path), f"a causal language model: {error}") from error
    if device is not None:
        try:
            model.to(device)
        except (RuntimeError, AssertionError, TypeError) as error:
            raise InputError("device", str(device), f"a device with room for the model: {error}") from error
    model.eval()
    interception = Interception(model, rules, seed=seed, drafts=drafts)
    interception.__enter__()
    close = weakref.finalize(model, interception.__exit__)
    close.atexit = False
    model.quantlab_interception, model.quantlab_report = interception, interception.report
    model.quantlab_close = close
    return model
