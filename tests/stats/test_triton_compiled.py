"""The Triton kernel through Triton's compiler, down to machine code, on a machine without a GPU.

The launcher runs as it would on a device, on CPU tensors; only the launch itself is replaced by
`warmup`, which compiles for the very arguments. What the interpreter lets through and the compiler
does not (types that change in a loop, shapes that are not constant, products that are too small)
fails here. Whether the code is right on a GPU is not shown.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_accumulate import Watch

from stability_probe.records import AttentionCall
from stability_probe.stats import triton_scores

if (sys.platform, platform.machine()) != ("linux", "x86_64"):
    pytest.skip("there is no Triton for it", allow_module_level=True)

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from stability_probe.stats import triton_kernel

HOPPER, AMPERE = GPUTarget("cuda", 90, 32), GPUTarget("cuda", 80, 32)
CDNA = GPUTarget("hip", "gfx942", 64)


@dataclass
class Compiler:
    """Stands where the kernel stands; keeps what was compiled."""

    made: list[Any] = field(default_factory=list)

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def compile_only(*args: object, **options: object) -> None:
            kernel = triton_kernel.attention_kernel
            kernel.device_caches.clear()  # it is for one target
            self.made.append(kernel.warmup(*args, grid=grid, **options))
            for given in args:  # nothing ran: rows of the peaks that are no rows must not be read
                if isinstance(given, torch.Tensor) and given.dtype == torch.int32:
                    given.zero_()

        return compile_only


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Compiles a call for a target; nothing is left in Triton's cache or its choice of driver."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    stand_in = Compiler()
    module = SimpleNamespace(attention_kernel=stand_in, tl=triton_kernel.tl)
    monkeypatch.setattr(triton_scores, "_kernel_module", lambda: module)

    def build(call: AttentionCall, target: GPUTarget, *, full: bool) -> dict[str, Any]:
        chip = SimpleNamespace(
            get_current_device=lambda: 0,
            get_current_stream=lambda device: 0,
            get_current_target=lambda: target,
        )
        monkeypatch.setattr(driver, "_active", chip)
        bad = {"output": torch.zeros(call.q_BHQD.shape[:3])}
        with Watch():  # nothing around the launch waits for the device
            triton_scores.triton_scores(call, bad, full=full, rows=full)
        return stand_in.made[-1].asm

    yield build
    triton_kernel.attention_kernel.device_caches.clear()


def call_of(dtype: torch.dtype, D: int, *, R: int = 1, **options) -> AttentionCall:
    q, k = torch.ones(1, R, 40, D, dtype=dtype), torch.ones(1, 1, 40, D, dtype=dtype)
    return AttentionCall(layer="a", q_BHQD=q, k_BGKD=k, **options)


def everything(dtype: torch.dtype, D: int) -> AttentionCall:
    """Both kinds of masks, a soft-cap, a sink, grouped heads: all the code there is."""
    return call_of(
        dtype,
        D,
        R=2,
        masks=(torch.ones(1, 1, 1, 40, dtype=torch.bool), torch.zeros(40, 40, dtype=dtype)),
        softcap=3.0,
        sink_BHQ1=torch.zeros(2, 1, 1),
        causal=True,
        scale=torch.ones(2, 1, 1),
    )


def test_half_inputs_on_tensor_cores(compiler):
    asm = compiler(call_of(torch.bfloat16, 64, causal=True), HOPPER, full=False)
    assert len(asm["cubin"]) > 1000
    assert "wgmma" in asm["ptx"]
    # S - m is exactly 0 at the maximum only if the product with the scale is rounded on its own
    assert "fma.rn.f32" not in asm["ptx"]


def test_everything_in_whole_float32(compiler):
    asm = compiler(everything(torch.float32, 20), AMPERE, full=True)
    assert len(asm["cubin"]) > 1000
    assert "tf32" not in asm["ptx"]
    assert "mma." not in asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("target", [HOPPER, AMPERE, CDNA], ids=lambda t: str(t.arch))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("D", [1, 192])
def test_every_dtype_and_width(compiler, target: GPUTarget, dtype: torch.dtype, D: int):
    plain = compiler(call_of(dtype, D), target, full=False)
    whole = compiler(everything(dtype, D), target, full=True)
    binary = "hsaco" if target is CDNA else "cubin"
    assert len(plain[binary]) > 1000
    assert len(whole[binary]) > len(plain[binary])


@pytest.mark.slow
def test_inputs_of_two_dtypes(compiler):
    call = call_of(torch.bfloat16, 64, masks=(torch.zeros(40, 1, dtype=torch.float64),))
    call = AttentionCall(
        layer="a", q_BHQD=call.q_BHQD, k_BGKD=call.k_BGKD.float(), masks=call.masks
    )
    assert "mma." not in compiler(call, HOPPER, full=True)["ptx"]
