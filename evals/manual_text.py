"""Running text that every Python carries: the manual's topics (``pydoc_data.topics``), in bytes.

A fifth of the topics, chosen by their names, is held out, so that a model trained with one release of Python is never
asked about a topic that it was trained on under another.  Some topics have one text under several names: a text with a
name that is not held out is not.
"""

import functools
import hashlib


@functools.cache
def topics(held_out: bool) -> tuple[str, ...]:
    """The texts of the topics that are held out, or of all others, in the order of their names."""
    from pydoc_data.topics import topics as texts

    others = [texts[name] for name in sorted(texts) if not is_held_out(name)]
    if not held_out:
        return tuple(others)
    known = set(others)
    return tuple(dict.fromkeys(texts[name] for name in sorted(texts) if texts[name] not in known))


def is_held_out(name: str) -> bool:
    """Whether the topic ``name`` is."""
    return hashlib.sha256(name.encode()).digest()[0] % 5 == 0
