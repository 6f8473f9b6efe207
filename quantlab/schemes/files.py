"""Decode states as files: safetensors, written whole or not at all."""

from pathlib import Path

from quantlab.errors import InputError
from quantlab.schemes.layers import LayerState, restore_layer


def save_decode_state(state: LayerState, path: str | Path) -> None:
    """Write ``state.save()`` as a safetensors file: to a temporary name in the same folder, then renamed.

    Raises InputError for a place that cannot be written to (nothing is left there) and, as ``save`` does, while drafts
    are pending.
    """
    from safetensors.torch import save

    from quantlab.records import write_atomic

    data = save({name: value.contiguous() for name, value in state.save().items()})
    try:
        write_atomic(path, data)
    except OSError as error:
        raise InputError("path", str(path), f"a place that can be written to ({error.strerror})") from error


def load_decode_state(path: str | Path) -> LayerState:
    """The state that ``save_decode_state`` wrote; it continues bit for bit.  Raises InputError for any other file."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        saved = load(Path(path).read_bytes())
    except (OSError, SafetensorError) as error:
        raise InputError("path", str(path), f"a file of save_decode_state: {error}") from None
    return restore_layer(saved)
