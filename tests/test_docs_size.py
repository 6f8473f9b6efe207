"""docs/size.md tells the truth: its commands are run, and no figure in its text stands without one above it."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quantlab.cli import app

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "size.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```console\n(.*?)\n```", re.DOTALL)
# A number of its own: no part of a name (Mamba-2), of a power (10^6) or of a compound (4-bit).
NUMBER = re.compile(r"(?<![\w.,^@-])\d[\d,]*(?:\.\d+)?%?(?![\w^]|-\w|[.,]\d)")


def commands():
    for block in BLOCK.findall(PAGE):
        command, _, output = block.removeprefix("$ ").partition("\n")
        yield pytest.param(command, output, id=command)


@pytest.mark.parametrize(("command", "output"), list(commands()))
def test_the_command_prints_what_the_page_shows(command, output):
    program, *arguments = shlex.split(command)
    assert (program, arguments[0]) == ("quantlab", "size")
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert [line.rstrip() for line in done.output.strip("\n").splitlines()] == output.splitlines()


def test_every_number_of_the_text_is_printed_above_it():
    pieces = BLOCK.split(PAGE)  # text, block, text, ...
    above, found = "", 0
    for index, piece in enumerate(pieces):
        if index % 2:
            above += " " + piece
            continue
        printed = set(NUMBER.findall(above)) | set(re.findall(r"[\d.,]+%?", above))
        for number in NUMBER.findall(re.sub(r"`[^`]*`", "", piece)):
            number = number.rstrip(",")
            assert number in printed, f"{number} in: {piece.strip()[:80]}"
            found += 1
    assert found > 15
