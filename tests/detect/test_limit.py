from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stability_probe.detect.limit import Limit


@given(st.lists(st.one_of(st.floats(0, 1), st.just(float("nan"))), min_size=1, max_size=30))
@pytest.mark.parametrize(("enter", "leave"), [(0.7, 0.4), (0.3, 0.6)])
def test_it_is_a_state_machine_that_misses_nothing(enter, leave, samples):
    state = False
    for x in samples:
        if (x > enter) if enter > leave else (x < enter):
            state = True
        elif (x < leave) if enter > leave else (x > leave):
            state = False
    limit = Limit(enter=enter, leave=leave)
    assert limit(np.array(samples)[:, None]).tolist() == [state]


def test_without_hysteresis_it_is_refused():
    with pytest.raises(ValueError, match="healthy side"):
        Limit(enter=1.0, leave=1.0)
