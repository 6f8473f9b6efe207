"""How the command line ends: usage errors of every verb, closed and full outputs, signals, strict JSON."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.main import get_command

from quantlab import __version__, cli
from quantlab.cli import app
from quantlab.records import load_records

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def verbs(command=None, path=()):
    """(words, command) of every verb and sub-verb, groups included."""
    command = command or get_command(app)
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from verbs(inner, (*path, name))


VERBS = dict(verbs())
NUMBERS = [
    (path, parameter.opts[0])
    for path, command in VERBS.items()
    for parameter in command.params
    if parameter.param_type_name == "option"
    if any(kind in str(parameter.type_descriptor.annotation) for kind in ("int", "float"))  # pyright: ignore[reportAttributeAccessIssue]
]


@pytest.fixture
def refused(monkeypatch, capfd, tmp_path):
    """The command line in this process, which must refuse in one line: that line."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["quantlab", *arguments])
        with pytest.raises(SystemExit) as left:
            cli.main()
        output, errors = capfd.readouterr()
        assert left.value.code == 2
        assert output == ""
        assert errors.startswith("error: ")
        assert len(errors.splitlines()) == 1, errors
        assert list(tmp_path.iterdir()) == []
        return errors

    return run


def words_of(path):
    return " ".join(path) or "quantlab"


@pytest.mark.parametrize("path", VERBS, ids=words_of)
def test_an_unknown_option_is_named(path, refused):
    if path == ("formats", "try"):  # which takes it for a number
        assert "'--unheard-of'" in refused(*path, "nvfp4", "--unheard-of")
    else:
        assert "option '--unheard-of'" in refused(*path, "--unheard-of")


@pytest.mark.parametrize(
    "path", [p for p, c in VERBS.items() if any(q.required for q in c.params)], ids=words_of
)
def test_what_is_missing_is_named(path, refused):
    parameter = next(q for q in VERBS[path].params if q.required)
    option = parameter.param_type_name == "option"
    name = parameter.opts[0] if option else parameter.metavar or parameter.name.upper()
    line = refused(*path)
    assert line.startswith(f"error: {name}: missing, expected: ")


@pytest.mark.parametrize(("path", "option"), NUMBERS, ids=lambda v: v if isinstance(v, str) else words_of(v))
def test_a_value_that_is_no_number_is_named(path, option, refused):
    required = [
        ("x" if q.param_type_name == "argument" else f"{q.opts[0]}=x")
        for q in VERBS[path].params
        if q.required
    ]
    line = refused(*path, *required, option, "many")
    assert line.startswith(f"error: {option} 'many': expected a valid ")


@pytest.mark.parametrize("path", [p for p, c in VERBS.items() if hasattr(c, "commands")], ids=words_of)
def test_an_unknown_verb_is_named_with_the_known_ones(path, refused):
    line = refused(*path, "unheard-of")
    assert "command 'unheard-of': expected one of " in line
    assert all(name in line for name in getattr(VERBS[path], "commands"))  # noqa: B009


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("drift --step 3", "option '--step': expected --steps or --stream or --text"),
        ("drift --steps", "--steps: expected a value behind it"),
        ("drift --json=3", "--json: expected no value behind it"),
        ("drift --heads 0", "--heads '0': expected greater than or equal to 1"),
        ("formats explain nvfp4 int8", "Got unexpected extra argument"),
    ],
)
def test_other_usage_errors(arguments, line, refused):
    assert line in refused(*arguments.split())


@pytest.mark.parametrize(("arguments", "status"), [((), 2), (("claims",), 2), (("drift", "--help"), 0)])
def test_help_stays_help(arguments, status, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quantlab", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == status
    shown = capsys.readouterr()
    assert "Usage:" in shown.out
    assert "error" not in shown.err


def test_the_version_needs_no_verb(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quantlab", "--version"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    assert capsys.readouterr().out == f"quantlab {__version__}\n"


def command(*arguments):
    return [sys.executable, "-m", "quantlab.cli", *map(str, arguments)]


# One ``except`` of cli.main ends them all, so that one process is enough in the fast tier; test_cli.py fills the
# output of ``formats``.
SLOW_LIST = pytest.param(["claims", "evidence", "--list"], marks=pytest.mark.slow)
SLOW_JSON = pytest.param(["formats", "--json"], marks=pytest.mark.slow)


@pytest.mark.parametrize("arguments", [["formats"], SLOW_JSON, SLOW_LIST])
def test_a_reader_that_leaves_ends_the_command_without_a_word(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command(*arguments), stdout=writer, stderr=subprocess.PIPE, env=ENVIRONMENT, cwd=ROOT
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("arguments", [SLOW_JSON, ["--version"], SLOW_LIST])
def test_a_full_standard_output_is_one_line(arguments):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(*arguments), stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, cwd=ROOT
        )
    assert (done.returncode, done.stderr) == (2, "error: No space left on device\n")


# A sweep is sent SIGTERM in the fast tier (test_cli.py).
@pytest.mark.parametrize("number", [pytest.param(signal.SIGTERM, marks=pytest.mark.slow), signal.SIGINT])
def test_a_drift_that_is_ended_leaves_nothing_half_written(number, tmp_path):
    arguments = "drift --alpha 0.9 --steps 2000000 --heads 2 -p int8@4 --workers 2 --output".split()
    process = subprocess.Popen(
        command(*arguments, tmp_path / "out"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
        # A shell starts background jobs with interrupts ignored, and they inherit it: the tests may be one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        for _ in range(1200):
            if list(tmp_path.glob("out/records/.*")) or process.poll() is not None:
                break
            time.sleep(0.05)
        process.send_signal(number)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert output == ""
    assert errors.startswith("interrupted")
    assert len(errors.splitlines()) == 1
    assert list(tmp_path.glob("out/records/*")) == []
    assert list(tmp_path.glob("out/records/.*")) == []


def test_two_processes_write_one_folder(tmp_path):
    arguments = command(
        *"drift --alpha 0.9 --steps 64 --heads 1 -p int8@4 -p fp32@4 --json --workers 1 -o".split(), tmp_path
    )
    processes = [
        subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0] == outputs[1]
    assert len(load_records(tmp_path / "records")) == 2
    assert list(tmp_path.glob("records/.*")) == []


@pytest.mark.parametrize("columns", [60, 100])
def test_explain_fits_the_terminal_and_says_buffer(columns, monkeypatch, capsys):
    monkeypatch.setattr("quantlab.terminal._is_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "argv", ["quantlab", "explain", "fp16+sr/nvfp4@16"])
    with pytest.raises(SystemExit):
        cli.main()
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  buffer ") and "up to 15" in line for line in lines)
    # A word longer than the room, such as the options in force, is never broken.
    assert all(len(line) <= columns for line in lines if line.count(":") < 3)


@pytest.mark.parametrize(
    "arguments",
    [
        "drift --steps 4 --heads 1 -p fp32@1 -p int8@4",
        "drift --steps 16 --heads 1 --turn 8 -p int8@1",
        "drift --steps 16 --heads 1 --attribute -p fp16/int8@4",
        "predict nvfp4@1 fp32@1",
        "size --model Qwen3.5-4B",
        "explain fp16+sr/nvfp4@16",
        "formats",
        "formats explain nvfp4",
        "formats try int8 1 2",
        "claims evidence --list",
    ],
)
def test_json_is_strict_and_says_null_for_what_there_is_not(arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["quantlab", *arguments.split(), "--json"])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    lines = capsys.readouterr().out.splitlines()
    assert lines
    for line in lines:
        json.loads(line, parse_constant=pytest.fail)
        assert '"nan"' not in line
