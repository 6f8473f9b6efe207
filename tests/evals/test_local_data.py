"""Tables from files, folders, caches and a hub that a local server plays."""

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from quantlab.errors import InputError
from quantlab.evals.gpqa import COLUMNS, read_rows
from quantlab.evals.local_data import Source, read_table
from tests.evals import made_up

REPOSITORY = "Idavidrein/gpqa"
TABLE = Source("GPQA", "gpqa_diamond", REPOSITORY)
CARD = """---
license: cc-by-4.0
configs:
- config_name: gpqa_main
  data_files: gpqa_main.csv
- config_name: gpqa_diamond
  data_files:
  - split: train
    path: "gpqa_diamond*.csv"
---
A card.
"""


@pytest.fixture(autouse=True)
def empty_home(tmp_path, monkeypatch):
    """No cache of this machine, no token, and no network: a connection is an error of the test."""
    for name in ("HF_DATASETS_CACHE", "HF_HUB_CACHE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


@pytest.fixture
def no_network(monkeypatch):
    def connect(*_):
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", connect)


@pytest.fixture
def table():
    return made_up.rows(5, words=12)


def texts(rows):
    return [tuple(row[name] for name in COLUMNS) for row in rows]


def clone(folder, table):
    folder.mkdir(parents=True)
    (folder / "README.md").write_text(CARD)
    made_up.write(folder / "gpqa_main.csv", table)
    made_up.write(folder / "gpqa_diamond.csv", table[:2])
    return folder


def test_every_kind_of_file_gives_the_same_rows(tmp_path, table, no_network):
    import pyarrow
    import pyarrow.parquet

    table[0]["Question"] = 'With "quotes", commas,\u2028 a separator\nand a line break?'
    table[1]["Correct Answer"] = "None"
    table[2]["Correct Answer"] = "4.0"
    made_up.write(tmp_path / "a.csv", table)
    (tmp_path / "b.csv").write_bytes(b"\xef\xbb\xbf" + (tmp_path / "a.csv").read_bytes())
    (tmp_path / "a.json").write_text(json.dumps(table))
    (tmp_path / "b.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(table).encode())
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in table) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), tmp_path / "a.parquet")
    for name in ("a.csv", "b.csv", "a.json", "b.json", "a.jsonl", "a.parquet"):
        assert texts(read_rows(tmp_path / name)) == texts(table), name


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", None, "CSV, JSON, JSONL or Parquet file"),
        ("a.txt", b"Question\n", "CSV, JSON, JSONL or Parquet file"),
        ("a.csv", b"", "at least one row"),
        ("a.csv", ",".join(COLUMNS).encode() + b"\n", "at least one row"),
        ("a.csv", b"Question,Question\nq,r\n", "columns 1, 2 share one"),
        ("a.csv", b"secret,a,b,secret\n", "columns 1, 4 share one"),  # no header: its names are a question
        ("a.csv", ",".join(COLUMNS).encode() + b"\n\xe9t\xe9 secret,a,b,c,d\n", r"UTF-8; byte \d+ is not"),
        ("a.csv", b'Question,"secret\n', "Error on reading"),
        ("a.csv", b"version https://git-lfs\noid sha256:1\n", "git lfs pull"),
        ("a.json", b"{", "JSONDecodeError on reading"),
        ("a.json", b"[" * 100_000, "RecursionError on reading"),
        ("a.json", b'{"secret": 1}', "JSON objects, one a row"),
        ("a.jsonl", b'["secret"]', "JSON objects, one a row"),
        ("a.parquet", b"PAR1secret", "ArrowInvalid on reading"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line_without_its_text(tmp_path, name, content, words):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        read_rows(tmp_path / name)
    assert caught.value.argument == "data"
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ({"text": "secret"}, "has no text in"),
        (["secret"], "has no text in"),
        ("secret\0", "holds a NUL character"),
        ("secret\ud800", "is not valid Unicode"),
    ],
)
def test_a_cell_that_is_no_text_is_refused_by_row(tmp_path, table, column, cell, words):
    table[1] = table[1] | {column: cell}
    (tmp_path / "a.json").write_text(json.dumps(table))
    with pytest.raises(InputError, match=f"row 2 {words}") as caught:
        read_rows(tmp_path / "a.json")
    assert "secret" not in str(caught.value)


def test_a_saved_data_set_is_read_with_and_without_splits(tmp_path, table, no_network):
    import datasets

    made = datasets.Dataset.from_list(table)
    made.save_to_disk(str(tmp_path / "one"))
    other = datasets.Dataset.from_list(made_up.rows(1, words=9, seed=1))
    datasets.DatasetDict(train=made).save_to_disk(str(tmp_path / "train"))
    datasets.DatasetDict(train=other, test=made).save_to_disk(str(tmp_path / "test"))
    datasets.DatasetDict(gpqa_main=other, gpqa_diamond=made).save_to_disk(str(tmp_path / "subsets"))
    for name in ("one", "train", "test", "subsets"):
        assert texts(read_rows(tmp_path / name)) == texts(table), name
    datasets.DatasetDict(a=made, b=made).save_to_disk(str(tmp_path / "letters"))
    with pytest.raises(InputError, match="its parts a, b"):
        read_rows(tmp_path / "letters")
    (tmp_path / "one" / "data-00000-of-00001.arrow").write_bytes(b"")
    with pytest.raises(InputError, match="save_to_disk wrote"):
        read_rows(tmp_path / "one")


def test_a_clone_gives_the_subset_that_is_asked_for(tmp_path, table, no_network):
    folder = clone(tmp_path / "clone", table)
    assert texts(read_rows(folder)) == texts(table[:2])
    assert texts(read_rows(folder, "main")) == texts(table)
    with pytest.raises(InputError, match="gpqa_extended; it has gpqa_main, gpqa_diamond"):
        read_rows(folder, "extended")
    (folder / "README.md").unlink()  # the file's name says which it is, too
    assert texts(read_rows(folder, "main")) == texts(table)
    (folder / "README.md").write_text("---\nconfigs: [: ]\n---\n")
    with pytest.raises(InputError, match=r"README.md.* a data set's card"):
        read_rows(folder)
    made_up.write(tmp_path / "x.csv", table)
    for outside in ("../x.csv", str(tmp_path / "x.csv")):
        (folder / "README.md").write_text(
            f"---\nconfigs:\n- config_name: gpqa_diamond\n  data_files: {outside}\n---\n"
        )
        with pytest.raises(InputError, match="clone of its repository"):
            read_rows(folder)


def test_a_folder_of_one_file_is_that_file(tmp_path):
    source = Source("AIME")
    (tmp_path / "README.md").write_text("Problems.")
    (tmp_path / "problems.jsonl").write_text('{"problem": "p", "answer": 3}\n')
    assert read_table(tmp_path, source) == [{"problem": "p", "answer": 3}]
    (tmp_path / "more.csv").write_text("problem,answer\nq,4\n")
    with pytest.raises(InputError, match="AIME in a CSV"):
        read_table(tmp_path, source)


def test_the_parts_of_a_split_are_read_in_order_and_the_test_split_first(tmp_path):
    (tmp_path / "data").mkdir()
    for name in ("train-0.csv", "test-1.csv", "test-0.csv"):
        (tmp_path / "data" / name).write_text(f"problem,answer\n{name},4\n")
    card = "configs:\n- config_name: main\n  data_files:\n  - {split: train, path: data/train-*}\n"
    card += "  - {split: test, path: data/test-*}\n"
    (tmp_path / "README.md").write_text(f"---\n{card}---\n")
    for source in (Source("GSM8K", "main"), Source("AIME")):
        assert [row["problem"] for row in read_table(tmp_path, source)] == ["test-0.csv", "test-1.csv"]


def test_a_cache_is_read_without_the_network(tmp_path, table, monkeypatch, no_network):
    """Laid out by the library itself, under the name that a download would give it."""
    import datasets

    cache = tmp_path / "home" / "datasets"
    local = clone(tmp_path / "gpqa", table)
    for name in ("gpqa_main", "gpqa_diamond"):
        datasets.load_dataset(str(local), name, cache_dir=str(cache))
    (made,) = [path for path in cache.iterdir() if path.is_dir()]
    made.rename(cache / "Idavidrein___gpqa")
    shutil.rmtree(local)
    for place in (None, cache, tmp_path / "home", cache / "Idavidrein___gpqa"):
        assert texts(read_rows(place)) == texts(table[:2])
        assert texts(read_rows(place, "main")) == texts(table)
    with pytest.raises(InputError, match="accept the terms"):
        read_rows(None, "extended")
    (version,) = (cache / "Idavidrein___gpqa" / "gpqa_diamond" / "0.0.0").glob("[0-9a-f]*[0-9a-f]")
    assert texts(read_table(version, TABLE)) == texts(table[:2])
    shutil.copytree(version, version.with_name("0" * 16))
    with pytest.raises(InputError, match="one of the versions"):
        read_rows(None)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "elsewhere"))
    with pytest.raises(InputError, match="accept the terms"):
        read_rows(None)


def test_without_data_the_message_says_how_to_get_it(no_network):
    with pytest.raises(InputError) as caught:
        read_rows(None)
    text = str(caught.value)
    for part in (
        "accept the terms of Idavidrein/gpqa",
        "hf auth login",
        "huggingface-cli login",
        "--data hub",
        "CSV",
    ):
        assert part in text
    with pytest.raises(InputError, match="a clone of its repository") as caught:
        read_table("hub", Source("GSM8K"))
    assert "hub`" not in str(caught.value)


class Hub(BaseHTTPRequestHandler):
    """A data set's files for the token "good"; every other request is refused as the hub refuses it."""

    files: dict[str, bytes] = {}  # noqa: RUF012  set once per test

    def do_HEAD(self):
        self.answer()

    def do_GET(self):
        self.answer()

    def answer(self):
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        name = self.path.partition("?")[0].rpartition("/")[2]
        content = self.files.get(name)
        status, headers, body = 200, {"ETag": f'"{name}"', "X-Repo-Commit": "c" * 40}, content or b""
        if token == "invalid":
            status, headers, body = 401, {}, b""
        elif token != "good":
            status, headers, body = 403 if token else 401, {"X-Error-Code": "GatedRepo"}, b""
        elif content is None:
            status, headers = 404, {"X-Error-Code": "EntryNotFound"}
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format, *args):
        pass


@pytest.fixture
def hub(tmp_path, table, monkeypatch):
    """Address of a hub that serves a clone."""
    folder = clone(tmp_path / "served", table)
    (folder / "README.md").write_text(CARD.replace("gpqa_diamond*", "gpqa_diamond"))
    monkeypatch.setattr(Hub, "files", {path.name: path.read_bytes() for path in folder.iterdir()})
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


READ = """
import json, sys
from quantlab.errors import InputError
from quantlab.evals.gpqa import read_rows
try:
    print(json.dumps([read_rows(data or None, subset) for data, subset in json.loads(sys.argv[1])]))
except InputError as error:
    sys.exit(str(error))
"""


def read_as_user(home, asked, **environment):
    """(rows of each, message): read in a process of its own, because the library reads its settings on import."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    command = [sys.executable, "-c", READ, json.dumps(asked)]
    environment = {**kept, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **environment}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    return (json.loads(done.stdout) if done.returncode == 0 else None), done.stderr


def test_the_hub_serves_who_accepted_and_its_cache_serves_from_then_on(hub, table, tmp_path):
    home = tmp_path / "home"
    rows, message = read_as_user(
        home, [("hub", "diamond"), ("hub", "main")], HF_ENDPOINT=hub, HF_TOKEN="good"
    )
    assert rows is not None, message
    assert [texts(found) for found in rows] == [texts(table[:2]), texts(table)]
    assert texts(read_rows(None)) == texts(table[:2])
    # Offline the library itself serves what it has.
    rows, message = read_as_user(home, [("hub", "main")], HF_ENDPOINT=hub, HF_HUB_OFFLINE="1")
    assert rows is not None, message
    assert texts(rows[0]) == texts(table)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "asks for its terms to be accepted"),
        ({"HF_TOKEN": "stranger"}, "asks for its terms to be accepted"),
        ({"HF_TOKEN": "invalid"}, "the hub answers 401"),
        ({"HF_HUB_OFFLINE": "1"}, "cannot be reached"),
    ],
)
def test_a_refusal_is_one_line_that_says_how_to_get_the_data(hub, tmp_path, settings, words):
    rows, message = read_as_user(tmp_path / "home", [("hub", "diamond")], HF_ENDPOINT=hub, **settings)
    assert rows is None
    (line,) = [line for line in message.splitlines() if line.startswith("data ")]
    for part in (words, "accept the terms of Idavidrein/gpqa", "--data hub"):
        assert part in line
