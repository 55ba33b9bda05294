"""What follows from timings of attention on one GPU: whether SageBwd pays, and what to use if it does not."""

from __future__ import annotations

from scripts.bench.attention_tables import DEFAULT, PASSED, Row, title

#: How to use an implementation in full precision, by the name of its rows.
HOW = {
    "cuDNN": "torch.nn.attention.sdpa_kernel(SDPBackend.CUDNN_ATTENTION)",
    "FlashAttention-2": "torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION)",
    "FlexAttention": "torch.nn.attention.flex_attention",
    "flash_attn package": "flash_attn.flash_attn_func",
    "FlashAttention-3": "flash_attn_interface.flash_attn_func",
    "FlashAttention-4": "flash_attn.cute.flash_attn_func",
    "SDPA math": "torch.nn.functional.scaled_dot_product_attention",
}


def verdicts(rows: list[Row]) -> list[str]:
    """Lines about forward + backward, for each mask and head size: what is fastest at which length."""
    timed = [row for row in rows if row.mode == "both" and row.status == PASSED and row.median_ms]
    groups: dict[tuple[str, int], dict[int, dict[str, float]]] = {}
    for row in timed:
        times = groups.setdefault((row.shape.mask, row.shape.head_dim), {}).setdefault(row.shape.tokens, {})
        times[row.implementation] = row.median_ms
    lines = [
        f"{mask}, D {head_dim}: {line}"
        for (mask, head_dim), by_length in groups.items()
        for line in _compare(by_length)
    ]
    if not any(row.implementation == DEFAULT for row in timed):
        lines.append(f"{title(DEFAULT)} was not timed: {_why(rows)}")
    return lines


def _compare(by_length: dict[int, dict[str, float]]) -> list[str]:
    """The verdict on {tokens: {implementation: ms}}."""
    faster, slower, forced, instead = [], [], [], []
    for tokens, times in sorted(by_length.items()):
        others = [name for name in times if not name.startswith(DEFAULT)]
        own = [name for name in times if name == DEFAULT or name.startswith(f"{DEFAULT} (")]
        if DEFAULT not in times or not others:
            continue
        best_own, best = (min(names, key=times.__getitem__) for names in (own, others))
        speedup = times[best] / times[DEFAULT]
        (faster if speedup >= 1 else slower).append(f"{speedup:.2f} × {title(best)} (N {tokens})")
        if best_own != DEFAULT:
            over_default, over_best = (times[name] / times[best_own] for name in (DEFAULT, best))
            kernels = best_own.removeprefix(f"{DEFAULT} (").rstrip(")")
            speedups = f"{over_default:.2f} × what runs by default, {over_best:.2f} × {title(best)}"
            forced.append(f'with kernels="{kernels}" {speedups} (N {tokens})')
        if times[best] < times[best_own]:
            instead.append(best)
    lines = [f"{title(DEFAULT)} is the fastest, {', '.join(faster)}"] if faster else []
    lines += [f"{title(DEFAULT)} is slower, {', '.join(slower)}"] if slower else []
    lines += forced
    ways = (f"{title(name)}, {HOW.get(name, name)}" for name in dict.fromkeys(instead))
    return [*lines, f"use instead: {' or '.join(ways)}"] if instead else lines


def _why(rows: list[Row]) -> str:
    """Why the default has no time."""
    reasons = dict.fromkeys(row.reason or row.status for row in rows if row.implementation == DEFAULT)
    return "; ".join(reasons) or "it was wrong, or there was no time"
