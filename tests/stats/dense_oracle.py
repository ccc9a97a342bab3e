"""The statistics by their definitions: NumPy, float64, one explicit row of scores at a time.

Written from the definitions alone. It shares no code with the package and is slow on purpose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

FLOAT16_MAX = 65504.0


def array(x: torch.Tensor | None) -> np.ndarray | None:
    return None if x is None else x.detach().to(torch.float64).numpy()


def rounded(x: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    return torch.as_tensor(np.asarray(x)).to(dtype).to(torch.float64).numpy()


def statistics(
    q: torch.Tensor | None = None,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    output: torch.Tensor | None = None,
    *,
    masks: Sequence[torch.Tensor] = (),
    causal: bool = False,
    scale: float | torch.Tensor = 1.0,
    softcap: float | None = None,
    score_mod=None,
    mask_mod=None,
    sink: torch.Tensor | None = None,
    scores: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    fused: bool = True,
    input_rms: float | None = None,
) -> dict[str, np.ndarray]:
    """Name -> [H], and `row_entropy` [B, H, Q]."""
    with np.errstate(all="ignore"):
        if scores is not None:
            B, H, Q, K = scores.shape
        else:
            (B, H, Q, _), K = q.shape, k.shape[2]
        arrays = {n: array(x) for n, x in (("q", q), ("k", k), ("v", v), ("output", output))}
        planes = [(m.dtype == torch.bool, np.broadcast_to(array(m), (B, H, Q, K))) for m in masks]
        scales = np.broadcast_to(
            array(scale) if isinstance(scale, torch.Tensor) else np.float64(scale), (B, H, 1, 1)
        )[:, :, 0, 0]
        given = array(scores)
        heads = []
        row_entropy = np.full((B, H, Q), np.nan)
        for h in range(H):
            rows = []
            for b in range(B):
                for i in range(Q):
                    row = _row(
                        arrays["q"],
                        arrays["k"],
                        (b, h, i),
                        H,
                        planes=planes,
                        causal=causal,
                        scale=float(scales[b, h]),
                        softcap=softcap,
                        score_mod=score_mod,
                        mask_mod=mask_mod,
                        given=given,
                        dtype=dtype,
                    )
                    if sink is not None and row["counts"]:
                        extra = float(array(sink.expand(B, H, Q, 1))[b, h, i, 0])
                        row["sink"] = 1 / (1 + math.exp(row["lse"] - extra))
                    rows.append(row)
                    row_entropy[b, h, i] = row["H"] if row["counts"] else np.nan
            head = _head(rows)
            head |= _tensors(arrays, rows, h, H, B, Q)
            head["fp16_scores"] = float(not fused and dtype == torch.float16)
            head["input_rms"] = math.nan if input_rms is None else input_rms
            heads.append(head)
    result = {name: np.array([head[name] for head in heads]) for name in heads[0]}
    result["row_entropy"] = row_entropy
    return result


def _row(q, k, place, H, *, planes, causal, scale, softcap, score_mod, mask_mod, given, dtype):
    b, h, i = place
    pairs = None
    if q is not None and k is not None:
        g = h // (H // k.shape[1])
        pairs = (q[b, h, i] * k[b, g]).sum(-1)
    K = len(pairs) if given is None else given.shape[-1]
    dropped = np.zeros(K, bool)
    bias = np.zeros(K)
    for is_bool, plane in planes:
        if is_bool:
            dropped |= plane[b, h, i] == 0
        else:
            bias = bias + plane[b, h, i]
    softly = ~(bias > -9e3)
    if given is None:
        if causal:
            dropped |= np.arange(K) > i
        raw = scale * pairs
        s = raw if softcap is None else softcap * np.tanh(raw / softcap)
        if score_mod is not None:
            indices = (torch.tensor(b), torch.tensor(h), torch.tensor(i), torch.arange(K))
            s = score_mod(torch.from_numpy(np.array(raw)), *indices).numpy()
        if mask_mod is not None:
            indices = (torch.tensor(b), torch.tensor(h), torch.tensor(i), torch.arange(K))
            dropped |= ~np.broadcast_to(mask_mod(*indices).numpy(), (K,))
        s = s + bias
        if score_mod is not None:
            softly |= s == -np.inf
        trouble = ~dropped & np.where(softly, np.isnan(s) | (s == np.inf), ~np.isfinite(s))
        visible = ~dropped & ~softly
        n = int(visible.sum())
    else:
        raw = np.full(K, np.nan) if pairs is None else scale * pairs
        s = given[b, h, i]
        trouble = np.isnan(s) | (s == np.inf)
        if not planes and pairs is not None:  # what was added to the products tells a mask
            softly = s - raw <= -9e3
        elif not planes:
            finite = s[np.isfinite(s)]
            top = finite.max() if len(finite) else -np.inf
            softly = ((s <= -9e3) & (s < top - 5e3)) | (s <= -6e4)
        visible = ~dropped & ~softly & (s != -np.inf)
        n = int((visible & np.isfinite(s)).sum()) + int(trouble.sum())
    out = {"n": n, "trouble": int(trouble.sum()), "place": place, "scale": scale}
    seen = visible & np.isfinite(s)
    S = s[seen]
    raw_seen = raw[visible & np.isfinite(raw)]
    out["raw"] = raw_seen
    out["S"] = S
    out["keys_of_raw"] = np.flatnonzero(visible & np.isfinite(raw))
    out["counts"] = n >= 2 and not trouble.any()
    out["sound"] = n >= 1 and not trouble.any()
    out["has_pairs"] = pairs is not None
    if len(S):
        m = S.max()
        e = np.exp(S - m)
        p = e / e.sum()
        out["lse"] = m + math.log(e.sum())
        out["H"] = float(-(p * np.where(p > 0, np.log(np.where(p > 0, p, 1)), 0)).sum())
        out["pp"] = float(_one_minus_square(e))
        out["top"] = p.max()
        out["gap"] = m - S.mean()
        out["std"] = S.std()
        out["first"] = p[0] if seen[0] else 0.0
        r = rounded(S.astype(np.float32), dtype)
        out["tied"] = (r == r.max()).sum() >= 2
        rest = (e.sum() - 1) / e.sum()  # how far the largest p is from 1
        out["saturated"] = rest <= torch.finfo(dtype).eps / 4
    else:
        out["H"] = math.nan
    leaks = softly & ~dropped & np.isfinite(s)
    out["leak"] = False
    if leaks.any():
        alive = np.isfinite(s) & ~dropped
        top = s[alive].max()
        w = np.exp(s - top) / np.exp(s[alive] - top).sum()
        out["leak"] = bool((w[leaks] > 1e-6).any())
    return out


def _one_minus_square(e):
    """sum_i p_i (1 - p_i) without a difference of numbers close to 1."""
    total = e.sum()
    others = np.array([np.delete(e, j).sum() for j in range(len(e))])
    return (e * others).sum() / total**2


def _head(rows):
    counting = [r for r in rows if r["counts"]]
    all_s = np.concatenate([r["S"] for r in rows])
    all_raw = np.concatenate([r["raw"] for r in rows])
    lse = [r["lse"] for r in rows if r["sound"]]

    def mean(f):
        return float(np.mean([f(r) for r in counting])) if counting else math.nan

    def top(x):
        return float(np.max(x)) if len(x) else math.nan

    ratios = [r["H"] / math.log(r["n"]) for r in counting]
    pairs = any(r["has_pairs"] for r in rows)
    products = np.concatenate(
        [r["raw"] / r["scale"] if r["scale"] else r["raw"] * np.nan for r in rows]
    )
    return {
        "max_logit": top(all_s),
        "min_logit": -top(-all_s),
        "abs_max_logit": top(np.abs(all_s)),
        "qk_abs_max_logit": top(np.abs(all_raw)),
        "lse_max": top(lse),
        "lse_min": -top([-x for x in lse]),
        "entropy": mean(lambda r: r["H"]),
        "entropy_ratio": float(np.mean(ratios)) if ratios else math.nan,
        "entropy_hist": np.histogram(np.clip(ratios, 0, 1), bins=16, range=(0, 1))[0],
        "softmax_slope": sum(r["pp"] for r in counting) / sum(r["n"] for r in counting)
        if counting
        else math.nan,
        "jacobian_trace": mean(lambda r: r["pp"]),
        "top_weight": mean(lambda r: r["top"]),
        "top_weight_max": top([r["top"] for r in counting]),
        "logit_gap": mean(lambda r: r["gap"]),
        "logit_std": mean(lambda r: r["std"]),
        "first_key_mass": mean(lambda r: r["first"]),
        "sink_mass": float(np.mean([r["sink"] for r in counting if "sink" in r]))
        if any("sink" in r for r in counting)
        else math.nan,
        "tied_max_rows": mean(lambda r: r["tied"]),
        "saturated_rows": mean(lambda r: r["saturated"]),
        "fp16_headroom_log2": math.log2(
            FLOAT16_MAX / max(top(np.abs(products)), float(np.finfo(np.float32).tiny))
        )
        if len(products) and not np.isnan(products).all()
        else math.nan,
        "fp16_overflow_unscaled": int((np.abs(products) > FLOAT16_MAX).sum())
        if pairs
        else math.nan,
        "fp16_overflow_scaled": int((np.abs(all_s) > FLOAT16_MAX).sum()),
        "nonfinite_scores": sum(r["trouble"] for r in rows),
        "masked_rows": sum(r["n"] == 0 for r in rows),
        "mask_leak": sum(r["leak"] for r in rows),
        "rows": len(rows),
        "entropy_rows": len(counting),
        "keys": max(r["n"] for r in rows),
    }


def _tensors(arrays, rows, h, H, B, Q):
    """Norms, the peak pair, and what is not finite in the tensors themselves."""
    out = {}
    for name in ("q", "k"):
        x = arrays[name]
        norms = np.array([])
        if x is not None:
            norms = np.linalg.norm(x[:, h // (H // x.shape[1])], axis=-1)
            norms = norms[np.isfinite(norms)]
        out[f"{name}_norm_max"] = norms.max() if len(norms) else math.nan
        out[f"{name}_norm_mean"] = norms.mean() if len(norms) else math.nan
    for name in ("q", "k", "v"):
        x = arrays[name]
        bad = math.nan if x is None else int((~np.isfinite(x[:, h // (H // x.shape[1])])).sum())
        out[f"nonfinite_{name}"] = bad
    masked = np.array([r["n"] == 0 for r in rows]).reshape(B, Q)
    x = arrays["output"]
    bad = None if x is None else (~np.isfinite(x[:, h])).sum(-1)
    out["nonfinite_output"] = math.nan if bad is None else int(bad[~masked].sum())
    out["nonfinite_masked_output"] = math.nan if bad is None else int(bad[masked].sum())
    causes = [out[f"nonfinite_{n}"] for n in ("q", "k")]
    causes.append(sum(r["trouble"] for r in rows))
    causes += [out[f"nonfinite_{n}"] for n in ("v", "output")]
    out["nonfinite"] = next((c for c in causes if c > 0), 0)
    out |= _peak(arrays, rows, h, H)
    return out


def _peak(arrays, rows, h, H):
    names = ("peak_logit", "peak_q_norm", "peak_k_norm", "peak_cosine", "scale")
    best = None
    for r in rows:
        for raw, j in zip(r["raw"], r["keys_of_raw"], strict=True):
            if best is None or abs(raw) > abs(best[0]):
                best = (raw, r["place"], j, r["scale"])
    if best is None:
        return dict.fromkeys(names, math.nan)
    raw, (b, _, i), j, scale = best
    q = arrays["q"][b, h, i]
    k = arrays["k"][b, h // (H // arrays["k"].shape[1]), j]
    norms = np.linalg.norm(q), np.linalg.norm(k)
    cosine = (q @ k) / (norms[0] * norms[1])
    return dict(zip(names, (raw, *norms, cosine, scale), strict=True))
