"""The lm-eval model "quantlab": a Hugging Face model whose decode state is held under a policy."""

import sys
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs, resolve_max_length
from tqdm import tqdm

from quantlab.errors import InputError, unknown_name
from quantlab.evals.preflight import rounded_copies
from quantlab.evals.scoring import Item, Score, score_batch, sequence_id
from quantlab.models.interception import Interception
from quantlab.schemes import Policy, PolicyRules, parse_rules

SCORINGS = ("decode", "boundary", "prefill")
# A recurrent model that names no context length has none; lm-eval would assume 2048 tokens.
_NO_LIMIT = 1 << 20

Request = tuple[Any, list[int], list[int]]
_HFLM: Any = HFLM  # lm-eval's decorator hides the type of the class


@register_model("quantlab")
class QuantlabLM(_HFLM):
    """HFLM with three more arguments.

    policy: what the decode state is stored in (default fp32@1, the baseline of every comparison), or the path of a
    .toml file with rules for layers and heads.
    scoring: how log-likelihoods are taken.  "decode" (default): context and continuation token by token
    through the decode state, the state forked for each continuation.  "boundary": the context in one dense
    prefill, its final state rounded once, the continuation token by token.  "prefill": lm-eval's own
    parallel scoring, which never touches the decode state, so only unrounded policies may ask for it. seed:
    names the random bits of stochastic rounding.

    Generation runs under the policy in every scoring mode.  The softmax is float32.  Nothing is truncated:
    a request longer than the model's context is an InputError, and so is ``batch_size=auto``, which would
    probe the model with its full context length.  ``batch_size`` counts contexts; a context's continuations
    are scored beside each other.
    """

    def __init__(
        self,
        pretrained: Any,
        policy: str | Path | Policy | PolicyRules = "fp32@1",
        scoring: str = "decode",
        seed: int = 0,
        batch_size: int | str = 1,
        **kwargs: Any,
    ):
        if not str(batch_size).isdigit() or int(batch_size) < 1:
            raise InputError(
                "batch_size", batch_size, "a whole number of at least 1 (auto probes the full context)"
            )
        self.check_scoring(scoring, parse_rules(policy))
        if isinstance(pretrained, str) and Path(pretrained).is_dir():
            # lm-eval looks a relative path up as a repository name on the network.
            pretrained = str(Path(pretrained).resolve())
        kwargs.setdefault("device", "cuda" if torch.cuda.is_available() else "cpu")
        kwargs.setdefault("softmax_dtype", "float32")
        self.scoring = scoring
        super().__init__(pretrained=pretrained, batch_size=int(batch_size), **kwargs)
        self.use_policy(policy, seed=int(seed))

    def use_policy(self, policy: str | Path | Policy | PolicyRules, *, seed: int = 0) -> None:
        """Score everything from here on under ``policy``, with a fresh report; the model stays loaded."""
        rules = parse_rules(policy)
        self.check_scoring(self.scoring, rules)
        self.interception = Interception(self.model, rules, seed=seed)
        self.seed = seed
        self._warning: str | None = None

    @staticmethod
    def check_scoring(scoring: str, rules: PolicyRules) -> None:
        """InputError for an unknown way of scoring, and for one that would leave a policy inert."""
        if scoring not in SCORINGS:
            raise unknown_name("scoring", scoring, SCORINGS)
        if scoring == "prefill" and any(rounded_copies(rules).values()):
            raise InputError(
                "scoring", scoring, f"decode or boundary: a prefill never touches policy {rules}"
            )

    @property
    def max_length(self) -> int:
        return self._max_length or resolve_max_length(self.config, self.tokenizer, default=_NO_LIMIT)

    def _detect_batch_size(self, requests: Any = None, pos: int = 0) -> int:
        raise InputError("batch_size", "auto", "a whole number")

    def get_model_info(self) -> dict[str, Any]:
        """lm-eval copies this into ``results["config"]``: the policy, what it did, and how scores were
        taken.
        """
        info = super().get_model_info() | self.interception.report.as_dict()
        return info | {"scoring": self.scoring, "policy_seed": self.seed, "warning": self._warning}

    # Bars are for a terminal; in a log every redraw would be a line.
    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Score]:
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm or not sys.stderr.isatty())

    # lm-eval calls this for every log-likelihood, rolling ones included.
    def _loglikelihood_tokens(
        self, requests: list[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[Score]:
        for _, context, continuation in requests:
            self._check_length(len(context) + len(continuation) - 1)
        if self.scoring == "prefill":
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        places: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for place, (_, context, _) in enumerate(requests):
            places[tuple(context)].append(place)
        results: list[Score | None] = [None] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0, desc="decode scoring") as bar:
            for contexts in self._batches(list(places), override_bs or int(self.batch_size)):
                items = [Item(c, tuple(tuple(requests[p][2]) for p in places[c])) for c in contexts]
                scores = score_batch(
                    self.model,
                    self.interception,
                    items,
                    prefill=self.scoring == "boundary",
                    device=self.device,
                )
                for context, row in zip(contexts, scores, strict=True):
                    for place, score in zip(places[context], row, strict=True):
                        results[place] = score
                        if requests[place][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[place][0], score)
                        bar.update()
        self._check_exercised()
        return results  # pyright: ignore[reportReturnType]

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        for request in requests:
            context, options = request.args
            new = normalize_gen_kwargs(dict(options), self.max_gen_toks).get(
                "max_gen_toks", self.max_gen_toks
            )
            self._check_length(len(self.tok_encode(context)) + int(new))
        texts = super().generate_until(requests, disable_tqdm)
        self._check_exercised()
        return texts

    def _model_generate(self, context: torch.Tensor, max_length: int, stop: list[str], **options: Any) -> Any:
        mask = options.get("attention_mask", torch.ones_like(context)).bool()
        ids = [sequence_id(tuple(row[real].tolist())) for row, real in zip(context, mask, strict=True)]
        copies = max(int(options.get("num_beams") or 1), int(options.get("num_return_sequences") or 1))
        self.interception.sequence_ids = torch.tensor(ids).repeat_interleave(copies)
        with self.interception:
            return super()._model_generate(context, max_length, stop, **options)

    def _batches(self, contexts: list[tuple[int, ...]], size: int) -> list[list[tuple[int, ...]]]:
        # Long ones first, so that a batch that does not fit in memory fails at once; the text breaks ties,
        # so that the layout is a function of the requests alone.  A dense prefill needs contexts of one
        # length.
        contexts = sorted(contexts, key=lambda context: (-len(context), context))
        groups: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for context in contexts:
            groups[len(context) if self.scoring == "boundary" else 0].append(context)
        return [group[i : i + size] for group in groups.values() for i in range(0, len(group), size)]

    def _check_length(self, tokens: int) -> None:
        if tokens > self.max_length:
            raise InputError(
                "request length", tokens, f"at most {self.max_length} tokens (max_length); nothing is cut off"
            )

    def _check_exercised(self) -> None:
        """InputError if the policy touched nothing; a warning, kept for the results, if it hardly did."""
        self.interception.require_effect()
        rules, counts = self.interception.rules, self.interception.report.exercised
        rounded = rounded_copies(rules)
        watched = {part: counts[part] or 0 for part, is_rounded in rounded.items() if is_rounded}
        for part, count in watched.items():
            if count == 0:
                raise InputError(
                    "policy", str(rules), f"a {part} that is read back after rounding; no store was"
                )
            if count < 2:
                self._warning = f"{rules}: only {count} rounded store of the {part} was read back"
        if self._warning:
            warnings.warn(self._warning, stacklevel=2)
