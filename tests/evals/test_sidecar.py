"""The sidecar: what is in it, what it refuses, and a run that is killed at random moments."""

import json
import os
import random
import signal
import time

import pytest

from quantlab.errors import InputError
from quantlab.evals.model import QuantlabLM
from quantlab.evals.sidecar import Line, Sidecar
from quantlab.models import build_tiny
from quantlab.models.decode_rows import EagerRows
from tests.evals.requests import asked

SETTINGS = {"policy": "fp32@1", "sampling_seed": 0}
OPTIONS = {"until": ["\n\n"], "do_sample": True, "temperature": 1.0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return build_tiny("mamba2", tmp_path_factory.mktemp("sidecar") / "mamba2")


def line(number=0, **changes):
    plain = {
        "task": "t", "doc_id": number, "index": 0, "repeat": 0, "prompt": "p", "sampling": "s", "prompt_tokens": 3,
        "tokens": 2, "finish": "stop", "seed": 0, "exercised": {"checkpoint": 1, "read_copy": None}, "ids": (4, 5),
    }  # fmt: skip
    return Line(**plain | changes)


def questions(count=12, **changes):
    """Sequences of many lengths, so that they end one by one."""
    made = [(f"Question {n} of the keeper", OPTIONS | {"max_gen_toks": 8 + 7 * n % 30}) for n in range(count)]
    return asked([(prompt, options | changes) for prompt, options in made], repeats=2)


def model(folder, path, policy="fp16+sr/nvfp4@4", **options):
    return QuantlabLM(
        str(folder), policy, device="cpu", generation_batch=5, sidecar=path, quiet=True, **options
    )


def stored(path):
    """The lines of a sidecar without their order."""
    return sorted(path.read_text().splitlines())


def test_lines_come_back(tmp_path):
    path = tmp_path / "deep" / "generations.jsonl"
    written = Sidecar(path, SETTINGS)
    written.append([line(0), line(1)])
    written.append([line(2, finish="length")])
    written.close()
    again = Sidecar(path, SETTINGS)
    assert list(again.lines.values()) == [line(0), line(1), line(2, finish="length")]
    assert again.find(line(1)) == line(1)
    assert again.find(line(7)) is None


@pytest.mark.parametrize("cut", [1, 10, 100, 150])
def test_a_torn_line_is_dropped(tmp_path, cut):
    path = tmp_path / "generations.jsonl"
    written = Sidecar(path, SETTINGS)
    written.append([line(0), line(1)])
    written.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    again = Sidecar(path, SETTINGS)
    assert list(again.lines.values()) == [line(0)]
    again.append([line(1)])
    again.close()
    assert path.read_bytes() == whole


def test_a_torn_header_is_a_new_file(tmp_path):
    path = tmp_path / "generations.jsonl"
    Sidecar(path, SETTINGS).close()
    whole = path.read_bytes()
    for end in range(len(whole)):
        path.write_bytes(whole[:end])
        Sidecar(path, SETTINGS).close()
        assert path.read_bytes() == whole


def test_other_settings_are_refused_by_name(tmp_path):
    path = tmp_path / "generations.jsonl"
    Sidecar(path, SETTINGS).close()
    with pytest.raises(InputError, match=r"^sidecar .*: policy 'fp32@1' then, 'int8@1' now$"):
        Sidecar(path, SETTINGS | {"policy": "int8@1"})


@pytest.mark.parametrize(
    "text",
    [
        "no json\n",
        "a note without an end of line",
        '{"kind": "other"}\n',
        '{"kind":"generations","schema_version":1,"fingerprint":"f","settings":3}\n',
        '{"kind":"generations","schema_version":1}\n',
        "[" * 100_000 + "\n",
        "[1]\n",
        "\n",
    ],
)
def test_another_file_is_refused_and_left_alone(tmp_path, text):
    path = tmp_path / "generations.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=r"^sidecar"):
        Sidecar(path, SETTINGS)
    assert path.read_text() == text


def test_a_broken_line_in_the_middle_is_refused(tmp_path):
    path = tmp_path / "generations.jsonl"
    written = Sidecar(path, SETTINGS)
    written.append([line(0), line(1)])
    written.close()
    rows = path.read_text().splitlines()
    path.write_text("\n".join([rows[0], rows[1][:20], rows[2]]) + "\n")
    with pytest.raises(InputError, match="line 2 is not one"):
        Sidecar(path, SETTINGS)


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": ["4", 5]}, {"ids": [4, 5, 6]}, {"ids": [4, -5]}, {"ids": {"4": 5}}, {"ids": 3},
        {"tokens": 3}, {"tokens": True},
        {"finish": "tired"}, {"finish": ["stop"]}, {"exercised": None}, {"exercised": {"checkpoint": "1"}},
        {"doc_id": "0"},
        {"seed": None}, {"task": 3}, {"prompt": ["p"]}, {"more": 1},
    ],
)  # fmt: skip
def test_a_line_of_other_kinds_of_values_is_none(tmp_path, changes):
    path = tmp_path / "generations.jsonl"
    written = Sidecar(path, SETTINGS)
    written.append([line(0), line(1)])
    written.close()
    header, first, second = path.read_text().splitlines()
    path.write_text("\n".join([header, json.dumps(json.loads(first) | changes), second]) + "\n")
    with pytest.raises(InputError, match="line 2 is not one"):
        Sidecar(path, SETTINGS)


def test_two_runs_do_not_write_one_file(tmp_path):
    path = tmp_path / "generations.jsonl"
    first = Sidecar(path, SETTINGS)
    with pytest.raises(InputError, match="no other run"):
        Sidecar(path, SETTINGS)
    first.close()
    Sidecar(path, SETTINGS).close()


def test_a_folder_in_its_place_is_one_line(tmp_path):
    with pytest.raises(InputError, match=r"^sidecar .*directory"):
        Sidecar(tmp_path, SETTINGS)


def test_a_run_that_is_over_keeps_no_tokens(folder, tmp_path):
    path = tmp_path / "generations.jsonl"
    lm = model(folder, path)
    answers = lm.generate_until(questions())
    assert all(json.loads(row)["ids"] for row in path.read_text().splitlines()[1:])
    lm.get_model_info()  # lm-eval asks once everything is scored
    header, *rows = map(json.loads, path.read_text().splitlines())
    assert header["over"] is True
    assert header["schema_version"] == 1
    assert len(rows) == len(answers) == 24
    assert all(row["ids"] is None for row in rows)
    assert sorted(row["tokens"] for row in rows) == sorted(answer.tokens for answer in answers)
    assert "keeper" not in path.read_text()
    with pytest.raises(InputError, match="a run that is not over"):
        model(folder, path).generate_until(questions())


def test_tokens_stay_where_they_are_wanted(folder, tmp_path):
    path = tmp_path / "generations.jsonl"
    lm = model(folder, path, keep_tokens=True)
    answers = lm.generate_until(questions())
    lm.get_model_info()
    again = model(folder, path)
    assert again.generate_until(questions()) == answers
    info = again.get_model_info()["generation"]
    assert (info["resumed"], info["sequences"]) == (24, 24)


@pytest.mark.parametrize(
    ("changes", "options", "named"),
    [
        ({"temperature": 0.5}, {}, "sampling of made_up, document 0 differs"),
        ({"max_gen_toks": 41}, {}, "sampling of made_up, document 0 differs"),
        ({}, {"sampling_seed": 9}, "sampling_seed 0 then, 9 now"),
        ({}, {"state_seed": 9}, "state_seed 0 then, 9 now"),
        ({}, {"policy": "int8@1"}, "policy 'fp16"),
    ],
)
def test_a_resume_under_other_settings_is_refused(folder, tmp_path, changes, options, named):
    path = tmp_path / "generations.jsonl"
    lm = model(folder, path, keep_tokens=True)
    lm.generate_until(questions())
    lm.end_sidecar()
    before = path.read_bytes()
    with pytest.raises(InputError, match=named):
        model(folder, path, **{"sampling_seed": 0} | options).generate_until(questions(**changes))
    assert path.read_bytes() == before


def killed_at(run, path, size):
    """Fork a process that does ``run`` and kill it when its file has ``size`` bytes, in the middle of something."""
    child = os.fork()
    if child == 0:
        try:
            run()
        finally:
            os._exit(0)
    while not path.exists() or path.stat().st_size < size:
        time.sleep(0.001)
        assert os.waitpid(child, os.WNOHANG) == (0, 0), "it ended before it was killed"
    time.sleep(random.Random(size).uniform(0, 0.02))
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])


def test_killed_five_times_it_ends_as_if_nothing_had_been(folder, tmp_path, monkeypatch):
    """The same answers, the same counts of what was exercised and the same lines, whatever the order of their ends."""
    undisturbed, path = tmp_path / "undisturbed.jsonl", tmp_path / "killed.jsonl"
    lm = model(folder, undisturbed, keep_tokens=True)
    expected, info = lm.generate_until(questions(40)), lm.get_model_info()
    whole, chance, counts = undisturbed.stat().st_size, random.Random(5), []
    step = EagerRows.step

    def slowly(self, tokens):  # so that none comes to its end before this process sees how far it is
        time.sleep(0.004)
        return step(self, tokens)

    monkeypatch.setattr(EagerRows, "step", slowly)
    for _ in range(5):
        held = path.stat().st_size if path.exists() else 0
        size = held + int(chance.uniform(0, whole / 7))
        killed_at(lambda: model(folder, path).generate_until(questions(40)), path, size)
        counts.append(path.read_bytes().count(b"\n"))
    assert counts == sorted(counts)
    assert 1 < counts[-1] < 81  # some were there, some were not
    last = model(folder, path, keep_tokens=True)
    assert last.generate_until(questions(40)) == expected
    again = last.get_model_info()
    assert again["generation"]["resumed"] == counts[-1] - 1
    assert stored(path) == stored(undisturbed)
    assert again["exercised"] == info["exercised"]
    for name in ("sequences", "finish", "prompt_tokens", "generated_tokens", "sequences_without_a_read"):
        assert again["generation"][name] == info["generation"][name]
