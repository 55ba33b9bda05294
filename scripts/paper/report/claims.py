"""What the papers say, and the rule by which it is judged, in the words of the report's tables."""

from __future__ import annotations

from scripts.paper import published as paper
from scripts.paper.report.learning_rate import BROKEN_BY
from scripts.paper.report.long_runs import ALIKE
from scripts.paper.report.markdown import decimal
from scripts.paper.report.rules import GAP, LONG_ENOUGH, MARGIN_SHARE, MOST
from scripts.paper.report.verdicts import (
    DP_FACTOR,
    ORDER,
    SAME,
    SPEED_UP_TOLERANCE,
    TABLE_1_SHARE,
    TABLE_1_TOLERANCE,
    TOKENS_PER_STEP,
)
from scripts.paper.run_summary import DIVERGED_BY

_S3_FORMATS = " against ".join(decimal(paper.S3_FORMATS[name]) for name in ("int8", "fp8"))
_S3_DP = paper.S3_DP["int8"][1] / paper.S3_DP["fp16"][1]

_FASTER = sum(value > 1 for value in paper.SPEED_UPS)

_MARGIN = MARGIN_SHARE * GAP
_SEEN = (
    f"A gap is seen where the 95% interval of the difference excludes 0 and reaches the paper's gap, or lies "
    f"above {MARGIN_SHARE:g} of it"
)
_GAP = (
    f"{_SEEN}: agrees; in the other direction: contradicts. Not seen: the interval excludes the paper's gap, "
    f"and holds 0 or lies below {MARGIN_SHARE:g} of that gap; in a run of {LONG_ENOUGH:.0%} of the paper's "
    "tokens or more this contradicts. Else open"
)
_MATCH = (
    f"95% interval of the difference within ±{_MARGIN:.3f} ({MARGIN_SHARE:g} of the gap of Figure 1a) of the "
    f"paper's: agrees. {_SEEN} of Figure 1a, in either direction: contradicts. Else open"
)
_TABLE_1 = (
    f"{TABLE_1_SHARE:.0%} of the relative L2 errors within {TABLE_1_TOLERANCE:.0%} of the paper's, at one "
    "shape at least of those tried: agrees; else contradicts"
)
_CONTROLS = (
    "Where no positive control (all seven products in INT8) ends above full precision, the assay is blind "
    "and no match counts: open. Where another full-precision kernel differs, no gap counts: open"
)
_SEEDS = (
    f"a run breaks if it diverges, or ends {BROKEN_BY:g} nats or more above the best of its setting and seed "
    "at lower rates. A seed counts in which one of the two breaks, and the other does, too, or ends as far "
    f"below it. In {MOST:.0%} of these: agrees; it fails in as many: "
)
_SHAPE = "at the shape that fits best"
_MOST = f"in {MOST:.0%} of the runs or more: agrees; it fails in as many: contradicts; else open"
_RATIO = f"error ratio {SAME} or more, {_MOST}"
_SMALL, _LARGE = (f"{tokens:,}" for tokens in TOKENS_PER_STEP)

#: {item: {claim: (what the paper says, the rule)}}
CLAIMS: dict[str, dict[str, tuple[str, str]]] = {
    "table1": {
        "row": (
            f"the errors of Table 1, with P and dS scaled per output row (`row`), {_SHAPE}",
            _TABLE_1,
        ),
        "block": (
            f"the errors of Table 1, with the paper's printed pseudo-code (`block`), {_SHAPE}",
            _TABLE_1,
        ),
    },
    "figure1a": {
        "gap": (
            f"with QK-norm SageBwd ends {paper.FIGURE_1_GAP:.3f} above full precision at 2.1M tokens per "
            "step",
            _GAP,
        ),
        "interaction": (
            f"with QK-norm this gap is {paper.FIGURE_1_INTERACTION:.3f} larger than at an eighth of the "
            "tokens per step",
            f"difference of the two gaps, its interval from both. {_GAP}",
        ),
        "divergence": (
            "without QK-norm SageBwd diverges at 2.1M tokens per step",
            "SageBwd alone diverges (loss or gradient not finite, or a final loss more than "
            f"{DIVERGED_BY:g} above the lowest earlier tenth): agrees; no divergence in a run of "
            f"{LONG_ENOUGH:.0%} of the paper's tokens or more: contradicts; in a shorter one: not seen",
        ),
    },
    "figure1b": {
        "qk_norm": (
            f"with QK-norm SageBwd matches full precision ({paper.FIGURE_1B_GAP:+.3f}) at 260K tokens per "
            "step",
            _MATCH,
        ),
        "no_qk_norm": (
            f"without QK-norm SageBwd matches full precision ({paper.FIGURE_1B_GAP:+.3f}) at 260K tokens per "
            "step",
            _MATCH,
        ),
    },
    "figures2-3": {
        "fastest": (
            f"up to {paper.BEST_SPEED_UP:.2f} times FlashAttention-2",
            f"largest speed-up within {SPEED_UP_TOLERANCE:.0%} of the paper's, or above",
        ),
        "always": (
            f"faster than FlashAttention-2 in {_FASTER} of {len(paper.SPEED_UPS)} cases",
            "at least the paper's share of cases",
        ),
    },
    "figure4": {
        "k_smoothing": (
            "K-smoothing is needed",
            "without it diverged: agrees. The paper prints no loss, so its gap of Figure 1a stands for one. "
            f"{_GAP}",
        ),
        "q_smoothing": ("Q-smoothing on top brings nothing", _MATCH),
    },
    "layers": {
        "gradients": (
            "dQ and dK have larger errors than O and dV",
            f"relative L2 under paper(), mean over layers: min(dQ, dK) > max(O, dV), {_MOST}",
        ),
        "ds": (
            "dS has a larger error than P, dP and δ, of which it is made",
            f"relative L2 in the layer of Table 2, before its own rounding, {_MOST}",
        ),
        "rms": (
            f"the RMS of dS is far below that of dP ({paper.RMS['dp'] / paper.RMS['ds']:,.0f} times)",
            f"within a factor of {ORDER} of the paper's number, {_MOST}",
        ),
        "qk_norm": ("without QK-norm dQ and dK have larger errors", _RATIO),
        "tokens_per_step": (
            "more tokens per step give larger errors of dQ and dK",
            f"{_RATIO}; not seen in place of contradicts, the runs being short",
        ),
    },
    "gradient_formats": {
        "formats": (
            f"INT8 gradients beat FP8 ones (relative L1 of dQ {_S3_FORMATS})",
            f"error of dQ with INT8 below that with either FP8 format, {_MOST}",
        ),
        "dp": (
            f"dP must stay 16-bit: INT8 multiplies the error of dQ by {_S3_DP:.1f}",
            f"factor {DP_FACTOR} or more, {_MOST}",
        ),
    },
    "gradient_bias": {
        "critical": (
            f"gradient noise hides the error of SageBwd at {_SMALL} tokens per step and not at {_LARGE}",
            "tokens per step at which bias² equals the noise of the minibatch, in the q and k projections "
            "together, at the end of each run: "
            "95% interval between the two: agrees; above both: not seen; below both: contradicts; else open",
        ),
        "bottleneck": (
            "dS, of which dQ and dK are made, is what costs accuracy",
            "bias of the q and k projections: with dQ and dK alone in INT8 larger than with O alone: agrees; "
            "smaller: contradicts; 95% intervals overlap: open",
        ),
    },
    "large_logits": {
        "gap": (
            f"SageBwd ends {paper.FIGURE_1_GAP:.3f} above full precision, tried with large logits",
            f"{_GAP}. {_CONTROLS}",
        ),
    },
    "one_batch": {
        "gap": (
            f"SageBwd ends {paper.FIGURE_1_GAP:.3f} above full precision where no gradient noise hides its "
            "error, tried on one batch",
            f"{_GAP}. {_CONTROLS}",
        ),
    },
    "long_runs": {
        "gap": (
            f"SageBwd ends {paper.FIGURE_1_GAP:.3f} above full precision at many tokens per step, tried over "
            "a billion tokens",
            _GAP,
        ),
        "match": (
            f"SageBwd matches full precision ({paper.FIGURE_1B_GAP:+.3f}) at an eighth of them, tried over a "
            "billion tokens",
            _MATCH,
        ),
        "interaction": (
            f"the gap is {paper.FIGURE_1_INTERACTION:.3f} larger at many tokens per step, tried over a "
            "billion tokens",
            f"difference of the two gaps, its interval from both. {_GAP}. Full precision must end within "
            f"{ALIKE:g} at both: else open",
        ),
    },
    "learning_rate": {
        "breaks": (
            "without QK-norm SageBwd diverges where full precision does not, tried by learning rate",
            f"it breaks at a lower rate; {_SEEDS}not seen; else open",
        ),
        "stable": (
            "with QK-norm SageBwd is stable, tried by learning rate",
            f"it breaks at no lower rate than full precision; {_SEEDS}contradicts; else open",
        ),
    },
    "equal_loss": {
        "qk_norm": ("without QK-norm dQ and dK have larger errors, tried at equal loss", _RATIO),
        "tokens_per_step": (
            "more tokens per step give larger errors of dQ and dK, tried at equal loss",
            f"{_RATIO}; not seen in place of contradicts, the runs being short",
        ),
    },
    "finetune": {"match": ("fine-tuning with SageBwd ends like full precision", _MATCH)},
}
