"""The compiled module built from `native/`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

RECORD_SIZE: int
INSTRUCTION_SET: str
MAX_DRAFT_TOKENS: int

def sample(
    logits: npt.NDArray[np.float32],
    records: npt.NDArray[np.uint8],
    stop_ids: npt.NDArray[np.int32] | None = None,
    bias_ids: npt.NDArray[np.int32] | None = None,
    bias_values: npt.NDArray[np.float32] | None = None,
    history: npt.NDArray[np.int32] | None = None,
    extra: npt.NDArray[np.int32] | None = None,
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Sample one token per row; return tokens [rows] and logprobs [rows].

    `logits` is [rows, vocab] with any row stride; it is not modified. `records` is
    [rows, RECORD_SIZE], the bytes of `sampling.RECORD`; the flat arrays are those its ragged
    fields index, `history` is [slots, length]. Releases the GIL. A row that cannot be sampled
    (see `torch_sampler`) gets token -1 and logprob NaN. Raises `ValueError` for shapes that do
    not fit together and `TypeError` for other dtypes.
    """

class Draft:
    """Drafted tokens, parents before their children.

    `parents[i]` is the index of the token that `token_ids[i]` follows, -1 at the context's end;
    `scores[i]` is the estimated probability of the whole path up to that token.
    """

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def parents(self) -> list[int]: ...
    @property
    def scores(self) -> list[float]: ...
    def __len__(self) -> int: ...

class GroupTree:
    """The suffix tree of one group's responses, and drafts from it. See docs/drafts.md.

    All methods may be called from any thread: drafts run at the same time, an `append` runs alone.
    """

    def __init__(self, prompt: npt.NDArray[np.int32] | Sequence[int] = (), max_bytes: int = 2**30) -> None:
        """`prompt` comes before the first token of every request; past `max_bytes` appends are refused."""

    def append(
        self, request_id: int, prev_token_count: int, tokens: npt.NDArray[np.int32] | Sequence[int]
    ) -> None:
        """Add the tokens that follow a request's first `prev_token_count` output tokens.

        Known tokens are skipped. From the first that differs, the request continues with the new
        ones; the old ones stay as another branch. Releases the GIL. Raises `ValueError`,
        with nothing appended, for negative tokens, for a gap (the message names the length to send
        from), and when the tree has reached `max_bytes`.
        """

    def draft(
        self,
        source: int | npt.NDArray[np.int32] | Sequence[int],
        max_tokens: int,
        top_k: int = 1,
        min_score: float = 0.0,
        max_depth: int | None = None,
        own: int = -1,
    ) -> Draft:
        """Draft what follows a request's tokens (`source` is its id), or a context (its tokens).

        With a context, the tokens of request `own` weigh more than others (-1: those of none).

        At most `max_tokens` (up to MAX_DRAFT_TOKENS) in all, on at most `top_k` paths (leaves) of
        at most `max_depth` tokens, the most probable first, none with a score under `min_score`.
        Raises `ValueError` for an unknown request.
        """

    def matches(self, context: Sequence[int]) -> list[tuple[int, int]]:
        """Return (matched length, next token) of every place a draft after `context` begins from."""

    def length(self, request_id: int) -> int | None:
        """Return how many output tokens of a request are known, None if it is unknown."""

    @property
    def bytes(self) -> int:
        """Memory held."""

    @property
    def tokens(self) -> int:
        """Tokens held: the prompt and every branch of every request."""

class StepDrafter:
    """Makes the drafts of whole steps from the tokens just drawn.

    `slots` requests at most have one each. All methods may be called from any thread, and wait without the
    GIL where they have to. It keeps the trees that it uses. `native/drafts/step_drafter.hpp` has its
    invariants.
    """

    def __init__(self, slots: int, patience: float = 1e-4) -> None:
        """`patience`, 0 to 1 s: how long a step waits for a feed; then it goes without drafts."""

    def set(
        self,
        slot: int,
        tree: GroupTree | None,
        index: int,
        common_name: int,
        prompt_length: int,
        tokens: npt.NDArray[np.int32],
        limit: int,
        stop_ids: Sequence[int] = (),
        placeholder: int = -1,
    ) -> int:
        """Give a request a slot, and feed its output so far to its trees; return its generation.

        `tokens` are its prompt, of `prompt_length` tokens, and its output. It is `index` in `tree` (None: no
        drafts of a group), and `common_name` in the common tree (-1: not in there). No draft goes beyond the
        chunk's `limit` tokens, prompt included, or has the `placeholder` or what follows one of `stop_ids`.
        A generation, 1 or more, is that of no other request. Raises `ValueError` for a slot that there is
        not, for negative tokens and for a prompt longer than `tokens`; that a tree refuses is counted.
        """

    def clear(self, slot: int) -> None:
        """Take a slot from its request: its rows draft nothing from now on."""

    def use_common(self, tree: GroupTree | None) -> None:
        """Use this tree of all groups for drafts where a group's own tree has worse ones; None: none.

        All requests' outputs are fed to it first.
        """

    def feed(
        self,
        tree: GroupTree,
        request_id: int,
        prev_token_count: int,
        tokens: npt.NDArray[np.int32] | Sequence[int],
    ) -> None:
        """Append to a tree in pieces of 64 tokens, so that no step waits for more than one of them.

        Raises `ValueError` as `GroupTree.append` does; pieces before the one that is refused stay.
        """

    def stall(self, seconds: float) -> None:
        """For tests: from now on each step first sleeps at random, so long at most; a third have no drafts.

        Raises `ValueError` unless it is 0, which ends that, to 1 s.
        """

    @property
    def refused(self) -> int:
        """How often a tree refused tokens: each time a row had no draft, or a slot began with nothing fed."""

    @property
    def missed(self) -> int:
        """Steps that went without drafts, as they had waited for long enough; what they drew is not lost."""

    @property
    def seconds(self) -> float:
        """How long all steps took."""

    @property
    def waited(self) -> float:
        """How many of these seconds steps waited for feeds and changes of slots."""

class DraftStep:
    """One step's rows, to be run by `run` or, without Python, by a call of RUN_DRAFT_STEP with `address`."""

    def __init__(
        self,
        drafter: StepDrafter,
        slots: npt.NDArray[np.int32],
        generations: npt.NDArray[np.int64],
        sampled: npt.NDArray[np.int32],
        num_sampled: npt.NDArray[np.int32],
        out_drafts: npt.NDArray[np.int32],
        out_counts: npt.NDArray[np.int32],
        out_scores: npt.NDArray[np.float32],
        paths: int = 1,
        out_parents: npt.NDArray[np.int32] | None = None,
    ) -> None:
        """Take the arrays of n rows as they are; they are read and filled when the step runs.

        Row i is the request of `generations[i]` in `slots[i]`, and does nothing if the slot is another's by
        then. It drew the first `num_sampled[i]` tokens of `sampled[i]`, which are appended to its output and
        its trees; where there are none, it does nothing. Its draft is the first `out_counts[i]` tokens of
        `out_drafts[i]` [n, k]; the last token drawn fills the others, as -1 has no embedding (0 where none
        was), and 0 the others of `out_scores` [n, k].

        With several `paths`, a draft is a tree of at most so many leaves, of which `out_parents` [n, k] gets
        the parents, as in `Draft`. Without that, its paths lie one after the other, the first one along every
        token's best child: each has (k + 1) / paths - 1 places, with one between them; the last token drawn
        and 0 fill all that is not drafted, and `out_counts` counts once what paths share.
        Raises `ValueError` for shapes that do not fit.
        """

    def run(self) -> None:
        """Make the drafts. Releases the GIL; raises nothing."""

    @property
    def address(self) -> int:
        """The argument of RUN_DRAFT_STEP, valid as long as this object."""

RUN_DRAFT_STEP: int
"""Address of a C function `void(void *)`, for `cuLaunchHostFunc`: it runs the step at that address."""

def rate_drafts(
    scores: npt.NDArray[np.float32],
    lengths: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int64],
    edges: npt.NDArray[np.float32],
    bases: npt.NDArray[np.int64],
    rates: npt.NDArray[np.float64],
    out_cells: npt.NDArray[np.int32],
    out_chances: npt.NDArray[np.float64],
) -> None:
    """Fill the cells of drafts' tokens and their chances, both [n, width] as `scores`.

    The cell of a token at place k is `bases[k]` plus how many of `edges` its score reaches. Its
    chance, that it and all before it are accepted, is the least of `rates[slots[i], cell]` up to it, 0
    from `lengths[i]` on. Raises `ValueError` for shapes that do not fit, and slots and bases out of
    `rates`.
    """

def choose_drafts(
    chances: npt.NDArray[np.float64],
    seconds: npt.NDArray[np.float64],
    others: float,
    price: float,
    weights: npt.NDArray[np.float64] | None,
    out_keep: npt.NDArray[np.int32],
) -> None:
    """Fill how many tokens of each draft to verify; `draft_budget.best` explains.

    Raises `ValueError` for shapes that do not fit.
    """

def accept_drafts(
    tokens: npt.NDArray[np.int32],
    logprobs: npt.NDArray[np.float32],
    counts: npt.NDArray[np.int32],
    drafts: npt.NDArray[np.int32],
    rejected: int,
    out_tokens: npt.NDArray[np.int32],
    out_logprobs: npt.NDArray[np.float32],
) -> None:
    """Spread samples [sum(counts) + n] over `out_tokens` and `out_logprobs`, both [n, most drafts + 1].

    Row i has `counts[i] + 1` samples. `rejected` fills the tokens behind the first one that is not the draft
    in its place, and 0 the logprobs behind the last sample. Raises `ValueError` for shapes that do not fit.
    """

def draft_lists(token_ids: npt.NDArray[np.int32], keep: npt.NDArray[np.int32]) -> list[list[int]]:
    """Return the first `keep[i]` tokens of each draft, of `token_ids` [n, width].

    Raises `ValueError` for shapes that do not fit, and for `keep` out of range.
    """

def count_drafts(
    cells: npt.NDArray[np.int32],
    keep: npt.NDArray[np.int32],
    accepted: npt.NDArray[np.int32],
    slots: npt.NDArray[np.int64],
    fresh: npt.NDArray[np.int64],
    untold: npt.NDArray[np.int64],
) -> None:
    """Add to both tallies [slots, 2, cells] the `keep[i]` first tokens of each draft: verified, accepted.

    The first `accepted[i]` were accepted; -1 where none was verified. Raises `ValueError` for shapes
    that do not fit, and for slots, cells and `keep` out of range.
    """

runner_kernels: Any
"""A module; `services/engine/vllm/cpu_kernels.py` passes its functions addresses and sizes."""
