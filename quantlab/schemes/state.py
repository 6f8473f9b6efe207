"""The decode state of a batch of sequences in one layer, under one policy."""

from collections.abc import Callable

import torch
from torch import Tensor

from quantlab.recurrences import StepInputs
from quantlab.recurrences.chunk import keep_first
from quantlab.recurrences.window import EMPTY
from quantlab.schemes import checks
from quantlab.schemes.buffer import joined, token_records
from quantlab.schemes.policy import Policy, parse_policy
from quantlab.schemes.rows import DRAFTS, StateRows, take

Forward = Callable[[StepInputs, Tensor | None, Tensor | None], Tensor]
"""(tokens, rows, lengths of drafts) -> outputs (n, T, heads, value_dim)."""


class DecodeState(StateRows):
    """Checkpoint, read copy and window of a batch; ``start`` makes one from a prefill state.

    One formula serves every policy.  A token whose window is not full reads

        o = decay * (read copy + window) q + d (k . q)
        d = v, or for a delta rule beta (v - decay * (read copy + window) k)

    (the checkpoint in place of the read copy where there is none, or for k with ``key_read=checkpoint``) and is
    recorded.  The token that fills the window is a flush: the checkpoint, the window and the token are folded, the
    output is read from that unrounded fold (``flush_read=exact``), the fold is rounded and stored, and the read copy is
    encoded from the stored checkpoint.  With ``contents=raw`` the fold first re-derives every d from the checkpoint, so
    that read errors never enter it; with ``contents=derived`` it takes the d that the reads produced.  With window 1
    every step is a flush.  With ``flush=early`` a forward of T tokens of a row first folds what its window holds, if
    that is more than window - 2 T records; its own tokens stay.

    Drafts are read by the same formula, all at once, and kept behind the window's cursor; ``commit`` moves it.

    Arithmetic is float32, float64 if the checkpoint is fp64 or ``arithmetic`` says so.  Rows, where an operation takes
    them, are distinct row numbers (n,); inputs and outputs then have n rows.
    """

    def step(self, inputs: StepInputs, rows: Tensor | None = None) -> Tensor:
        """Decode one token of every sequence, or of ``rows``; returns the output (n, heads, value_dim).

        Raises InputError if a shape disagrees with the state or drafts wait for ``commit``; Diverged, and
        changes nothing, if the state to be stored is not finite.
        """
        rows = self._entered_rows(rows)
        tokens = self._entered(inputs, rows).map(lambda t: t[:, None])
        self._refuse_drafts(rows, "step")
        flush = self._forward_early if self._early else self._forward_full
        return self._split(self._due(rows, 1), flush, self._forward, tokens, rows, None)[:, 0]

    def verify(self, tokens: StepInputs, rows: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        """Read T drafted tokens in one go, output only: (n, T, heads, value_dim); nothing but the drafts is kept.

        tokens: with a token dimension T after the batch.  lengths: (n,) integers, drafts of each row that count (T by
        default); outputs behind them are zero, and a row of length 0 is left as it was.  No state is stored before
        acceptance, so a draft behind the end of the window is read from a window that is longer by it.  With
        ``flush=early`` each row's own length decides whether its history is folded first.  ``commit`` says how many
        drafts stay.
        """
        rows = self._entered_rows(rows)
        count = checks.token_count(tokens)
        self.check_drafts(count, rows)
        tokens = self._entered(tokens, rows, count)
        self._refuse_drafts(rows, "verify")
        lengths = checks.lengths(lengths, len(tokens.v), count, self.device)
        at = lengths.nonzero()[:, 0]
        if bool((lengths == count).all()):
            return self._verified(tokens, rows, lengths)
        outputs = self._zeros(len(lengths), count)
        if len(at):
            where = at if rows is None else rows[at]
            tokens = keep_first(tokens.map(lambda t: t[at]), lengths[at])
            read = self._verified(tokens, where, lengths[at])
            outputs[at] = only_used(read, lengths[at])
        return outputs

    def commit(self, counts: Tensor, rows: Tensor | None = None) -> None:
        """Accept the first ``counts[i]`` drafts of each row (integers, 0 to those verified); the others are dropped.

        Rejection moves a pointer.  With flush=full every window that the accepted drafts complete is folded and stored
        here, as single steps would have; with flush=early the next forward does it.
        """
        rows = self._entered_rows(rows)
        pending = self._buffer.pending if rows is None else self._buffer.pending[rows]
        counts = checks.counts(counts, pending, lambda row: self._place(rows, row))
        where = self._all_rows() if rows is None else rows
        with self._all_or_nothing():
            self._buffer.accept(counts, rows)
            while not self._early:
                full = where[self._buffer.cursor[where] >= self._window]
                if len(full) == 0:
                    return
                self._store(self._folded(full, self._window), full)
                self._buffer.drop(full, self._window)

    def take_back(self, counts: Tensor, rows: Tensor | None = None) -> None:
        """Undo the newest ``counts[i]`` tokens of each row (integers, 0 to ``reach``): drafts first, then records.

        A move of the cursor: what a flush has folded is out of reach.  Drafts that are left over are accepted, as
        ``commit`` accepts them.
        """
        rows = self._entered_rows(rows)
        reach, pending = take(self.reach, rows), take(self._buffer.pending, rows)
        counts = checks.counts(
            counts, reach, lambda row: self._place(rows, row), "tokens since the last flush"
        )
        with self._all_or_nothing():
            self._buffer.rewind((counts - pending).clamp(min=0), rows)
            self.commit((pending - counts).clamp(min=0), rows)

    def store(self, dense: Tensor, rows: Tensor | None = None) -> None:
        """Store the state (n, heads, value_dim, key_dim) that a prefill chunk left on top of ``materialize``.

        For a chunk that ran elsewhere: one more store, read copy and empty window included, as after ``extend``.  A new
        sequence starts with ``reset``.
        """
        rows = self._entered_rows(rows)
        dense = self._checked_initial(dense, self._count(rows))
        self._refuse_drafts(rows, "store")
        with self._all_or_nothing():
            self._note_read("checkpoint", rows)
            self._store(dense, rows, rounded=self._options.schedule != "turn")
            self._buffer.drop(rows)

    def extend(self, tokens: StepInputs, rows: Tensor | None = None, lengths: Tensor | None = None) -> Tensor:
        """A prefill chunk of T tokens on top of what is stored: outputs (n, T, heads, value_dim).

        The window is folded, the tokens run in chunk form on the unrounded checkpoint, and the result is stored; the
        read copy serves none of it.  lengths: (n,) integers, tokens of each row that count; a row of length 0 is left
        as it was.
        """
        rows = self._entered_rows(rows)
        count = checks.token_count(tokens)
        checks.tokens(tokens, self.recurrence, self.shape, self._count(rows), count, self.device)
        self._refuse_drafts(rows, "extend")
        lengths = checks.lengths(lengths, self._count(rows), count, self.device)
        where = self._all_rows() if rows is None else rows
        outputs = self._zeros(len(where), count)
        at = lengths.nonzero()[:, 0]
        if len(at) == 0:
            return outputs
        # Rows that are all of them may still be named in another order.
        rows = where[at] if rows is not None or len(at) < self.batch else None
        tokens = tokens.map(lambda t: t[at].detach().to(self.dtype))
        tokens = self._maths.entering(keep_first(tokens, lengths[at]), current=False)
        with self._all_or_nothing():
            state, read = self._maths.chunk(self._folded(rows), tokens, lengths[at])
            outputs[at] = only_used(read, lengths[at])
            self._store(state, rows, rounded=self._options.schedule != "turn")
            self._buffer.drop(rows)
        return outputs

    def flush(self, rows: Tensor | None = None) -> None:
        """Fold the window now, round and store: the end of a turn, or a prefix snapshot.

        A row whose state is stored already, with an empty window, is left alone.
        """
        rows = self._entered_rows(rows)
        self._refuse_drafts(rows, "flush")
        where = self._all_rows() if rows is None else rows
        where = where[(self._buffer.cursor[where] > 0) | self._checkpoint.live[where]]
        if len(where):
            rows = None if len(where) == self.batch else where
            with self._all_or_nothing():
                self._store(self._folded(rows), rows, rounded=True)
                self._buffer.drop(rows)

    def _verified(self, tokens: StepInputs, rows: Tensor | None, lengths: Tensor) -> Tensor:
        """Read and record drafts, at least one a row; those behind ``lengths`` change nothing."""
        if self._options.schedule == "step":
            return self._forward_rounded(tokens, rows, lengths)
        due = self._due(rows, lengths) if self._early else torch.zeros_like(lengths, dtype=torch.bool)
        return self._split(due, self._forward_early, self._forward, tokens, rows, lengths)

    def _forward(self, tokens: StepInputs, rows: Tensor | None, lengths: Tensor | None) -> Tensor:
        """Read and record; nothing is stored."""
        d, outputs = self._read(tokens, rows)
        self._buffer.append(token_records(tokens, d, raw=self._raw), rows, lengths)
        return outputs

    def _forward_early(self, tokens: StepInputs, rows: Tensor | None, lengths: Tensor | None) -> Tensor:
        """Fold what the window holds, read through the fold (or the copy), store the fold, record the tokens."""
        folded = self._folded(rows)
        if self._reads_stored_view():
            d, outputs = self._read(tokens, rows)
        else:
            d, outputs = self._maths.read(folded, EMPTY, tokens)
        self._store(folded, rows)
        self._buffer.drop(rows)
        self._buffer.append(token_records(tokens, d, raw=self._raw), rows, lengths)
        return outputs

    def _forward_full(self, tokens: StepInputs, rows: Tensor | None, lengths: Tensor | None) -> Tensor:
        """The token that fills the window: fold it with the records, read, round, store."""
        d, outputs = self._maths.written(tokens.v), None
        if self._reads_stored_view():
            d, outputs = self._read(tokens, rows)
        elif self.recurrence.delta_rule and not self._raw:
            d, _ = self._read(tokens, rows, output=False)
        base = self._maths.base(take(self._checkpoint.decoded, rows))
        history = self._buffer.records(rows, raw=self._raw)
        token = token_records(tokens, d, raw=self._raw)
        folded = self._dense(base, joined(history, token))
        self._note_read("checkpoint", rows)
        if outputs is None:
            outputs = self._maths.output(folded, tokens.q[:, 0])[:, None]
        if self._options.schedule == "step":
            folded = self._dense(
                base, self._buffer.kept(token)
            )  # the replay will find the token in the buffer
        self._store(folded, rows)
        self._buffer.drop(rows)
        return outputs

    def _forward_rounded(self, tokens: StepInputs, rows: Tensor | None, lengths: Tensor) -> Tensor:
        """Drafts under per-token rounding: each reads the rounded state that the one before it would leave."""
        base, held, outputs, deltas = self._views(rows)[0], None, [], []
        state = self._maths.base(take(self._checkpoint.decoded, rows))
        for t in range(tokens.v.shape[1]):
            token = tokens.map(lambda x, t=t: x[:, t : t + 1])
            d, output = self._maths.read(base, EMPTY, token)
            record = token_records(token, d, raw=self._raw)
            if not self._reads_stored_view():
                output = self._maths.output(self._dense(state, record), token.q[:, 0])[:, None]
            held = self._checkpoint.preview(self._dense(state, self._buffer.kept(record)), rows, held)
            state = self._maths.base(held.decoded)
            base = state
            if self._options.ef_read == "include":
                base = self._maths.base(self._checkpoint.with_residual(held))
            outputs.append(output)
            deltas.append(d)
        self._note_read("checkpoint", rows)
        self._buffer.append(token_records(tokens, torch.cat(deltas, 1), raw=self._raw), rows, lengths)
        return torch.cat(outputs, 1)

    def _zeros(self, count: int, tokens: int) -> Tensor:
        """Outputs of ``tokens`` tokens of ``count`` rows, to be filled in."""
        sizes = (count, tokens, self.shape.heads, self.shape.value_dim)
        return torch.zeros(sizes, dtype=self.dtype, device=self.device)

    def _reads_stored_view(self) -> bool:
        """Whether even the read of a flush goes through what is stored, not through the unrounded fold."""
        if self._copy is not None:
            return self._options.flush_read == "copy"
        return self._options.ef_read == "include"

    def _read(self, tokens: StepInputs, rows: Tensor | None, *, output: bool = True) -> tuple[Tensor, Tensor]:
        """d and outputs of tokens through the stored views and the window.  output: whether the output is used."""
        base, key_base = self._views(rows)
        served = "read_copy" if self._copy is not None else "checkpoint"
        if self.recurrence.delta_rule:
            self._note_read(served if key_base is base else "checkpoint", rows)
        if output:
            self._note_read(served, rows)
        return self._maths.read(base, self._buffer.records(rows), tokens, key_base)

    def _due(self, rows: Tensor | None, count: int | Tensor) -> Tensor:
        """Rows (n,) that fold in a forward of ``count`` tokens, or of so many for each row."""
        cursor = self._buffer.cursor if rows is None else self._buffer.cursor[rows]
        if self._early:
            return (cursor > 0) & (cursor + 2 * count > self._window)
        return cursor == self._window - 1

    def _split(
        self,
        flags: Tensor,
        yes: Forward,
        no: Forward,
        tokens: StepInputs,
        rows: Tensor | None,
        lengths: Tensor | None,
    ) -> Tensor:
        """``yes`` for the flagged rows and ``no`` for the others, outputs put together."""
        if not bool(flags.any()):
            return no(tokens, rows, lengths)
        with self._all_or_nothing():
            if bool(flags.all()):
                return yes(tokens, rows, lengths)
            where = self._all_rows() if rows is None else rows
            outputs = tokens.v.new_empty(*tokens.v.shape[:2], self.shape.heads, self.shape.value_dim)
            for forward, flagged in ((no, ~flags), (yes, flags)):
                at = flagged.nonzero()[:, 0]
                own = None if lengths is None else lengths[at]
                outputs[at] = forward(tokens.map(lambda t, at=at: t[at]), where[at], own)
            return outputs


def only_used(outputs: Tensor, lengths: Tensor) -> Tensor:
    """Outputs (n, T, ...) with zeros behind each row's length: what is not finite there is nobody's."""
    used = torch.arange(outputs.shape[1], device=lengths.device) < lengths[:, None]
    return torch.where(used[:, :, None, None], outputs, 0.0)


def start(
    policy: str | Policy,
    family: str,
    initial: Tensor,
    *,
    key_heads: int | None = None,
    rates: Tensor | None = None,
    seed: int = 0,
    layer: int = 0,
    sequence_ids: Tensor | None = None,
    drafts: int = DRAFTS,
    arithmetic: torch.dtype | None = None,
) -> DecodeState:
    """A decode state that begins at a prefill state, rounded once into every copy.

    policy: text or Policy.  family: a name of ``RECURRENCES``.  initial: (batch, heads, value_dim, key_dim), on the
    device where the state is to live and its inputs are.
    key_heads: number of heads of q and k (default: heads).  rates: A (heads, value_dim, key_dim) for mamba1.
    seed, layer, sequence_ids (batch,): name the random bits of stochastic rounding.  drafts: tokens that one ``verify``
    may take.  arithmetic: torch.float32 or torch.float64, in which everything but the stores is computed.
    Raises InputError for a policy that the family cannot use and for shapes that disagree.
    """
    batch, heads, value_dim, key_dim = checks.initial(initial)
    shape = checks.state_shape(heads, value_dim, key_dim, key_heads)
    checks.options(family, shape, rates, seed, layer, drafts, initial.device)
    state = DecodeState(
        parse_policy(policy),
        family,
        shape,
        batch,
        rates=rates,
        seed=seed,
        layer=layer,
        sequence_ids=sequence_ids,
        drafts=drafts,
        arithmetic=arithmetic,
        device=initial.device,
    )
    state.hand_off(initial)
    return state
