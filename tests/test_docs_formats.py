"""The pages about formats tell the truth: every command in them is run and every text in them is read."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quantlab.cli import app
from quantlab.errors import InputError
from quantlab.formats import format_markdown, parse
from quantlab.formats.recipes import profiles_of
from quantlab.formats.table import FORMATS, Scaling

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    page.name: page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs" / "formats").glob("*.md"))
}
FAMILIES = {Scaling.NVFP4: "nvfp4.md", Scaling.MX: "mx.md", Scaling.FLOAT32: "fp8-and-integers.md"}


def commands():
    """(page, command, the output that the page shows)."""
    for name, text in PAGES.items():
        for block in re.findall(r"```console\n(.*?)\n```", text, re.DOTALL):
            for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                yield pytest.param(command, output.strip("\n"), id=f"{name}: {command}")


@pytest.mark.parametrize(("command", "output"), list(commands()))
def test_the_command_prints_what_the_page_shows(command, output):
    program, *arguments = shlex.split(command)
    assert program == "quantlab"
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert [line.rstrip() for line in done.output.strip("\n").splitlines()] == output.splitlines()


def test_every_page_of_a_family_shows_commands():
    assert set(PAGES) == {"README.md", *FAMILIES.values()}
    counts = {name: text.count("\n$ quantlab formats try ") for name, text in PAGES.items()}
    assert min(counts.values()) >= 4


def test_the_table_is_generated():
    table = re.search(r"<!-- formats: .* -->\n(.*)\n<!-- /formats -->", PAGES["README.md"], re.DOTALL)
    assert table
    assert table[1] == format_markdown()


@pytest.mark.parametrize("name", PAGES)
def test_every_format_text_is_read(name):
    """Everything in code quotes that begins with a format's name is a format, a policy option apart."""
    prose = re.sub(r"```.*?```", "", PAGES[name], flags=re.DOTALL)
    found = 0
    for text in re.findall(r"`([a-z0-9_]+(?:[:+][^` ]*)?)`", prose):
        head = re.split(r"[:+]", text)[0]
        if head in FORMATS or head == "fp8":
            try:
                parse(text.replace("\\|", "|"))
            except InputError as error:
                raise AssertionError(f"{name}: {text}") from error
            found += 1
    assert found > 10


def test_every_profile_is_on_the_page_of_its_family():
    for row in FORMATS.values():
        for profile in profiles_of(row):
            library, _, variant = profile.partition(".")
            page = PAGES[FAMILIES[row.scaling]]
            assert library in page, profile
            # A variant is named in full, or as the ending of the one before it in its cell.
            assert (
                not variant
                or re.search(rf"[.`_]{re.escape(variant.split('.')[-1])}\b", page)
                or "_narrow" in variant
            )


@pytest.mark.parametrize("name", [name for name, text in PAGES.items() if "```python" in text])
def test_examples_in_python_run(name):
    for example in re.findall(r"```python\n(.*?)```", PAGES[name], re.DOTALL):
        exec(compile(example, name, "exec"), {})
