"""Running text that every Python carries: the manual's topics (``pydoc_data.topics``), in bytes.

A fifth of the topics, chosen by their names, is held out, so that a model trained with one release of Python is never
asked about a topic that it was trained on under another.
"""

import functools
import hashlib


@functools.cache
def topics(held_out: bool) -> tuple[str, ...]:
    """The texts of the topics that are held out, or of all others, in the order of their names."""
    from pydoc_data.topics import topics as texts

    return tuple(texts[name] for name in sorted(texts) if is_held_out(name) == held_out)


def is_held_out(name: str) -> bool:
    return hashlib.sha256(name.encode()).digest()[0] % 5 == 0


def fingerprint(held_out: bool) -> str:
    """Of the texts: releases of Python differ in them."""
    return hashlib.sha256("\0".join(topics(held_out)).encode()).hexdigest()[:16]
