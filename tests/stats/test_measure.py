"""`measure` on plain tensors: the lesson's table, shapes, defaults, errors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dense_oracle import statistics

from stability_probe.errors import ShapeError
from stability_probe.stats.catalogue import EXACT_SET
from stability_probe.stats.measure import measure

LESSON = {  # weight scale: max |logit|, top weight, entropy, mean softmax slope
    1: ("2.6", "0.4111", "2.332", "5.39e-02"),
    2: ("10.6", "0.9957", "0.676", "2.14e-02"),
    4: ("42.3", "1.0000", "0.148", "5.48e-03"),
    8: ("169.2", "1.0000", "0.037", "1.36e-03"),
    16: ("676.9", "1.0000", "0.001", "1.74e-05"),
}
NORMALISED = ("3.3", "0.5237", "2.127", "5.10e-02")


def lesson_vectors() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(16, 64)), rng.normal(size=(16, 64))


def as_printed(values: dict[str, torch.Tensor]) -> tuple[str, ...]:
    return (
        f"{values['abs_max_logit'].item():.1f}",
        f"{values['top_weight_max'].item():.4f}",
        f"{values['entropy'].item():.3f}",
        f"{values['softmax_slope'].item():.2e}",
    )


@pytest.mark.parametrize("scale", LESSON)
def test_the_lesson_drift_of_the_weights(scale: int):
    q, k = (torch.from_numpy(x * scale) for x in lesson_vectors())
    assert as_printed(measure(q, k)) == LESSON[scale]


@pytest.mark.parametrize("scale", LESSON)
def test_the_lesson_unit_length_removes_the_drift(scale: int):
    q, k = (torch.from_numpy(x * scale) for x in lesson_vectors())
    q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
    assert as_printed(measure(q, k, scale=10.0)) == NORMALISED


@pytest.mark.parametrize(("shape", "heads"), [((2, 3, 5, 4), 3), ((3, 5, 4), 3), ((5, 4), 1)])
def test_batch_and_heads_may_be_left_out(shape: tuple[int, ...], heads: int):
    q, k = torch.randn(shape), torch.randn(shape)
    got = measure(q, k, rows=True)
    want = statistics(*(x.view(-1, heads, 5, 4) for x in (q, k)), scale=0.5)
    assert set(got) == {*EXACT_SET, "row_entropy"}
    for name, values in got.items():
        assert values.dtype == torch.float32
        tail = {"entropy_hist": (16,)}.get(name, ())
        assert name == "row_entropy" or values.shape == (heads, *tail)
    np.testing.assert_allclose(got["entropy"].numpy(), want["entropy"], rtol=1e-5)
    np.testing.assert_allclose(got["row_entropy"].numpy(), want["row_entropy"], rtol=1e-5)


def test_row_entropy_is_absent_where_there_is_no_choice():
    q, k = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 4)
    rows = measure(q, k, causal=True, rows=True)["row_entropy"]
    assert rows.shape == (2, 3, 6)
    assert torch.isnan(rows).sum(-1).unique().tolist() == [1]
    assert torch.isnan(rows[..., 0]).all()


def test_scale_defaults_to_one_over_root_of_width():
    q, k = torch.randn(4, 7, 9), torch.randn(4, 7, 9)
    a, b = measure(q, k), measure(q, k, scale=1 / 3)
    assert torch.equal(a["max_logit"], b["max_logit"])
    assert a["scale"].tolist() == pytest.approx([1 / 3] * 4)


def test_a_scale_per_head():
    q, k = torch.randn(2, 4, 7, 9), torch.randn(2, 4, 7, 9)
    scale = torch.tensor([0.1, 1.0, 2.0, 10.0]).view(4, 1, 1)
    got = measure(q, k, scale=scale)
    for h in range(4):
        alone = measure(q[:, h : h + 1], k[:, h : h + 1], scale=float(scale[h]))
        assert got["max_logit"][h].item() == pytest.approx(alone["max_logit"].item(), rel=1e-6)
        assert got["fp16_headroom_log2"][h] == pytest.approx(
            alone["fp16_headroom_log2"].item(), rel=1e-6
        )


def test_grouped_heads_read_their_own_keys():
    q, k = torch.randn(1, 6, 5, 4), torch.randn(1, 2, 5, 4)
    got = measure(q, k, enable_gqa=True)
    want = measure(q, k.repeat_interleave(3, dim=1))
    for name, values in got.items():
        torch.testing.assert_close(values, want[name], equal_nan=True, msg=name)


def test_mask_and_causal_together_hide_what_either_hides():
    q, k = torch.randn(2, 2, 9, 4), torch.randn(2, 2, 9, 4)
    mask = torch.rand(2, 1, 1, 9) < 0.6
    both = measure(q, k, mask=mask, causal=True)
    merged = measure(q, k, mask=mask & torch.ones(9, 9, dtype=torch.bool).tril())
    for name, values in both.items():
        torch.testing.assert_close(values, merged[name], equal_nan=True, msg=name)


def test_it_takes_tensors_that_need_gradients():
    q = torch.randn(2, 5, 4, requires_grad=True)
    values = measure(q, q, q)
    assert not any(x.requires_grad for x in values.values())


X = torch.ones(2, 4, 5, 8)
ERRORS = [
    ((X[0, 0, 0], X), {}, r"q has shape \[8\]; expected \[batch, heads, positions, width\]"),
    ((X, X[0]), {}, "q has 4 axes and k has 3; expected as many"),
    ((X.int(), X), {}, r"q is torch.int32; expected a floating dtype.*q.float\(\)"),
    ((X[:, :, :0], X), {}, r"q has shape \[2, 4, 0, 8\], which holds nothing to measure"),
    ((X, X[:1]), {}, "k has a batch of 1 and q one of 2; expected the same"),
    ((X, X[..., :6]), {}, "q has width 8 and k 6; expected the same. If the axes"),
    ((X, X[:, :2]), {}, "q has 4 heads and k has 2. Pass enable_gqa=True"),
    ((X, X[:, :3]), {"enable_gqa": True}, "q has 4 heads, which is not a multiple of the 3"),
    ((X, X, X[:, :, :3]), {}, "v has 4 heads and 3 positions, k has 4 and 5"),
    ((X, X, X[:, :2]), {}, "v has 2 heads and 5 positions, k has 4 and 5"),
    ((X, X), {"mask": torch.ones(5, 4).bool()}, r"mask has shape \[5, 4\].*\[2, 4, 5, 5\]"),
    ((X, X), {"mask": torch.ones(3, 1, 5, 5)}, r"mask has shape \[3, 1, 5, 5\]"),
    ((X, X), {"mask": torch.ones(1, 2, 4, 5, 5)}, r"mask has shape \[1, 2, 4, 5, 5\]"),
    ((X, X), {"mask": torch.ones(5, 5).int()}, r"mask is torch.int32; expected bool.*mask.bool"),
    ((X, X), {"scale": torch.ones(4)}, r"scale has shape \[4\], which does not broadcast"),
    ((X, X), {"softcap": 0.0}, "softcap is 0.0; it must be above 0, or None"),
    ((X, X.to("meta")), {}, "k is on meta and q on cpu. Move it to cpu"),
    ((X, X), {"mask": torch.ones(5, 5, device="meta")}, "mask is on meta and q on cpu"),
]


@pytest.mark.parametrize(("tensors", "options", "words"), ERRORS, ids=range(len(ERRORS)))
def test_what_does_not_fit_is_said_clearly(tensors, options, words: str):
    with pytest.raises(ShapeError, match=words):
        measure(*tensors, **options)


def test_a_call_that_is_seldom_given_positionally():
    with pytest.raises(TypeError):
        measure(X, X, X, torch.ones(5, 5))
