"""``quantlab formats``: the table of formats, one format explained, a few numbers tried."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from quantlab.errors import InputError
from quantlab.terminal import print_json, print_sections, print_table

if TYPE_CHECKING:
    from quantlab.formats import Format
    from quantlab.formats.tryout import Tryout

MOST_VALUES = 65536

formats_app = typer.Typer(
    help="The number formats: a table, one explained, numbers tried.",
    epilog="Examples: [bold]quantlab formats[/bold], [bold]quantlab formats explain nvfp4[/bold], "
    "[bold]quantlab formats try nvfp4+4over6 0.1 -0.3[/bold]",
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="rich",
)
Json = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
FormatText = Annotated[str, typer.Argument(help="Format text, e.g. nvfp4:row+4over6+sr8.", metavar="FORMAT")]

_COLUMNS = {
    "name": "format",
    "kind": "kind",
    "layout": "layout",
    "bits": "bits",
    "max": "largest",
    "min_normal": "min normal",
    "smallest": "smallest",
    "scale": "scale",
    "granularity": "shared by",
}
_NUMBERS = ("bits", "max", "min_normal", "smallest")
_NARROW = ["name", "bits", "max", "min_normal", "smallest", "scale"]


@formats_app.callback(invoke_without_command=True)
def formats(
    context: typer.Context,
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As a Markdown table.")] = False,
) -> None:
    """List the number formats and their constants; explain one; try numbers."""
    if context.invoked_subcommand is not None:
        if as_json or markdown:
            raise InputError(
                "option", "--json" if as_json else "--markdown", f"it behind {context.invoked_subcommand}"
            )
        return
    from quantlab.formats import format_markdown, format_rows
    from quantlab.formats.rows import constant_text

    if markdown:
        typer.echo(format_markdown())
        return
    rows: list[dict[str, Any]] = format_rows()
    if as_json:
        print_json(rows)
        return
    for row in rows:
        row["bits"] = row["bits_per_value"]
        row |= {key: constant_text(row[key]) for key in _NUMBERS} | {
            "granularity": ", ".join(row["granularity"])
        }
    title = "Formats (bits per value of a 128 x 128 head, scales included)"
    print_table(title, rows, list(_COLUMNS), _COLUMNS, _NUMBERS, _NARROW)


@formats_app.command(epilog="Example: [bold]quantlab formats explain nvfp4+as.te+4over6[/bold]")
def explain(
    text: FormatText,
    shape: Annotated[str, typer.Option(help="V,K of the state whose bits are counted.")] = "128,128",
    as_json: Json = False,
) -> None:
    """Say what a format stores, in formulas, and what it does to zeros, NaN, Inf and overflow."""
    from quantlab.formats.describe import describe

    sections = describe(text, _shape(shape))
    if as_json:
        print_json([{section.title: [list(line) for line in section.lines] for section in sections}])
        return
    print_sections([(section.title, list(section.lines)) for section in sections])


@formats_app.command(
    name="try",
    epilog="Example: [bold]quantlab formats try nvfp4 4.8125 / 2.921875 -1e-3[/bold]",
    # Else -0.5 would be taken for an option.
    context_settings={"ignore_unknown_options": True},
)
def try_numbers(
    text: FormatText,
    numbers: Annotated[
        list[str],
        typer.Argument(
            help="Numbers, nan, inf, 0x1.8p-3; / fills a block with zeros; - reads standard input.",
            metavar="NUMBER...",
        ),
    ] = [],  # noqa: B006
    file: Annotated[Path | None, typer.Option(help="Numbers from a text file, before the others.")] = None,
    key_dim: Annotated[
        int | None, typer.Option(help="Values of a row (default: all are one row).", min=1)
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="float32, float64, float16 or bfloat16: what holds the numbers.")
    ] = "float32",
    specials: Annotated[str, typer.Option(help="raise or hardware: what happens to NaN and Inf.")] = "raise",
    seed: Annotated[int, typer.Option(help="Of the words of +sr.", min=0, max=2**63 - 1)] = 0,
    as_json: Json = False,
) -> None:
    """Store a few numbers and show scales, codes, decoded values, errors and packed bytes."""
    import torch

    from quantlab.formats import parse
    from quantlab.formats.tryout import try_format

    fmt = parse(text)
    dtypes = {
        str(d).removeprefix("torch."): d
        for d in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    }
    if dtype not in dtypes:
        raise InputError("dtype", dtype, ", ".join(dtypes))
    values, given = _values(fmt, _words(numbers, file))
    width = key_dim or len(values)
    if len(values) % width:
        raise InputError("numbers", f"{len(values)} of them", f"a multiple of key dim {width}")
    x = torch.tensor(values, dtype=torch.float64).to(dtypes[dtype]).view(-1, width)
    tried = try_format(fmt, x, seed, specials)
    if as_json:
        print_json([_as_object(fmt, tried)])
    else:
        _print_tryout(fmt, tried, given)


def _words(numbers: list[str], file: Path | None) -> list[str]:
    words = (
        []
        if file is None
        else file.read_text(encoding="utf-8-sig", errors="replace").replace(",", " ").split()
    )
    if "-" in numbers and sys.stdin is None:
        raise InputError("number", "-", "an open standard input")
    for number in numbers:
        words += (
            sys.stdin.buffer.read().decode("utf-8", "replace").replace(",", " ").split()
            if number == "-"
            else [number]
        )
    return words


def _values(fmt: "Format", words: list[str]) -> tuple[list[float], list[int]]:
    """The values, zeros that fill blocks included, and the places of those that were given."""
    from quantlab.formats.describe import values_per_scale

    values: list[float] = []
    given: list[int] = []
    for word in words:
        if word == "/":
            block = values_per_scale(fmt)
            if block is None:
                raise InputError("number", word, f"a number: {fmt.text} has no blocks along the key dim")
            values += [0.0] * (-len(values) % block)
        else:
            given.append(len(values))
            values.append(_number(word))
        if len(values) > MOST_VALUES:
            raise InputError("numbers", f"more than {MOST_VALUES}", f"at most {MOST_VALUES} numbers")
    if not given:
        raise InputError("numbers", " ".join(words), "at least one number")
    return values, given


def _number(word: str) -> float:
    try:
        if word.isascii() and "_" not in word:
            return float.fromhex(word) if "x" in word.lower() else float(word)
    except (ValueError, OverflowError):
        pass
    raise InputError("number", word, "a number such as -0.5, 1e-3, 0x1.8p-3, nan or inf; / or -")


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(",")) if text.isascii() else ()
    except ValueError:
        raise InputError("shape", text, "positive sizes V,K such as 128,128") from None


def _as_object(fmt: "Format", tried: "Tryout") -> dict[str, Any]:
    """Every tensor of the tryout as nested lists."""
    from quantlab.formats.tryout import parts

    encoded, packed = tried.encoded, tried.packed
    found: dict[str, Any] = {"format": fmt.text, "x": tried.x.tolist(), "codes": encoded.codes.tolist()}
    found |= {
        "elements": tried.elements.tolist(),
        "values": tried.values.tolist(),
        "errors": tried.errors.tolist(),
    }
    if encoded.scales is not None:
        found["stored_scales"] = encoded.scales.tolist()
    found |= {name.replace(" ", "_"): values.tolist() for name, values in parts(fmt, encoded).items()}
    if tried.words is not None:
        found["random_words"] = tried.words.tolist()
    if encoded.residual is not None:
        found["residual"] = _residual(fmt, tried).tolist()
    found["packed_codes"] = [bytes(row.tolist()).hex() for row in packed.codes]
    return found | {"bytes": packed.nbytes}


def _residual(fmt: "Format", tried: "Tryout") -> Any:
    residual = tried.encoded.residual
    return residual if fmt.residual_format is None else fmt.residual_format.dequantize(residual)  # type: ignore


def _print_tryout(fmt: "Format", tried: "Tryout", given: list[int]) -> None:
    from quantlab.formats.describe import code_text, number_text, values_per_scale
    from quantlab.formats.tryout import parts

    encoded, width = tried.encoded, tried.x.shape[-1]
    lines = []
    numbers = parts(fmt, encoded)
    if "global scale" in numbers:
        shared = numbers["global scale"].flatten().tolist()
        lines.append(
            ("global scale" if fmt.profile is None else "global value", " ".join(map(number_text, shared)))
        )
    if encoded.scales is not None:
        stored = encoded.scales.flatten().tolist()
        byte = encoded.scales.element_size() == 1
        shown = [
            f"{number_text(value)} (0x{raw:02x})" if byte else number_text(value)
            for raw, value in zip(stored, numbers["scales"].flatten().tolist(), strict=True)
        ]
        lines.append(("scales" if len(shown) > 1 else "scale", ", ".join(shown)))
    for name in ("key scales", "key factor", "value factor"):
        if name in numbers:
            rows = numbers[name].tolist()
            lines.append((name, " / ".join(" ".join(map(number_text, row)) for row in rows)))
    packed = " / ".join(" ".join(f"{byte:02x}" for byte in row.tolist()) for row in tried.packed.codes)
    lines += [("codes packed", packed), ("bytes stored", str(tried.packed.nbytes))]
    rows = []
    block = values_per_scale(fmt)
    for place in given:
        row, column = divmod(place, width)
        entry: dict[str, Any] = {"row": row, "block": None if block is None else column // block}
        entry["x"] = number_text(tried.x[row, column].item())
        if fmt.rounded:
            entry["code"] = code_text(int(encoded.codes[row, column]), fmt)
            entry["element"] = number_text(tried.elements[row, column].item())
        entry["value"] = number_text(tried.values[row, column].item())
        entry["error"] = f"{tried.errors[row, column].item():.4g}".replace("nan", "NaN").replace("inf", "Inf")
        if tried.words is not None:
            bits = fmt.random_bits or 32
            entry["random bits"] = f"0x{int(tried.words[row, column]) & ((1 << bits) - 1):0{-(-bits // 4)}x}"
        if encoded.residual is not None:
            entry["residual"] = number_text(_residual(fmt, tried)[row, column].item())
        rows.append(entry)
    if tried.x.shape[0] == 1:
        rows = [{key: value for key, value in row.items() if key != "row"} for row in rows]
    if encoded.scales is None or block is None or width <= block:
        rows = [{key: value for key, value in row.items() if key != "block"} for row in rows]
    print_sections([(fmt.text, lines)])
    print_table("", rows, list(rows[0]), right=[key for key in rows[0] if key not in ("code", "random bits")])
