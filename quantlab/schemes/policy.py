"""The policy text: everything that decides which bits of the decode state are stored when.

    policy  := store ["/" store] "@" window (":" key "=" value)*
    store   := name [":" granularity] ("+" modifier)*

``fp32@1`` rewrites an FP32 state each token; ``fp32@16`` keeps a checkpoint and a window of 16 inputs;
``fp32/nvfp4@16`` lets a 4-bit read copy of the checkpoint serve the reads.  After "@" every ":" starts an option.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache

from quantlab import formats
from quantlab.errors import InputError, unknown_name
from quantlab.formats import Format
from quantlab.schemes.sites import canonical_sites, parse_sites

MAXIMUM_WINDOW = 65536  # the window's memory is taken at once; beyond this a typing error, not a study
EXAMPLE = "checkpoint[/read copy]@window[:key=value], for example fp32/nvfp4@16"


@dataclass(frozen=True)
class Options:
    """The keys after the window.  The first value of each is the default; ``None`` follows the family.

    buffer: format of k, d and v in the window; hilo keeps each as a bfloat16 and the bfloat16 of the rest.
    contents (delta rules): raw inputs, from which a flush re-derives d, or the derived d alone.
    key_read, flush_read: which copy serves S k, and the read of a flush step (exact: the unrounded fold).
    current: whether the current token is used exactly or as the buffer will hold it.
    flush: full folds the token that fills the window with it; early folds the history alone, before a forward of T
    tokens that finds cursor + 2 T > window, so that a rejected draft is never folded.
    schedule: when the checkpoint's format is applied.  flush: at each fold.  step: after every token, by a replay that
    keeps per-token rounding.  chunk: at the end of prefill chunks and at explicit flushes.  turn: at explicit flushes
    alone (end of a turn, prefix snapshot).
    dot: rounding of the operands of the fold's matrix product.  ef_read: whether reads see decode + residual.
    sites: extra rounding sites (``quantlab.schemes.sites``).
    """

    buffer: str = field(default="fp32", metadata={"values": ("fp32", "bf16", "fp16", "hilo")})
    contents: str | None = field(default=None, metadata={"values": ("raw", "derived")})
    key_read: str = field(default="copy", metadata={"values": ("copy", "checkpoint")})
    flush_read: str = field(default="exact", metadata={"values": ("exact", "copy")})
    current: str = field(default="exact", metadata={"values": ("exact", "buffer")})
    flush: str = field(default="full", metadata={"values": ("full", "early")})
    schedule: str = field(default="flush", metadata={"values": ("flush", "step", "chunk", "turn")})
    dot: str = field(default="ieee", metadata={"values": ("ieee", "tf32", "tf32x3", "bf16")})
    ef_read: str = field(default="exclude", metadata={"values": ("exclude", "include")})
    sites: str = field(default="", metadata={"values": None})


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


def effective_text(policy: Policy, *, delta_rule: bool) -> str:
    """The policy with every default that it has a use for written out."""
    options, keys = policy.options, []
    if policy.window > 1:
        keys += ["buffer", "current", "flush", "dot"] + (["contents"] if delta_rule else [])
    if policy.read_copy is not None:
        keys += ["flush_read"] + (["key_read"] if delta_rule else [])
    if policy.checkpoint.rounded:
        keys.append("schedule")
    if policy.checkpoint.error_feedback and policy.read_copy is None:
        keys.append("ef_read")
    values = {f.name: getattr(options, f.name) for f in fields(Options)}
    values["contents"] = options.contents or "raw"
    keys += ["sites"] if options.sites else []
    return ":".join(
        [str(replace(policy, options=Options())), *(f"{k}={values[k]}" for k in values if k in keys)]
    )


def parse_policy(text: "str | Policy") -> Policy:
    """Parse policy text.  Raises InputError (argument "policy") that says what was expected."""
    if isinstance(text, Policy):
        return text
    if isinstance(text, str) and text.lower().endswith(".toml"):
        raise InputError(
            "policy", text, f"one policy for all layers and heads here, not a file of rules: {EXAMPLE}"
        )
    if not isinstance(text, str) or text.count("@") != 1:
        raise InputError("policy", text, EXAMPLE)
    return _parse(text)


@lru_cache(maxsize=1024)
def _parse(text: str) -> Policy:
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
        values = known[key].metadata["values"]
        if values is None:
            value = _canonical_sites(value, text)
        elif value not in values:
            raise InputError("policy", text, f"{key} as one of {', '.join(values)}")
        chosen[key] = value
    return Options(**chosen)


def _canonical_sites(value: str, text: str) -> str:
    if not value:
        raise InputError("policy", text, "at least one site after sites=")
    try:
        return canonical_sites(value)
    except InputError as error:
        raise InputError("policy", text, f"known sites, but {error}") from None


def _check(policy: Policy, text: str) -> None:
    """Refuse combinations in which a part of the policy would never be used."""
    for refused, expected in _refusals(policy):
        if refused:
            raise InputError("policy", text, expected)


def _refusals(policy: Policy) -> Iterator[tuple[bool, str]]:
    """(whether this holds, what was expected instead), one for each way in which parts do not go together."""
    options, copy, one = policy.options, policy.read_copy, policy.window == 1
    sites = parse_sites(options.sites)
    yield (
        "tensor" in (policy.checkpoint.granularity, copy and copy.granularity),
        "a scale of one sequence: with :tensor every row of the batch would depend on the others",
    )
    for key in ("key_read", "flush_read"):
        set_without_copy = copy is None and getattr(options, key) != Options.__dataclass_fields__[key].default
        yield set_without_copy, f"a read copy (checkpoint/copy@window) for {key}="
    if copy is not None:
        yield (
            bool(copy.error_feedback),
            "error feedback on the checkpoint only: a read copy is a function of it",
        )
        yield (
            one and options.flush_read == "exact",
            "a window above 1 or flush_read=copy: with window 1 every step is a flush, so the copy is not exercised",
        )
    buffered = {
        "buffer=": options.buffer != "fp32",
        "contents=": options.contents is not None,
        "current=": options.current != "exact",
        "sites=buffer": "buffer" in sites,
    }
    named = [key for key, given in buffered.items() if given]
    yield one and bool(named), f"a window above 1 for {' and '.join(named)}: window 1 has no buffer"
    yield (
        options.current == "buffer" and options.buffer == "fp32" and "buffer" not in sites,
        "buffer= of a narrower format for current=buffer, which rounds the current token to it",
    )
    yield (
        one and options.flush == "early",
        "a window above 1 for flush=early: it keeps the current token in it",
    )
    yield options.dot != "ieee" and "dot" in sites, "dot= or sites=dot, not both"
    yield (
        one and (options.dot != "ieee" or "dot" in sites),
        "a window above 1 for dot: with window 1 a token is added without a matrix product",
    )
    yield (
        options.schedule != "flush" and not policy.checkpoint.rounded,
        "a rounded checkpoint for schedule=: it says when the rounding takes place",
    )
    step = options.schedule == "step"
    yield step and one, "a window above 1 for schedule=step: with window 1 every token is stored anyhow"
    yield (
        step and copy is not None,
        "no read copy with schedule=step: no checkpoint is stored between flushes",
    )
    yield (
        step and (options.contents == "derived" or options.flush == "early"),
        "contents=raw and flush=full with schedule=step: its replay runs the recurrence on the inputs",
    )
    yield (
        options.ef_read == "include" and (copy is not None or not policy.checkpoint.error_feedback),
        "error feedback and no read copy for ef_read=include: reads then see checkpoint + residual",
    )
