"""The policy text: everything that decides which bits of the decode state are stored when.

    policy  := store ["/" store] "@" window (":" key "=" value)*
    store   := name [":" granularity] ("+" modifier)*

``fp32@1`` rewrites an FP32 state each token; ``fp32@16`` keeps a checkpoint and a window of 16 inputs;
``fp32/nvfp4@16`` lets a 4-bit read copy of the checkpoint serve the reads.  After "@" every ":" starts an option.
"""

from dataclasses import dataclass, field, fields

from quantlab import formats
from quantlab.errors import InputError, unknown_name
from quantlab.formats import Format

MAXIMUM_WINDOW = 65536  # the window's memory is taken at once; beyond this a typing error, not a study
EXAMPLE = "checkpoint[/read copy]@window[:key=value], for example fp32/nvfp4@16"


@dataclass(frozen=True)
class Options:
    """The keys after the window.  The first value of each is the default; ``None`` follows the family."""

    buffer: str = field(default="fp32", metadata={"values": ("fp32", "bf16", "fp16"), "later": ("hilo",)})
    contents: str | None = field(default=None, metadata={"values": ("raw", "derived"), "later": ()})
    key_read: str = field(default="copy", metadata={"values": ("copy", "checkpoint"), "later": ()})
    flush_read: str = field(default="exact", metadata={"values": ("exact", "copy"), "later": ()})
    current: str = field(default="exact", metadata={"values": ("exact",), "later": ("buffer",)})
    flush: str = field(default="full", metadata={"values": ("full",), "later": ("early",)})
    schedule: str = field(
        default="flush", metadata={"values": ("flush",), "later": ("step", "chunk", "turn")}
    )
    dot: str = field(default="ieee", metadata={"values": ("ieee",), "later": ("tf32", "tf32x3", "bf16")})
    ef_read: str = field(default="exclude", metadata={"values": ("exclude",), "later": ("include",)})
    sites: str = field(default="", metadata={"values": ("",), "later": None})


@dataclass(frozen=True)
class Policy:
    """A parsed policy.  ``str(policy)`` is canonical: aliases resolved, defaults dropped.

    checkpoint: the stored state that drives the recurrence.  read_copy: the copy that serves reads, or None.
    window: how many tokens pass between two stores of the checkpoint (1 = every token).
    """

    checkpoint: Format
    read_copy: Format | None
    window: int
    options: Options = Options()

    def __str__(self) -> str:
        stores = self.checkpoint.text + (f"/{self.read_copy.text}" if self.read_copy else "")
        keys = [
            f":{f.name}={value}"
            for f in fields(Options)
            if (value := getattr(self.options, f.name)) != f.default
        ]
        return f"{stores}@{self.window}{''.join(keys)}"

    @property
    def file_name(self) -> str:
        """The canonical text as a file name: "/" becomes "--" and ":" becomes "~"."""
        return str(self).replace("/", "--").replace(":", "~")


def parse_policy(text: "str | Policy") -> Policy:
    """Parse policy text.  Raises InputError (argument "policy") that says what was expected."""
    if isinstance(text, Policy):
        return text
    if not isinstance(text, str) or text.count("@") != 1:
        raise InputError("policy", text, EXAMPLE)
    stores, _, rest = text.partition("@")
    window_text, *option_texts = rest.split(":")
    names = stores.split("/")
    if len(names) > 2 or not all(names):
        raise InputError("policy", text, f"one store or checkpoint/read copy before '@': {EXAMPLE}")
    parsed = [_parse_store(name, text) for name in names]
    policy = Policy(
        checkpoint=parsed[0],
        read_copy=parsed[1] if len(parsed) == 2 else None,
        window=_parse_window(window_text, text),
        options=_parse_options(option_texts, text),
    )
    _check(policy, text)
    return policy


def _parse_store(name: str, text: str) -> Format:
    try:
        return formats.parse(name)
    except InputError as error:
        raise InputError("policy", text, f"a known store, but {error}") from None


def _parse_window(window: str, text: str) -> int:
    # Length first: Python refuses to read a number of thousands of digits.
    short = window.isascii() and window.isdigit() and len(window) <= len(str(MAXIMUM_WINDOW))
    if short and 1 <= int(window) <= MAXIMUM_WINDOW:
        return int(window)
    raise InputError(
        "policy", text, f"a window of at least 1 and at most {MAXIMUM_WINDOW} after '@', not {window!r}"
    )


def _parse_options(texts: list[str], text: str) -> Options:
    known = {f.name: f for f in fields(Options)}
    chosen: dict[str, str] = {}
    for option in texts:
        key, equals, value = option.partition("=")
        if not equals:
            raise InputError("policy", text, f"key=value after the window, not {option!r}")
        if key not in known:
            raise InputError("policy", text, f"a known option, but {unknown_name('option', key, known)}")
        if key in chosen:
            raise InputError("policy", text, f"each option once, but {key!r} is given twice")
        values, later = known[key].metadata["values"], known[key].metadata["later"]
        if later is None or value in later:
            raise InputError("policy", text, f"an option that is built: {key}={value} is not built yet")
        if value not in values:
            raise InputError("policy", text, f"{key} as one of {', '.join(values + later)}")
        chosen[key] = value
    return Options(**chosen)


def _check(policy: Policy, text: str) -> None:
    """Refuse combinations in which a part of the policy would never be used."""
    options = policy.options
    if "tensor" in (policy.checkpoint.granularity, policy.read_copy and policy.read_copy.granularity):
        expected = "a scale of one sequence: with :tensor every row of the batch would depend on the others"
        raise InputError("policy", text, expected)
    if policy.read_copy is None:
        for key in ("key_read", "flush_read"):
            if getattr(options, key) != Options.__dataclass_fields__[key].default:
                raise InputError("policy", text, f"a read copy (checkpoint/copy@window) for {key}=")
    elif policy.read_copy.error_feedback:
        raise InputError(
            "policy", text, "error feedback on the checkpoint only: a read copy is a function of it"
        )
    elif policy.window == 1 and options.flush_read == "exact":
        raise InputError(
            "policy",
            text,
            "a window above 1 or flush_read=copy: with window 1 every step is a flush, so the copy is not exercised",
        )
    if policy.window == 1 and (options.buffer != "fp32" or options.contents is not None):
        raise InputError("policy", text, "a window above 1 for buffer= or contents=: window 1 has no buffer")
