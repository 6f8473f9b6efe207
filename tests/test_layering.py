"""Who may import whom (CONTRIBUTING.md, "Layers"), read from the syntax trees of quantlab/, kernels/ and evals/.

Imports at module level follow the layers.  An import inside a function may also look up, but only where
``LOOK_UPS`` lists it with a reason.  Seeded violations prove that each rule bites.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

CHAIN = ("formats", "recurrences", "schemes", "drift", "kernels", "models", "evals", "sweep", "cli")
BELOW_ALL = ("", "errors")  # "" is quantlab/__init__.py
NUMERIC = CHAIN[: CHAIN.index("kernels") + 1]
UPPER = CHAIN[CHAIN.index("models") :]

# What a part may import at module level, besides itself, the standard library and BELOW_ALL.
ALLOWED: dict[str, set[str]] = {
    "": set(),
    "errors": set(),
    **{name: set(CHAIN[:rank]) for rank, name in enumerate(CHAIN)},
    "records": set(),
    "statistics": set(),
    "report": {"records", "statistics"},
    "terminal": {"records"},
    "testing": set(NUMERIC),
}
for _name in UPPER:
    ALLOWED[_name] |= {"records", "statistics"}
# A verb of the command line may have a file of its own, which no other verb imports.
ALLOWED["cli"] |= {"report", "terminal", "testing"}
VERBS = {path.stem for path in (ROOT / "quantlab").glob("cli_*.py")}
for _name in VERBS:
    ALLOWED[_name] = set(ALLOWED["cli"])
# One verb in several files.
ALLOWED["cli_drift"] |= {"cli_attribute", "cli_closed_loop"}
ALLOWED["cli_predict"] |= {"cli_budget", "cli_fact"}
ALLOWED["cli"] |= VERBS
ALLOWED["__main__"] = set(ALLOWED["cli"]) | {"cli"}

# Imports inside functions that look up: (module, part) -> why.
LOOK_UPS = {
    ("quantlab.schemes.backend", "kernels"): "finds a kernel by name, once something asks for it",
    ("quantlab.drift.streams", "records"): "the schema of stream files is kept with the other file schemas",
    ("quantlab.drift.sources", "records"): "a stream file is checked and read in parts",
    ("quantlab.drift.series", "records"): "a file appears under its name only when it is complete",
    ("quantlab.schemes.files", "records"): "files are written whole or not at all, in one place",
    ("quantlab.kernels.bench", "records"): "a timing is a record",
}

# The numeric parts must load where only these are installed (a bare GPU image).
NUMERIC_PACKAGES = {"torch", "triton", "numpy", "scipy"}
WITHOUT_TORCH = ("records", "statistics", "report")


@dataclass(frozen=True)
class Import:
    """One imported module name, as written at ``where``."""

    target: str
    where: str
    deferred: bool
    """Inside a function, so it runs on call."""
    type_only: bool
    """Under ``if TYPE_CHECKING``: never runs, still couples."""


def modules(root: Path) -> dict[str, Path]:
    """Dotted name -> file of every module that the package consists of; kernels/ and evals/ count as linked in."""
    found = {}
    for folder, prefix in (("quantlab", ""), ("kernels", "quantlab."), ("evals", "quantlab.")):
        for path in sorted((root / folder).rglob("*.py")):
            relative = path.relative_to(root)
            if folder == "quantlab" and len(relative.parts) > 2 and relative.parts[1] in ("kernels", "evals"):
                continue  # through a link: Python before 3.13 may follow it
            parts = relative.with_suffix("").parts
            found[prefix + ".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, module: str, names: set[str]) -> Iterator[Import]:
    """Every import in ``path``; of dynamic ones those whose name begins with a literal ``quantlab.…``."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]

    def targets(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                ancestors = package.split(".")
                above = ancestors[: len(ancestors) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            members = [f"{base}.{alias.name}" for alias in node.names]
            yield from (name if base == "quantlab" or name in names else base for name in members)
        elif isinstance(node, ast.Call) and node.args:
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            head: ast.AST = node.args[0]
            if isinstance(head, ast.JoinedStr) and head.values:
                head = head.values[0]
            if called in ("import_module", "__import__") and isinstance(head, ast.Constant):
                yield str(head.value).rstrip(".")

    def walk(node: ast.AST, deferred: bool, type_only: bool) -> Iterator[Import]:
        for target in targets(node):
            yield Import(target, f"{path.name}:{getattr(node, 'lineno', 0)}", deferred, type_only)
        inside = deferred or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        guarded = node.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) else []
        for child in ast.iter_child_nodes(node):
            yield from walk(child, inside, type_only or child in guarded)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), False, False)


def part_of(name: str) -> str:
    """``quantlab.formats.table`` -> ``formats``; a name that quantlab itself defines -> ``""``."""
    part = name.split(".")[1] if "." in name else ""
    return part if part in ALLOWED or not part.startswith("__") else ""


def violations(root: Path) -> list[str]:
    """One line for each import that breaks a rule, and each module that no rule knows."""
    found = []
    files = modules(root)
    for module, path in files.items():
        part = part_of(module)
        if part not in ALLOWED:
            found.append(f"{module}: which layer is {part!r}? Add it to CHAIN or ALLOWED")
            continue
        for item in imports(path, module, set(files)):
            top = item.target.partition(".")[0]
            complaint = ""
            if top == "quantlab":
                target = part_of(item.target)
                legal = target in (part, *BELOW_ALL) or target in ALLOWED[part]
                if not legal and not (item.deferred and (module, target) in LOOK_UPS):
                    complaint = f"{part or 'quantlab'} may not import {target}"
            elif top in ("kernels", "evals"):
                complaint = f"{top} is quantlab.{top}"
            elif part in WITHOUT_TORCH and top in ("torch", "triton"):
                complaint = f"{part} does without {top}"
            elif part in (*NUMERIC, *BELOW_ALL) and not (item.deferred or item.type_only):
                usable = NUMERIC_PACKAGES if part in NUMERIC else set()
                if top not in usable and top not in sys.stdlib_module_names:
                    complaint = (
                        f"{part or 'quantlab'} may import {top} only inside the function that needs it"
                    )
            if complaint:
                found.append(f"{module} ({item.where}): {complaint}")
    return found


def test_every_import_follows_the_layers():
    assert violations(ROOT) == []


def test_the_walk_sees_every_folder():
    assert {part_of(name) for name in modules(ROOT)} >= {*CHAIN, *WITHOUT_TORCH, "errors", "testing"}


def test_every_look_up_that_is_listed_is_used():
    files = modules(ROOT)
    for module, part in LOOK_UPS:
        if module in files:  # a seeded tree or a branch may lack it
            deferred = {
                part_of(item.target) for item in imports(files[module], module, set(files)) if item.deferred
            }
            assert part in deferred, f"{module} no longer looks up {part}"


SEEDS = {
    "upward": (
        "quantlab/formats/a.py",
        "from quantlab.schemes import parse_policy",
        "may not import schemes",
    ),
    "upward, whole package": ("quantlab/drift/a.py", "from quantlab import models", "may not import models"),
    "upward, relative": ("quantlab/formats/a.py", "from ..sweep.spec import expand", "may not import sweep"),
    "upward, in a function": (
        "quantlab/models/a.py",
        "def f():\n    import quantlab.evals.x",
        "may not import evals",
    ),
    "upward, for types only": (
        "quantlab/formats/a.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from quantlab.drift import Stream",
        "may not import drift",
    ),
    "upward, by name": (
        "quantlab/schemes/a.py",
        'import importlib\n\ndef f(x):\n    return importlib.import_module(f"quantlab.kernels.{x}")',
        "may not import kernels",
    ),
    "a listed look-up at module level": (
        "quantlab/schemes/backend.py",
        "import quantlab.kernels.dual_read",
        "may not import kernels",
    ),
    "from a linked folder": (
        "kernels/a.py",
        "from quantlab.models import run_with_policy",
        "may not import models",
    ),
    "second copy": ("evals/a.py", "import kernels.dual_read", "kernels is quantlab.kernels"),
    "heavy package at module level": (
        "quantlab/drift/a.py",
        "import pandas",
        "may import pandas only inside",
    ),
    "heavy package in a class body": (
        "kernels/a.py",
        "class A:\n    import pyarrow",
        "may import pyarrow only inside",
    ),
    "torch in records": (
        "quantlab/records/record.py",
        "def f():\n    import torch",
        "records does without torch",
    ),
    "torch in report": ("quantlab/report/a.py", "from torch import nn", "report does without torch"),
    "report on drift": ("quantlab/report/a.py", "import quantlab.drift", "report may not import drift"),
    "statistics on records": (
        "quantlab/statistics/a.py",
        "import quantlab.records",
        "may not import records",
    ),
    "testing on models": ("quantlab/testing.py", "import quantlab.models", "testing may not import models"),
    "the root": (
        "quantlab/__init__.py",
        "from quantlab.formats import parse",
        "quantlab may not import formats",
    ),
    "a part without a layer": ("quantlab/extra/a.py", "", "which layer is 'extra'"),
}


@pytest.mark.parametrize(("file", "source", "complaint"), SEEDS.values(), ids=SEEDS)
def test_a_seeded_violation_is_found(tmp_path, file, source, complaint):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(source)
    found = violations(tmp_path)
    assert len(found) == 1
    assert complaint in found[0]


def test_what_the_layers_allow_passes(tmp_path):
    sources = {
        "quantlab/drift/streams.py": "import torch\nfrom quantlab import errors, formats\n"
        "def f():\n    import pandas\n    from quantlab.records import save_stream_file",
        "quantlab/schemes/backend.py": 'def f(x):\n    import_module(f"quantlab.kernels.{x}")',
        "quantlab/cli.py": "import typer\nfrom quantlab import __version__, report, sweep",
        "quantlab/testing.py": "from quantlab.kernels import dual_read",
        "kernels/a.py": "import triton.language as tl\nfrom quantlab.schemes.dual_read import dual_read",
    }
    for file, source in sources.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
    assert violations(tmp_path) == []


def loaded_after_importing(parts: tuple[str, ...]) -> set[str]:
    """Top-level packages in a fresh interpreter once every module of ``parts`` is imported."""
    names = [name for name in modules(ROOT) if part_of(name) in parts]
    assert names
    script = (
        f"import importlib, sys\nfor name in {names!r}: importlib.import_module(name)\n"
        "print(*{name.partition('.')[0] for name in sys.modules})"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_records_statistics_and_report_never_load_torch():
    assert loaded_after_importing(WITHOUT_TORCH) & {"torch", "triton"} == set()


def test_the_numeric_parts_load_nothing_heavy():
    # The kernels need triton, which may be absent; the rest must load in any case, so they are loaded apart.
    heavy = {"pandas", "pyarrow", "transformers", "lm_eval", "datasets", "seaborn", "pydantic", "typer"}
    assert loaded_after_importing(NUMERIC[:-1]) & heavy == set()
