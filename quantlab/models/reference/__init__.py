"""Small trained reference models, shipped with the package: precision has something to break in them.

Each is a folder that ``AutoModelForCausalLM.from_pretrained`` of stock transformers loads, with a tokenizer and a card
that says what it was trained on and how long its heads remember (``experiments/reference_models`` made them).
"""

from pathlib import Path

from quantlab.errors import unknown_name

PREFIX = "reference:"
_FOLDER = Path(__file__).resolve().parent


def reference_models() -> tuple[str, ...]:
    """Names of the models that are there."""
    return tuple(sorted(path.parent.name for path in _FOLDER.glob("*/config.json")))


def reference_folder(name: str) -> Path:
    """The folder of the model ``name``, with or without "reference:" in front.  Raises InputError for another name."""
    known = reference_models()
    plain = name.removeprefix(PREFIX)
    if plain not in known:
        raise unknown_name("model", name, [PREFIX + model for model in known])
    return _FOLDER / plain
