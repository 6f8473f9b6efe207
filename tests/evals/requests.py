"""lm-eval's requests, as its evaluator hands them to a model."""

from lm_eval.api.instance import Instance


def asked(pairs, kind="generate_until", task="made_up", repeats=1):
    """One request a pair of arguments, each ``repeats`` times in a row."""
    made = [
        Instance(request_type=kind, doc={}, arguments=pair, idx=0, metadata=(task, number, repeats))
        for number, pair in enumerate(pairs)
    ]
    return [request for request in made for _ in range(repeats)]
