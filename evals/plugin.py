"""Makes quantlab's model known to lm-eval.  Importing this module registers it, by name only: no model code
is loaded.

The task files name their functions through this module, so that plain ``lm_eval run --model quantlab
--tasks FILE.yaml`` finds the model too: lm-eval resolves a task given by path before it looks the model up.
"""

from pathlib import Path

from quantlab.evals.benchmarks import aime, gsm8k, mmlu_pro
from quantlab.evals.generation_metrics import aime_results, ends, letter_results, number_results, total
from quantlab.evals.gpqa import gpqa
from quantlab.evals.prompts import (
    aime_question,
    choice_question,
    number_question,
    scored_letters,
    scored_question,
)
from quantlab.evals.reference_tasks import arithmetic, state_recall, text

MODEL_NAME = "quantlab"
TASK_FOLDER = Path(__file__).resolve().parent / "tasks"

__all__ = [
    "MODEL_NAME",
    "TASK_FOLDER",
    "aime",
    "aime_question",
    "aime_results",
    "arithmetic",
    "choice_question",
    "ends",
    "gpqa",
    "gsm8k",
    "letter_results",
    "mmlu_pro",
    "number_question",
    "number_results",
    "register",
    "scored_letters",
    "scored_question",
    "state_recall",
    "text",
    "total",
]


def register() -> None:
    """Add the model name "quantlab" to lm-eval's registry; harmless when it is there already."""
    import lm_eval.models  # noqa: F401  lm-eval fills its registry from here only while it is empty, so this comes first
    from lm_eval.api.registry import model_registry

    if MODEL_NAME not in model_registry:
        model_registry.register(MODEL_NAME, target="quantlab.evals.model:QuantlabLM")


register()
