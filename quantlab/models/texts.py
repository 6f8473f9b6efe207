"""A model's folder and a text file, as verbs take them: tokens, weights, and hashes that name both."""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quantlab.errors import InputError

_CHUNK = 2**24
_NO_WEIGHTS = (".md", ".py", ".png")  # beside the model in most folders, and no part of it


@dataclass(frozen=True)
class TextSource:
    """Where tokens come from.

    ids: (sequences, tokens), consecutive pieces of the text.  about: names and hashes of model and text, no word of it.
    """

    folder: Path
    ids: Tensor
    about: dict[str, str]


def read_text_source(
    folder: str | Path, text: str | Path, *, sequences: int, tokens: int, needed: str, name: str | None = None
) -> TextSource:
    """The first ``sequences`` x ``tokens`` tokens of a UTF-8 file, as the tokenizer in ``folder`` reads it.

    name: of the model in records (default: the folder's).  Raises InputError for a file that cannot be read, one with
    too few tokens (``needed`` says what for), and a folder without a tokenizer.
    """
    folder, text = Path(folder), Path(text)
    try:
        data = text.read_bytes()
        content = data.decode("utf-8")
    except OSError as error:
        raise InputError("text", str(text), f"a text file that can be read ({error.strerror})") from None
    except UnicodeDecodeError as error:
        raise InputError("text", str(text), f"UTF-8 text, but byte {error.start} is not") from None
    ids = _tokens(folder, content)
    count = sequences * tokens
    if len(ids) < count:
        raise InputError("text", str(text), f"at least {count} tokens, {needed}; it has {len(ids)}")
    about = {
        "model": name or folder.resolve().name,
        "model_hash": folder_hash(folder),
        "text_hash": hashlib.sha256(data).hexdigest()[:16],
    }
    return TextSource(folder, torch.tensor(ids[:count]).view(sequences, tokens), about)


def _tokens(folder: Path, content: str) -> list[int]:
    import transformers

    try:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        return tokenizer(content)["input_ids"]
    except Exception as error:  # whatever a broken file raises inside the library
        raise InputError("model", str(folder), f"a readable tokenizer ({error})") from error


def quiet_transformers() -> None:
    """No bars and no hints of transformers between the lines of a verb."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def load_weights(folder: str | Path) -> Any:
    """The causal language model in ``folder``, on the CPU.  InputError if there is none."""
    import transformers

    try:
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise InputError("model", str(folder), f"a causal language model ({error})") from error
    return model.eval()


def folder_hash(folder: str | Path) -> str:
    """16 hex digits over names and contents of the model's files: weights, configuration, tokenizer."""
    digest = hashlib.sha256()
    for path in sorted(Path(folder).iterdir()):
        if not path.is_file() or path.name.startswith(".") or path.suffix in _NO_WEIGHTS:
            continue
        digest.update(f"{path.name} {path.stat().st_size} ".encode())
        with path.open("rb") as file:
            while part := file.read(_CHUNK):
                digest.update(part)
    return digest.hexdigest()[:16]
