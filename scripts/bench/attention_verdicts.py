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
    """A line for each mask and head size about forward + backward, and one for faster kernels of SageBwd."""
    timed = [row for row in rows if row.mode == "both" and row.status == PASSED and row.median_ms]
    groups: dict[tuple[str, int], dict[int, dict[str, float]]] = {}
    for row in timed:
        times = groups.setdefault((row.shape.mask, row.shape.head_dim), {}).setdefault(row.shape.tokens, {})
        times[row.implementation] = row.median_ms
    lines = []
    for (mask, head_dim), by_length in groups.items():
        found = _compare(by_length)
        lines += [f"{mask}, D {head_dim}: {line}" for line in found]
    missing = (
        []
        if any(row.implementation == DEFAULT for row in timed)
        else [f"{title(DEFAULT)} was not timed: {_why(rows)}"]
    )
    return [*lines, *missing]


def _compare(by_length: dict[int, dict[str, float]]) -> list[str]:
    """The verdict on {tokens: {implementation: ms}}, and whether other kernels of SageBwd are faster."""
    lines, slower, faster, forced = [], {}, {}, {}
    for tokens, times in sorted(by_length.items()):
        others = {name: ms for name, ms in times.items() if not name.startswith(DEFAULT)}
        if DEFAULT not in times or not others:
            continue
        best = min(others, key=others.__getitem__)
        speedup = others[best] / times[DEFAULT]
        (faster if speedup >= 1 else slower)[tokens] = (best, speedup)
        own = {name: ms for name, ms in times.items() if name.startswith(f"{DEFAULT} (")}
        if own and min(own.values()) < times[DEFAULT]:
            name = min(own, key=own.__getitem__)
            forced[tokens] = (name.removeprefix(f"{DEFAULT} (").rstrip(")"), times[DEFAULT] / own[name])
    if faster:
        lines.append(f"{title(DEFAULT)} is the fastest, {_listed(faster)}")
    if slower:
        names = dict.fromkeys(best for best, _ in slower.values())
        instead = " or ".join(f"{title(name)}, {HOW.get(name, name)}" for name in names)
        lines.append(f"{title(DEFAULT)} is slower, {_listed(slower)}: use {instead}")
    if forced:
        lines += [
            f'kernels="{name}" is {speedup:.2f} times as fast as what runs by default (N {tokens})'
            for tokens, (name, speedup) in forced.items()
        ]
    return lines


def _listed(found: dict[int, tuple[str, float]]) -> str:
    return ", ".join(
        f"{speedup:.2f} × {title(name)} (N {tokens})" for tokens, (name, speedup) in found.items()
    )


def _why(rows: list[Row]) -> str:
    """Why the default has no time."""
    reasons = dict.fromkeys(row.reason or row.status for row in rows if row.implementation == DEFAULT)
    return "; ".join(reasons) or "it was wrong, or there was no time"
