"""What the papers say, and the rule by which it is judged, in the words of the report's tables."""

from __future__ import annotations

from scripts.paper import published as paper
from scripts.paper.report.markdown import decimal
from scripts.paper.report.verdicts import (
    DP_FACTOR,
    EXACT_BELOW,
    MARGIN,
    ORDER,
    SAME,
    SPEED_UP_TOLERANCE,
    TABLE_1_SHARE,
    TABLE_1_TOLERANCE,
)
from scripts.paper.run_summary import DIVERGED_BY

_FIGURE_1B_GAP = paper.FIGURE_1[262144]["sagebwd", True] - paper.FIGURE_1[262144]["fpa", True]
_S3_FORMATS = " against ".join(decimal(paper.S3_FORMATS[name]) for name in ("int8", "fp8"))
_S3_DP = paper.S3_DP["int8"][1] / paper.S3_DP["fp16"][1]

_FASTER = sum(value > 1 for value in paper.SPEED_UPS)

_GAP = (
    f"95% interval of the difference above 0: agrees; below {MARGIN:.3f} (half the paper's gap) in runs as "
    "long as the paper's: does not"
)
_MATCH = f"95% interval of the difference within ±{MARGIN:.3f}: agrees; outside: does not"
_TABLE_1 = f"{TABLE_1_SHARE:.0%} of the relative L2 errors within {TABLE_1_TOLERANCE:.0%} of the paper's"
_ALL = "all runs: agrees; none: does not"
_RATIO = f"error ratio {SAME} or more in all pairs: agrees; 1/{SAME} or less in all: does not"

#: {item: {claim: (what the paper says, the rule)}}
CLAIMS: dict[str, dict[str, tuple[str, str]]] = {
    "table1": {
        "row": ("the errors of Table 1, with P and dS scaled per output row (`row`)", _TABLE_1),
        "block": ("the errors of Table 1, with the paper's printed pseudo-code (`block`)", _TABLE_1),
    },
    "figure1a": {
        "gap": (
            f"with QK-norm SageBwd ends {paper.FIGURE_1_GAP:.3f} above full precision at 2.1M tokens per "
            "step",
            _GAP,
        ),
        "divergence": (
            "without QK-norm SageBwd diverges at 2.1M tokens per step",
            "SageBwd alone diverges (loss or gradient not finite, or a final loss more than "
            f"{DIVERGED_BY:g} above the lowest earlier tenth): agrees; no divergence in a run as long as the "
            "paper's: does not",
        ),
    },
    "figure1b": {
        "qk_norm": (
            f"with QK-norm SageBwd matches full precision ({_FIGURE_1B_GAP:+.3f}) at 260K tokens per step",
            _MATCH,
        ),
        "no_qk_norm": (
            f"without QK-norm SageBwd matches full precision ({_FIGURE_1B_GAP:+.3f}) at 260K tokens per step",
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
        "k_smoothing": ("K-smoothing is needed", f"without it, diverged or: {_GAP}"),
        "q_smoothing": ("Q-smoothing on top brings nothing", _MATCH),
    },
    "layers": {
        "gradients": (
            "dQ and dK have larger errors than O and dV",
            f"relative L2 under paper(), mean over layers: min(dQ, dK) > max(O, dV); {_ALL}",
        ),
        "ds": (
            "dS has a larger error than P, dP and δ, of which it is made",
            f"relative L2 in the layer of Table 2; {_ALL}",
        ),
        "dp": ("dP is exact", f"relative L2 in the layer of Table 2 below {EXACT_BELOW:g}; {_ALL}"),
        "rms": (
            f"the RMS of dS is far below that of dP ({paper.RMS['dp'] / paper.RMS['ds']:,.0f} times)",
            f"{ORDER} times or more; {_ALL}",
        ),
        "qk_norm": ("without QK-norm dQ and dK have larger errors", _RATIO),
        "tokens_per_step": ("more tokens per step give larger errors of dQ and dK", _RATIO),
    },
    "gradient_formats": {
        "formats": (
            f"INT8 gradients beat FP8 ones (relative L1 of dQ {_S3_FORMATS})",
            f"error of dQ with INT8 below that with either FP8 format; {_ALL}",
        ),
        "dp": (
            f"dP must stay 16-bit: INT8 multiplies the error of dQ by {_S3_DP:.1f}",
            f"factor {DP_FACTOR} or more; {_ALL}",
        ),
    },
    "finetune": {"match": ("fine-tuning with SageBwd ends like full precision", _MATCH)},
}
