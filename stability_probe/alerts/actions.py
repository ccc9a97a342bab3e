"""What to do about it: short advice, chosen by the cause.

Sources: QK-norm, Dehghani et al. 2023 (arXiv 2302.05442) and Wortsman et al. 2023
(arXiv 2309.14322); QK-Clip, Kimi K2 (arXiv 2507.20534); sigma-Reparam, Zhai et al. 2023
(arXiv 2303.06296).
"""

from __future__ import annotations

from stability_probe.alerts.cause import INPUT_SHARE, Driver, driver
from stability_probe.alerts.evidence import Evidence

QK_NORM = "QK-norm on queries and keys: the logit then has a bound"
LOWER_RATE = "lower the learning rate of W_q and W_k, or warm up longer"
WEIGHT_DECAY = "weight decay on W_q and W_k"
QK_CLIP = "QK-clip: rescale W_q and W_k of these heads after the update (tau = 100)"
SOFT_CAP = "soft-cap only while the logits before the cap are watched: it hides their growth"
CLAMP_SCALE = "clamp the learned scale, or give it a lower learning rate"
LOOK_AT_INPUT = "look at what feeds the layer: its input grew too (pre-norm, residual scaling)"
LOOK_AT_DATA = "look for repeated or degenerate batches: q and k align"
RECORD_NORMS = "record q_norm_max and k_norm_max so that the cause can be split"
FP32_LOGITS = "form q.k in float32, or train in bfloat16"
SCALE_FIRST = "scale q before the product, not after"
FROM_CHECKPOINT = "go back to a checkpoint from before this step"
SKIP_BATCH = "skip the batch, and look at it"
FULLY_MASKED = "look for rows without any visible key: fully masked or padded queries"
GRAD_SCALER = "nothing while GradScaler searches; if it goes on, lower the learning rate"
CLIP_GRADIENT = "skip updates whose gradient norm is not finite"
BACKWARD_IN_FLOAT32 = "try another attention backend (sdpa_kernel), or attention in float32"
LOOK_DOWNSTREAM = "look at what comes after this layer: the loss, its scale, the layers between"
LOOK_BELOW = "look at what feeds this layer: an overflow in the MLP or the residual stream below"
UPDATE_CALLS = "if no scaler is in use, call probe.step() once after each optimizer.step()"
GIVE_OPTIMIZER = "pass the optimizer: watch(model, optimizer=optimizer) sees skipped updates"
GIVE_LOSS = "pass the loss: probe.step(loss=loss)"
CHECK_SCALE = "look at the scale on q.k (1 / sqrt of the head width) and at the initialisation"
HALF_NORMS = "normalise queries and keys in float32: a float16 norm overflows from 65504 on"
RAISE_SIGNAL = "look for queries or keys that are zero: a dead norm, a mask, a detached input"
START_AGAIN = "start again with a lower learning rate or a longer warm-up: little was learned"
LOOK_ELSEWHERE = "look at what is not attention: data, head and MLP, their learning rates"

_BY_DRIVER = {
    Driver.NORMS: (QK_NORM, LOWER_RATE, WEIGHT_DECAY, QK_CLIP, SOFT_CAP),
    Driver.SCALE: (CLAMP_SCALE, LOWER_RATE, SOFT_CAP),
    Driver.ALIGNMENT: (LOWER_RATE, LOOK_AT_DATA, QK_NORM, SOFT_CAP),
    Driver.REST: (LOWER_RATE, CLAMP_SCALE, QK_NORM, SOFT_CAP),
    Driver.UNKNOWN: (QK_NORM, LOWER_RATE, WEIGHT_DECAY, QK_CLIP, SOFT_CAP, RECORD_NORMS),
}


def growth_remedies(evidence: Evidence) -> tuple[str, ...]:
    """Advice against growing logits, most likely to help first."""
    grown = evidence.input_growth
    fed = (LOOK_AT_INPUT,) if grown and grown >= INPUT_SHARE else ()
    return _BY_DRIVER[driver(evidence)] + fed
