"""The README tells the truth: its table is the code's, its commands exist, its example runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from quantlab.formats import format_markdown

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_formats_is_generated():
    table = re.search(r"<!-- formats: .* -->\n(.*)\n<!-- /formats -->", README, re.DOTALL)
    assert table, "the README has no formats table between its two markers"
    assert table[1] == format_markdown(), "run `quantlab formats --markdown` and paste it"


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_commands_exist():
    from typer.main import get_command

    from quantlab.cli import app

    verbs = set(get_command(app).commands)  # pyright: ignore[reportAttributeAccessIssue]
    named = set(re.findall(r"`quantlab ([a-z]+)", README))
    assert named <= verbs
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE)) <= targets


def test_the_policies_of_the_table_parse():
    from quantlab.schemes import parse_policy

    found = re.findall(r"^\| (`[^|]*`) \|", README.split("## Formats")[0], re.MULTILINE)
    policies = [policy for cell in found for policy in re.findall(r"`([^`]+)`", cell)]
    assert len(policies) >= 5
    for policy in policies:
        parse_policy(policy)


def test_the_first_example_runs():
    example = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    assert len(example.strip().splitlines()) <= 10
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.strip().splitlines()
    assert [line.split(":")[0] for line in lines] == ["fp32@1", "fp32/nvfp4@16", "nvfp4@1"]
    errors = [float(line.split()[1].rstrip(",")) for line in lines]
    assert errors[0] < 1e-5 < errors[1] < errors[2]


@pytest.mark.parametrize("page", ["README.md", "docs/drift.md", "docs/choosing-a-policy.md"])
def test_pages_name_no_unknown_policy(page):
    """Everything that looks like a policy in a page is one."""
    from quantlab.schemes import parse_policy

    text = (ROOT / page).read_text(encoding="utf-8")
    for policy in set(re.findall(r"`([a-z0-9+./_]+@\d+[a-z0-9_=:]*)`", text)):
        parse_policy(policy)
