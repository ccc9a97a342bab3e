"""What the sentinel tells of a step, and of what it keeps silent."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from tiny_models import Attention, Model, loss_of, tokens
from torch import Tensor, nn

import stability_probe as sp
from stability_probe.finite import known_finite
from stability_probe.records import AttentionCall
from stability_probe.sentinel import (
    FORWARD,
    KINDS,
    NEVER,
    any_bad,
    bad_steps,
    call_is_finite,
    call_witness,
    table,
    told,
)

BAD = (math.nan, math.inf, -math.inf)


def call(**changed: Tensor) -> AttentionCall:
    given = dict.fromkeys(("q_BHQD", "k_BGKD", "v_BGKE", "output_BHQE"), torch.ones(1, 2, 3, 4))
    return AttentionCall(
        layer="a", input=torch.ones(3, 8), scores_BHQK=torch.ones(1, 2, 3, 3), **(given | changed)
    )


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize(
    ("field", "kind"),
    [("q_BHQD", "q"), ("k_BGKD", "k"), ("v_BGKE", "v"), ("output_BHQE", "output")],
)
def test_one_bad_value_shows_in_its_kind_only(field: str, kind: str, value: float) -> None:
    tensor = torch.ones(1, 2, 3, 4)
    tensor[0, 1, 2, 3] = value
    bad = ~torch.isfinite(call_witness(call(**{field: tensor})))
    assert [k for k, b in zip(FORWARD, bad.tolist(), strict=True) if b] == [kind]


def attended(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> AttentionCall:
    output = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return AttentionCall(
        layer="a", seam="sdpa", q_BHQD=q, k_BGKD=k, v_BGKE=v, output_BHQE=output, causal=causal
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("keys", [5, 9])
@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("which", range(3))
def test_no_bad_value_of_a_fused_call_is_overlooked(
    which: int, value: float, keys: int, causal: bool, dtype: torch.dtype
) -> None:
    """Wherever it is: also in keys that no query sees, and where its scores are -inf."""
    for where in range(keys if which else 7):
        torch.manual_seed(where)
        q, k, v = (torch.rand(2, n, 3, 8).to(dtype).transpose(1, 2) for n in (7, keys, keys))
        k = -k  # an infinite value gives scores of one sign: -inf looks like a mask
        assert call_is_finite(attended(q, k, v, causal=causal))
        (q, k, v)[which][1, 2, where, 3] = value
        assert not call_is_finite(attended(q, k, v, causal=causal))


def test_values_that_the_output_may_not_show_are_looked_at() -> None:
    """Keys behind the causal edge, or under a mask, whose values a kernel need not multiply."""
    q, k, v = (torch.ones(1, 2, n, 4) for n in (3, 5, 5))
    v[0, 0, 4] = math.nan
    seen = AttentionCall(
        layer="a", seam="sdpa", q_BHQD=q, k_BGKD=k, v_BGKE=v, output_BHQE=q, causal=True
    )
    assert not call_is_finite(seen)
    masked = replace(seen, causal=False, masks=(torch.tensor([[True] * 4 + [False]]),))
    assert not call_is_finite(masked)
    assert not call_is_finite(replace(seen, causal=False, seam="flash_attn"))


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_place_of_a_view_is_looked_at_and_none_beside_it(
    dtype: torch.dtype, value: float
) -> None:
    fused = torch.ones(2, 5, 3, 2, 4, dtype=dtype)
    fused[:, :, 1] = value
    q, k, _ = (part.transpose(1, 2) for part in fused.unbind(2))
    assert known_finite(q, torch.empty(0), None)
    assert not known_finite(q, k)
    fused[:, :, 1] = 1
    for place in torch.cartesian_prod(*map(torch.arange, k.shape)).tolist():
        k[tuple(place)] = value
        assert not known_finite(k)
        k[tuple(place)] = 1
    assert known_finite(k)
    assert not known_finite(k.to("meta"))  # a device is never waited for


def test_a_healthy_step_on_a_cpu_leaves_nothing_to_bring_home() -> None:
    model = Model(Attention("sdpa"), Attention("torch.softmax"))
    with sp.watch(model, strict=True, plan=sp.every(2)) as probe:
        for _ in range(4):
            loss_of(model, tokens()).backward()
            pools = [slot.pool for slot in probe._meter._slots.values()]
            assert len(pools) == 2
            assert all(pool.any_tensor is None for pool in pools)
            probe.step()


def test_a_masks_infinity_in_the_scores_is_no_event() -> None:
    masked = torch.ones(1, 2, 3, 3).masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf)
    given = call()
    one, two = (
        AttentionCall(layer="a", scores_BHQK=s, q_BHQD=given.q_BHQD) for s in (masked, masked.abs())
    )
    assert torch.isfinite(call_witness(one)).all()
    assert not torch.isfinite(call_witness(two)).all()


def test_layers_with_and_without_gradients_share_a_table() -> None:
    gradient = {"grad_q": torch.tensor(math.nan), "grad_input": torch.tensor(1.0)}
    rows = table([(torch.zeros(len(FORWARD)), {}), (None, gradient)])
    bad = ~torch.isfinite(rows)
    assert rows.shape == (2, len(KINDS))
    assert bad.sum() == 1
    assert bad[1, KINDS.index("grad_q")]
    assert table([(torch.zeros(len(FORWARD)), {})]).shape == (1, len(KINDS))


def test_steps_pool_to_the_first_bad_one() -> None:
    bad = torch.full((1, len(KINDS)), math.inf)
    steps = torch.minimum(bad_steps(bad, 7), bad_steps(torch.zeros_like(bad), 3))
    assert steps.unique().tolist() == [7.0]


def test_the_input_is_told_only_where_attention_went_bad_with_it() -> None:
    def row(**steps: int) -> list[float]:
        return [float(steps.get(kind, NEVER)) for kind in KINDS]

    assert told(row(input=3)) == []
    assert told(row(input=3, q=3, grad_q=4)) == [("input", 3), ("q", 3), ("grad_q", 4)]
    assert told(row(input=3, q=5)) == [("q", 5)]
    assert not any_bad(torch.tensor([[math.nan] + [0.0] * (len(KINDS) - 1)]))


def test_a_module_that_is_given_its_mask_first_is_healthy() -> None:
    class MaskFirst(Attention):
        def forward(self, mask: Tensor, x: Tensor | None = None) -> Tensor:
            assert x is not None
            return super().forward(x)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = MaskFirst()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attention(torch.full((12, 12), -math.inf).triu(1), x)

    model = Model()
    model.blocks = nn.Sequential(Block(), Block())
    with sp.watch(model, strict=True) as probe:
        for _ in range(3):
            loss_of(model, tokens()).backward()
            assert not bool(probe.nonfinite_flag())
            probe.step()
        assert not [b for r in probe._kept for b in r.scalars.first_bad]
        assert not probe.alerts
