"""Results and samples in lm-eval's layout, made by hand, for what reads them."""

import hashlib
import json

TIME = "2026-11-30T10-00-00.123456"


def digest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def sample(i, values, **changes):
    """One line of a samples file: ``values`` are the metrics."""
    made = {
        "doc_id": i,
        "doc": {"question": f"secret {i}"},
        "target": "A",
        "arguments": {},
        "resps": [["some text"]],
        "filtered_resps": ["A"],
        "filter": "none",
        "metrics": list(values),
        "doc_hash": digest(f"doc {i}"),
        "prompt_hash": digest(f"prompt {i}"),
        "target_hash": digest(f"target {i}"),
    }
    return {**made, **values, **changes}


def write_run(folder, samples, *, model="m", policy=None, task="quiz", time=TIME, count=None, **changes):
    """A folder with a results and a samples file; ``changes`` are settings of the task ("configs") or of the run."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(line) + "\n" for line in samples)
    (folder / f"samples_{task}_{time}.jsonl").write_text(lines)
    settings = {"output_type": "generate_until", "generation_kwargs": {"temperature": 1.0}, "repeats": 1}
    n = len({str(line["doc_id"]) for line in samples}) if count is None else count
    results = {
        "results": {task: {}},
        "configs": {task: {name: changes.pop(name, value) for name, value in settings.items()}},
        "versions": {task: changes.pop("version", 1)},
        "n-shot": {task: changes.pop("shots", 0)},
        "n-samples": {task: {"original": n, "effective": n}},
        "config": {
            "model": "hf",
            "model_args": f"pretrained=some/{model},dtype=float32",
            "gen_kwargs": changes.pop("gen_kwargs", None),
            "fewshot_seed": changes.pop("fewshot_seed", 1234),
            **({} if policy is None else {"policy": policy, "scoring": changes.pop("scoring", "decode")}),
        },
        "chat_template_sha": None,
        **changes,
    }
    (folder / f"results_{time}.json").write_text(json.dumps(results))
    return folder


def quiz(correct, **columns):
    """Samples with ``correct`` (a number or a list a document) and, per document, the values of ``columns``."""
    return [
        sample(i, {"exact_match": value, **{name: column[i] for name, column in columns.items()}})
        for i, value in enumerate(correct)
    ]
