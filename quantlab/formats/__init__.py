"""What a stored number is: ``parse(text)`` gives a Format that quantizes, dequantizes and counts its bits."""

from quantlab.formats.format import Format
from quantlab.formats.grammar import parse
from quantlab.formats.packing import pack_bits, pack_nibbles, unpack_bits, unpack_nibbles
from quantlab.formats.random import philox_4x32, random_words, words_at
from quantlab.formats.rows import format_markdown, format_rows
from quantlab.formats.sharing import pack_shared, shared_random_bits
from quantlab.formats.storage import Encoded, Packed

__all__ = [
    "Encoded",
    "Format",
    "Packed",
    "format_markdown",
    "format_rows",
    "pack_bits",
    "pack_nibbles",
    "pack_shared",
    "parse",
    "philox_4x32",
    "random_words",
    "shared_random_bits",
    "unpack_bits",
    "unpack_nibbles",
    "words_at",
]
