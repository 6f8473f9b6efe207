"""``quantlab formats``: the table, every format explained and tried, the API's own numbers behind every one shown."""

import contextlib
import io
import json
import math
import re
import sys

import pytest
import torch
from typer.testing import CliRunner

from quantlab.cli import app
from quantlab.cli_formats import _words
from quantlab.errors import InputError
from quantlab.formats import parse, random_words
from quantlab.formats.describe import describe
from quantlab.formats.recipes import profiles_of
from quantlab.formats.table import FORMATS
from quantlab.terminal import print_sections, print_table

NUMBERS = [0.1, -0.3, 3.0, 0.0, -5.5, 1e-6, 7.0]
ALL = [
    text for row in FORMATS.values() for text in (row.name, *(f"{row.name}+as.{p}" for p in profiles_of(row)))
]
TEXTS = [
    *ALL,
    "nvfp4:none+as.torchao",
    "nvfp4+4over6",
    "nvfp4+as.te+4over6",
    "int8+ef",
    "mxfp4+hadamard.3",
    "nvfp4+mean",
    "int8+rank1",
    "nvfp4+keyscale",
]
TEXTS += ["fp16+sr13", "nvfp4+sr8", "int8+sr", "e4m3+rz", "int4+ef.int8"]


def formats(*arguments, stdin=None):
    """Exit status and output of the command, in this process."""
    done = CliRunner().invoke(app, ["formats", *map(str, arguments)], input=stdin)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def shown(*arguments, stdin=None):
    status, output = formats(*arguments, stdin=stdin)
    assert status == 0, output
    return output


def test_the_table_has_a_row_a_format_and_constants_in_full():
    output = shown()
    for name in FORMATS:
        assert f" {name} " in output
    assert " 65504 " in output
    assert " 57344 " in output
    assert "e+04" not in output
    rows = [json.loads(line) for line in shown("--json").splitlines()]
    assert [row["name"] for row in rows] == list(FORMATS)
    fp16 = next(row for row in rows if row["name"] == "fp16")
    assert (fp16["max"], fp16["layout"], fp16["scale"]) == (65504.0, "1-5-10", "-")
    assert shown("--markdown").startswith("| format |")


@pytest.mark.parametrize("text", TEXTS)
def test_explain_prints_every_section(text):
    output = shown("explain", text)
    for section in describe(text):
        assert f"{section.title}\n" in output
        for label, words in section.lines:
            assert f"  {label}" in output
            assert words.split()[0] in output


@pytest.mark.parametrize("text", ["fp32", "int8+ef", "nvfp4+as.te+4over6"])
def test_explain_as_json(text):
    expected = {section.title: [list(line) for line in section.lines] for section in describe(text)}
    assert json.loads(shown("explain", text, "--json")) == expected


def test_explain_counts_the_bits_of_the_shape():
    output = shown("explain", "nvfp4", "--shape", "2,20")
    # 20 codes fill two blocks of 16 in each of two rows: 4 scales, 24 codes of padding, one global scale.
    bits = 2 * 32 * 4 + 4 * 8 + 32
    assert re.search(rf"total +{bits / 40:g} \({bits // 8} bytes\)", output)
    assert "Bits per value at 2 x 20" in output


def unfold(values):
    """Nested lists with the text of NaN and Inf turned back into numbers."""
    return [unfold(v) if isinstance(v, list) else float(v) for v in values]


def same(found, expected):
    assert torch.equal(
        torch.tensor(unfold(found)).nan_to_num(nan=-999.0), expected.float().nan_to_num(nan=-999.0)
    )


@pytest.mark.parametrize("text", TEXTS)
def test_try_shows_what_the_api_gives(text):
    fmt, x = parse(text), torch.tensor([NUMBERS])
    words = None
    if fmt.stochastic:
        zero = torch.zeros(1, dtype=torch.int64)
        words = random_words((1, 1, 1, len(NUMBERS)), 7, zero, zero, 0, 0)[0, 0]
    encoded = fmt.quantize(x, words)
    found = json.loads(shown("try", text, *NUMBERS, "--seed", 7, "--json"))
    assert found["format"] == fmt.text
    same(found["codes"], encoded.codes)
    same(found["values"], fmt.dequantize(encoded))
    same(found["errors"], fmt.dequantize(encoded).double() - x.double())
    assert found.get("random_words") == (None if words is None else words.tolist())
    if encoded.scales is not None:
        same(found["stored_scales"], encoded.scales)
    if encoded.key_scales is not None:
        assert found["key_scales"] == [[2.0 ** (e - 127) for e in encoded.key_scales[0].tolist()]]
    for part in ("key_factor", "value_factor"):
        tensor = getattr(encoded, part)
        assert (part in found) == (tensor is not None)
        if tensor is not None:
            same(found[part], tensor.float())
    packed = fmt.pack(encoded)
    assert found["packed_codes"] == [bytes(row.tolist()).hex() for row in packed.codes]
    assert found["bytes"] == packed.nbytes


@pytest.mark.parametrize(
    "text",
    ["fp32", "fp16+sr13", "int8+ef", "mxfp4+as.modelopt", "nvfp4:none", "nvfp4+keyscale+rank1+hadamard+sr8"],
)
def test_try_prints_a_line_for_every_number(text):
    output = shown("try", text, *NUMBERS)
    assert output.startswith(f"{text}\n")
    assert output.count("│\n") == len(NUMBERS)
    packed = json.loads(shown("try", text, *NUMBERS, "--json"))
    assert f"bytes stored  {packed['bytes']}\n" in output


def test_try_prints_codes_numbers_and_errors():
    output = shown("try", "nvfp4", 6, "/", -0.5, "0x1.8p-1")
    cells = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in output.splitlines()
        if line.startswith("│")
    ]
    # The global scale is 6 / 2688; the second block's scale 0.75 / 6 / global = 56.
    assert cells == [
        ["0", "6", "0x7", "6", "6", "0"],
        ["1", "-0.5", "0xe", "-4", "-0.5", "0"],
        ["1", "0.75", "0x7", "6", "0.75", "0"],
    ]
    assert "scales        448 (0x7e), 56 (0x66)" in output
    assert "codes packed  07 00 00 00 00 00 00 00 7e 00" in output


def test_try_takes_numbers_from_files_streams_and_rows(tmp_path):
    file = tmp_path / "numbers.txt"
    file.write_text("1, -2\n3")
    values = [json.loads(out)["x"] for out in (
        shown("try", "int8", "--file", file, "-4", "--json"),
        shown("try", "int8", "-", "-4", "--json", stdin="1 -2, 3\n"),
        shown("try", "int8", "1", "-2", "3", "-4.0e0", "--json"),
    )]  # fmt: skip
    assert values == [[[1, -2, 3, -4]]] * 3
    rows = json.loads(shown("try", "int8", 1, 2, 3, 4, "--key-dim", 2, "--json"))
    assert [len(rows["scales"]), rows["scales"][0] == rows["scales"][1]] == [2, False]


def test_the_dtype_that_holds_a_number_is_chosen():
    # 1.0625 * (1 + 2^-12) is above the tie of 1 and 1.125; in bfloat16 it is the tie, which goes to 1.
    number = 1.0625 * (1 + 2**-12)
    assert json.loads(shown("try", "e4m3", number, "--json"))["values"] == [[1.125]]
    assert json.loads(shown("try", "e4m3", number, "--dtype", "bfloat16", "--json"))["values"] == [[1.0]]


def test_specials_are_refused_or_stored():
    with pytest.raises(InputError, match="nvfp4"):
        shown("try", "nvfp4", "nan", "1")
    found = json.loads(shown("try", "nvfp4", "NaN", "1", "-inf", "--specials", "hardware", "--json"))
    assert found["codes"] == [[7, 0, 15]]
    assert json.loads(shown("try", "fp16", "nan", "-inf", "--json"))["values"] == [["nan", "-inf"]]
    assert math.isnan(float(json.loads(shown("try", "fp16", "nan", "--json"))["errors"][0][0]))


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ("explain nvfp5", ["format 'nvfp5'", "nearest: nvfp4"]),
        ("explain nvfp4+as.nobody", ["nvfp4+as.torchao"]),
        ("explain nvfp4 --shape 1,x", ["shape '1,x'"]),
        ("explain nvfp4 --shape 0,4", ["shape"]),
        ("explain nvfp4 --shape \u0663,4", ["shape"]),
        ("try", ["FORMAT"]),
        ("try nvfp4", ["numbers", "at least one"]),
        ("try nvfp4 1 two", ["number 'two'"]),
        ("try nvfp4 1_0", ["number '1_0'"]),
        ("try nvfp4 \u0663", ["number"]),
        ("try nvfp4 0x", ["number '0x'"]),
        ("try nvfp4 0x1p99999", ["number '0x1p99999'"]),
        ("try nvfp4 --jsno 1", ["number '--jsno'"]),
        ("try fp16 1 / 2", ["number '/'", "no blocks"]),
        ("try e2m1 nan", ["x", "e2m1 can store"]),
        ("try nvfp4 1 --specials never", ["specials 'never'", "hardware"]),
        ("try nvfp4 1 --dtype fp8", ["dtype 'fp8'", "bfloat16"]),
        ("try int8 1 2 3 --key-dim 2", ["numbers", "multiple of key dim 2"]),
        ("try int8 1 --key-dim 0", ["--key-dim"]),
        ("try int8+sr 1 --seed -1", ["--seed"]),
        ("try int8 --file nowhere.txt", ["nowhere.txt"]),
        ("--json explain nvfp4", ["--json"]),
        ("nothing", ["nothing"]),
    ],
)
def test_bad_input_is_one_line_and_status_2(arguments, names, monkeypatch, capsys):
    from quantlab import cli

    monkeypatch.setattr(sys, "argv", ["quantlab", "formats", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    error = capsys.readouterr().err
    for name in names:
        assert name in error
    if error.startswith("error: "):
        assert len(error.splitlines()) == 1


def test_too_many_numbers_are_refused():
    with pytest.raises(InputError, match="65536"):
        shown("try", "int8", "-", stdin="1 " * 65537)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(("columns", "present"), [(140, "shared by"), (80, "scale")])
def test_the_table_fits_the_terminal(columns, present, monkeypatch):
    """On a terminal of that width no line is longer, and rows stay rows."""
    from quantlab import cli

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(sys, "argv", ["quantlab", "formats"])
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    with contextlib.suppress(SystemExit):
        cli.main()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= columns
    assert any("nvfp4" in line and "4.502" in line for line in lines)
    header = next(line for line in lines if "format" in line and "bits" in line)
    assert present in header
    assert ("kind" in header) == (columns == 140)


@pytest.mark.parametrize(("columns", "hidden"), [(60, None), (80, "c, d"), (100, "d"), (140, "")])
def test_the_widest_selection_that_fits_is_shown_and_says_what_it_hides(columns, hidden, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("TERM", "xterm")
    row = {"a": "a" * 30, "b": "b" * 30, "c": "c" * 20, "d": "d" * 20}
    print_table("title", [row], list(row), None, (), ["a", "b", "c"], ["a", "b"])
    text = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
    assert max(map(len, text.splitlines())) <= columns
    if hidden is None:  # a block a row, with everything in it
        assert all(value in text for value in row.values())
        assert "Not shown" not in text
    else:
        assert ("d" * 20 in text) == (hidden == "")
        assert text.rstrip().endswith(f"Not shown for want of width: {hidden}.") == bool(hidden)


@pytest.mark.parametrize("columns", [80, 140])
def test_explanations_fit_the_terminal(columns, monkeypatch):
    """But for words, such as paths, that are longer than the room beside their label."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", str(columns))
    for text in TEXTS:
        print_sections([(section.title, list(section.lines)) for section in describe(text)])
    lines = terminal.getvalue().splitlines()
    assert all(len(line) <= columns or len(line.split()) <= 3 for line in lines)
    assert max(map(len, lines)) > columns - 10


def test_a_number_beyond_float32_warns_of_nothing(recwarn):
    assert "1e+39" in shown("try", "fp64", "1e39", "--dtype", "float64")
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning)]


def test_closed_streams_are_no_traceback(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(InputError, match=r"^number '-': expected an open standard input"):
        _words(["-"], None)
    monkeypatch.setattr(sys, "stdout", None)
    print_sections([("nvfp4", [("scale", "1")])])


def test_a_file_of_windows_may_begin_with_a_mark(tmp_path):
    path = tmp_path / "numbers.txt"
    path.write_bytes(b"\xef\xbb\xbf1 2")
    assert _words([], path) == ["1", "2"]


def test_slashes_alone_are_quoted_in_the_refusal():
    with pytest.raises(InputError, match=r"^numbers '/ /': "):
        formats("try", "nvfp4", "/", "/")
