"""Which backend reads a call, what is said where it cannot, and the kernel in the interpreter."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from stability_probe.errors import BackendError
from stability_probe.records import AttentionCall
from stability_probe.stats import backend, triton_scores
from stability_probe.stats.accumulate import accumulate
from stability_probe.stats.measure import measure

needs_triton = pytest.mark.skipif(
    (sys.platform, platform.machine()) != ("linux", "x86_64"), reason="there is no Triton for it"
)
SLOW = pytest.param("slow", marks=pytest.mark.slow)


@needs_triton
@pytest.mark.parametrize("speed", ["not slow", SLOW])
def test_the_kernel_in_the_interpreter(speed: str):
    file = Path(__file__).with_name("interpreted_triton.py")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-m", speed, str(file)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=file.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\d passed", done.stdout)
    assert "skipped" not in done.stdout


def call_on(device: str, **changes) -> AttentionCall:
    """A call whose q and k are no tensors, but say where they are and of what kind."""
    kind = {"device": torch.device(device), "dtype": torch.float32}
    q = SimpleNamespace(shape=torch.Size((1, 2, 5, 4)), **kind)
    return replace(AttentionCall(layer="blocks.0", q_BHQD=q, k_BGKD=q), **changes)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the backends taken: both do nothing else, as if there were a recent GPU."""
    names: list[str] = []
    for name in ("torch", "triton"):
        monkeypatch.setattr(
            backend, f"{name}_scores", lambda *_, name=name, **__: names.append(name)
        )
    monkeypatch.setattr(backend, "_failed", [])
    monkeypatch.setattr(triton_scores, "_kernel_module", lambda: SimpleNamespace(INTERPRETED=False))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return names


def score(call: AttentionCall, name: str = "auto") -> None:
    backend.score(call, {}, full=True, rows=False, backend=name)  # type: ignore[arg-type]


def identity(s, b, h, q, k):
    return s


def everywhere(b, h, q, k):
    return q >= 0


UNCOVERED = {
    "score_mod": ({"score_mod": identity}, "it has a score_mod; expected masks and numbers only"),
    "mask_mod": ({"mask_mod": everywhere}, "it has a mask_mod; expected masks and numbers only"),
    "scores": (
        {"scores_BHQK": call_on("cuda").q_BHQD, "q_BHQD": None},
        "it has scores of its own; expected q and k alone",
    ),
    "dtype": (
        {"dtype": torch.float64},
        "it is in torch.float64; expected float32, float16 or bfloat16. Convert it.",
    ),
}


def test_auto_takes_triton_where_it_can(taken: list[str]):
    score(call_on("cuda:0"))
    score(call_on("cuda:1", causal=True, softcap=3.0, dtype=torch.bfloat16))
    score(call_on("cpu"))
    score(call_on("mps"))
    assert taken == ["triton", "triton", "torch", "torch"]


@pytest.mark.parametrize("what", UNCOVERED)
def test_what_the_kernel_does_not_cover(taken: list[str], what: str):
    changes, words = UNCOVERED[what]
    call = call_on("cuda", **changes)
    score(call)
    assert taken == ["torch"]
    with pytest.raises(BackendError, match="backend='triton' cannot read this call") as caught:
        score(call, "triton")
    assert f"of 'blocks.0': {words}" in str(caught.value)
    assert "pass backend='auto', which takes PyTorch where Triton cannot" in str(caught.value)
    assert taken == ["torch"]


def test_a_backend_that_is_forced(taken: list[str]):
    score(call_on("cuda"), "torch")
    score(call_on("cuda"), "triton")
    assert taken == ["torch", "triton"]
    with pytest.raises(BackendError, match=r"it is on cpu; expected a CUDA device. Move it to one"):
        score(call_on("cpu"), "triton")
    with pytest.raises(BackendError, match="backend is 'cuda'; expected 'auto', 'torch' or 'trit"):
        score(call_on("cuda"), "cuda")


def test_an_old_gpu(taken: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    score(call_on("cuda"))
    assert taken == ["torch"]
    with pytest.raises(BackendError, match=r"cuda has compute capability 7.5; expected 8.0 or mo"):
        score(call_on("cuda"), "triton")


def test_without_triton(taken: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.undo()
    monkeypatch.setattr(backend, "torch_scores", lambda *_, **__: taken.append("torch"))
    triton_scores._kernel_module.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "stability_probe.stats.triton_kernel", raising=False)
    monkeypatch.delattr("stability_probe.stats.triton_kernel", raising=False)
    try:
        score(call_on("cuda"))
        words = r"the package triton cannot be imported \(.*triton.*\). Install it: pip install tr"
        with pytest.raises(BackendError, match=words):
            score(call_on("cuda"), "triton")
    finally:
        triton_scores._kernel_module.cache_clear()
    assert taken == ["torch"]


def test_a_kernel_that_does_not_start_is_given_up_aloud(
    taken: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    def broken(*args, **kwargs):
        taken.append("triton")
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(backend, "triton_scores", broken)
    words = (
        r"Triton could not run the attention statistics \(RuntimeError: no C compiler\). They are "
        r"taken in PyTorch instead, exactly but more slowly. Pass backend='triton' to see the"
    )
    for _ in range(2):
        score(call_on("cuda"))
    (said,) = (record.getMessage() for record in caplog.records)
    assert re.match(words, said)
    assert taken == ["triton", "torch", "torch"]
    with pytest.raises(RuntimeError, match="no C compiler"):
        score(call_on("cuda"), "triton")


def test_out_of_memory_is_no_reason_to_give_it_up(
    taken: list[str], monkeypatch: pytest.MonkeyPatch
):
    def full(*args, **kwargs):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(backend, "triton_scores", full)
    with pytest.raises(torch.OutOfMemoryError):
        score(call_on("cuda"))
    assert not backend._failed


def test_on_a_cpu_triton_is_not_even_imported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(triton_scores, "_kernel_module", lambda: pytest.fail("imported"))
    x = torch.ones(1, 2, 3, 4)
    accumulate(AttentionCall(layer="a", q_BHQD=x, k_BGKD=x), full=True)
    assert torch.equal(measure(x, x)["entropy"], measure(x, x, backend="torch")["entropy"])


def test_measure_says_what_cannot_be_read():
    x = torch.ones(3, 4)
    with pytest.raises(BackendError, match=r"of 'measure': it has a mask_mod"):
        measure(x, x, mask_mod=everywhere, backend="triton")
    with pytest.raises(BackendError, match=r"of 'measure': (it is on cpu|the package triton)"):
        measure(x, x, backend="triton")
