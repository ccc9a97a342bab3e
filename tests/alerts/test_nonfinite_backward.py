"""Forward healthy and backward not, gradients from downstream, inputs from outside: the words."""

from __future__ import annotations

import pytest
from recording import observation, record, told, watch

from stability_probe.alerts.nonfinite import NonFinite
from stability_probe.alerts.nonfinite_loss import NonFiniteLoss
from stability_probe.alerts.stock import stock_rules
from stability_probe.records import FirstBad, Severity

RULES = (NonFinite(), NonFiniteLoss())
GRADIENTS = ("grad_output", "grad_v", "grad_q", "grad_k", "grad_input")
LAYERS = tuple(
    observation(f"b.{i}", i, nonfinite=[0, 0], entropy_ratio=[0.5, 0.5]) for i in range(3)
)


def bad(layer: int, step: int, *tensors: str) -> tuple[FirstBad, ...]:
    return tuple(FirstBad(f"b.{layer}", layer, tensor, step) for tensor in tensors)


def after(step: int = 5, **scalars):
    """Healthy steps, then one record with these scalars."""
    healthy = [record(s, *LAYERS, loss=2.0) for s in range(1, step)]
    return [*healthy, record(step, *LAYERS, **{"loss": 2.0, **scalars})]


def test_a_layer_whose_own_backward_is_bad_is_named():
    first_bad = bad(0, 5, *GRADIENTS) + bad(1, 5, "grad_q", "grad_k", "grad_input")
    (alert,) = watch(after(first_bad=first_bad), RULES)
    assert (alert.severity, alert.layer, alert.layer_index) == (Severity.WARNING, "b.1", 1)
    assert alert.message == (
        "b.1: forward healthy, backward non-finite. At step 5 the gradient of its output is "
        "finite, and that of its q and k is not; earlier layers follow: b.0. The update was not "
        "reported as skipped."
    )
    assert alert.cause == "The backward of this layer's attention made it."
    assert any("optimizer=" in remedy for remedy in alert.remedies)


def test_an_output_gradient_that_was_bad_already_points_downstream():
    first_bad = bad(2, 5, *GRADIENTS) + bad(1, 5, *GRADIENTS) + bad(0, 5, *GRADIENTS)
    (alert,) = watch(after(first_bad=first_bad), RULES)
    assert alert.layer == "b.2"
    assert "already not finite when it reached the output of b.2 at step 5" in alert.message
    assert "attention's forward is finite; earlier layers follow: b.1, b.0." in alert.message
    assert alert.cause == (
        "It came from downstream, outside attention: after b.2, in the layers behind it, the loss "
        "or its scale."
    )


def test_between_two_layers_backward_is_blamed_on_what_lies_there():
    (alert,) = watch(after(first_bad=bad(0, 5, *GRADIENTS)), RULES)
    assert alert.layer == "b.0"
    assert alert.cause == "It came from downstream, outside attention: between b.0 and b.1."


def test_only_the_modules_input_gradient():
    (alert,) = watch(after(first_bad=bad(1, 5, "grad_input")), RULES)
    assert "the gradients of its output, q, k and v are finite" in alert.message
    assert "that of the module's input is not" in alert.message
    assert "projections or norms" in alert.cause


def test_a_skipped_update_makes_it_info_and_is_counted():
    records = after(first_bad=bad(1, 5, "grad_v"), skipped=True, grad_norm=float("inf"))
    (alert,) = watch(records, RULES)
    assert alert.severity is Severity.INFO
    assert "The update was skipped, as GradScaler does while it searches its scale" in alert.message
    assert "(1 of 5 updates skipped)" in alert.message
    assert len(alert.remedies) == 1
    assert "GradScaler" in alert.remedies[0]


def test_read_late_it_is_judged_by_the_update_of_its_own_step():
    records = [record(s, loss=2.0, skipped=s == 3) for s in range(1, 10)]
    late = record(10, *LAYERS, loss=2.0, first_bad=bad(1, 3, "grad_q"))
    assert told(watch([*records, late], RULES)) == [(10, "nonfinite", "info")]
    late = record(10, *LAYERS, loss=2.0, first_bad=bad(1, 4, "grad_q"))
    assert told(watch([*records, late], RULES)) == [(10, "nonfinite", "warning")]


def test_forward_is_critical_even_where_the_update_was_skipped():
    records = after(first_bad=bad(1, 5, "scores", "output", *GRADIENTS), skipped=True)
    (alert,) = watch(records, RULES)
    assert alert.severity is Severity.CRITICAL
    assert "in its scores and output" in alert.message
    assert "grad" not in alert.message


def test_a_rise_from_backward_to_forward_says_that_backward_came_first():
    first = after(first_bad=bad(1, 5, "grad_q"))
    second = record(6, *LAYERS, loss=2.0, first_bad=bad(1, 6, "q", "scores", "output"))
    one, two = watch([*first, second], RULES)
    assert (one.severity, two.severity) == (Severity.WARNING, Severity.CRITICAL)
    assert "Gradients of b.1 were not finite at step 5: the update may have put" in two.cause
    skipped = after(first_bad=bad(1, 5, "grad_q"), skipped=True)
    assert "Gradients" not in watch([*skipped, second], RULES)[-1].cause


def test_a_loss_that_is_not_finite_is_told_once_and_attention_is_calm():
    first_bad = tuple(b for i in (2, 1, 0) for b in bad(i, 5, *GRADIENTS))
    (alert,) = watch(after(first_bad=first_bad, loss=float("nan")), RULES)
    assert (alert.rule, alert.severity) == ("nonfinite_loss", Severity.CRITICAL)
    assert "Attention is not the cause" in alert.cause


@pytest.mark.parametrize("skipped", [True, False])
def test_a_gradient_norm_is_not_told_twice(skipped):
    records = after(first_bad=bad(1, 5, "grad_q"), grad_norm=float("nan"), skipped=skipped)
    assert [a.rule for a in watch(records, RULES)] == ["nonfinite"]
    assert [a.rule for a in watch(after(grad_norm=float("nan")), RULES)] == ["nonfinite_loss"]


def test_inputs_from_outside_attention_are_blamed_on_what_lies_between():
    first_bad = bad(1, 5, "input", "q", "k", "v", "output") + bad(2, 5, "input", "q")
    (alert,) = watch(after(first_bad=first_bad), RULES)
    assert (alert.severity, alert.layer) == (Severity.CRITICAL, "b.1")
    assert "b.1 received non-finite inputs and holds values" in alert.message
    assert "in its q, k, v and output" in alert.message
    assert alert.cause == (
        "The first non-finite value came from outside attention, between b.0 and b.1."
    )
    (alert,) = watch(after(first_bad=bad(0, 5, "input", "q")), RULES)
    assert alert.cause == "The first non-finite value came from outside attention, before b.0."


def test_masked_rows_that_reach_the_gradients_are_explained_no_more():
    masked = (FirstBad("b.0", 0, "output", 5, explained=True),)
    assert told(watch(after(first_bad=masked), RULES)) == [(5, "nonfinite", "warning")]
    reached = masked + bad(0, 5, "grad_q")
    (alert,) = watch(after(first_bad=reached), RULES)
    assert alert.severity is Severity.CRITICAL
    assert alert.cause.endswith("It has reached the gradients.")
    assert told(watch(after(first_bad=reached, skipped=True), RULES)) == [
        (5, "nonfinite", "warning")
    ]


def test_the_stock_rules_say_it_once():
    records = after(step=60, first_bad=bad(1, 60, "grad_q", "grad_input"))
    assert told(watch(records, stock_rules())) == [(60, "nonfinite", "warning")]
