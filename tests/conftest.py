"""What holds for every test: a probe leaves nothing behind."""

from __future__ import annotations

import os
import sys
import weakref
from collections.abc import Iterator

import pytest

# One thread, here and in the processes that tests start: small tensors, and shared machines.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def no_hooks_or_modes_remain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After every test: no module hook, no global hook and no torch-function mode is left."""
    if "torch" not in sys.modules:
        yield
        return
    from torch.nn.modules import module as torch_module
    from torch.overrides import _get_current_function_mode_stack

    from stability_probe.capture import entries
    from stability_probe.capture.attach import Attachment

    made: list[weakref.ref[Attachment]] = []
    before = Attachment.__init__

    def remembering(self: Attachment, *args: object, **kwargs: object) -> None:
        made.append(weakref.ref(self))
        before(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Attachment, "__init__", remembering)
    yield
    assert not _get_current_function_mode_stack(), "a torch-function mode is left on"
    assert not torch_module._global_forward_pre_hooks, "a global pre-hook is left"
    assert not torch_module._global_forward_hooks, "a global hook is left"
    open_ones = [a for ref in made if (a := ref()) is not None and a._handles]
    replaced = entries.entries_are_replaced()
    for attachment in open_ones:
        attachment.close()  # so that one forgotten probe fails one test
    assert open_ones or not replaced, "an attention function is still replaced"
    assert not open_ones, "a probe was not closed: its hooks are still on the model"
