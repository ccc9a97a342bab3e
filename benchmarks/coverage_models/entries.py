"""The list of all entries of the sweep, and how one is run. An entry is `library:name`."""

from __future__ import annotations

import gc
import importlib
import signal
from typing import Any

import torch

from .case import CannotBuildError

LIMIT = 60  # seconds of CPU time for one entry, in all its implementations


class OutOfTimeError(BaseException):
    """Not an `Exception`, so that no attempt to build takes it for a reason to try the next way."""


HOMES = {
    "hf": "transformers_types",
    "torch": "torch_modules",
    "timm": "timm_models",
    "diffusers": "diffusers_models",
    "x": "x_transformers_models",
}


def entries() -> list[str]:
    """Every entry, library by library."""
    return [f"{library}:{name}" for library in HOMES for name in _home(library).names()]


def _home(library: str) -> Any:
    return importlib.import_module(f"coverage_models.{HOMES[library]}")


def results(entry: str) -> list[dict[str, Any]]:
    """Trains the entry in every implementation; what cannot be built is a result with a reason."""
    from .trial import run

    torch.set_num_threads(1)
    signal.signal(signal.SIGPROF, _out_of_time)
    signal.setitimer(signal.ITIMER_PROF, LIMIT)
    library, _, name = entry.partition(":")
    found: list[dict[str, Any]] = []
    try:
        for case in _home(library).cases(name):
            found.append({"entry": entry, **run(case).to_dict()})
            gc.collect()
    except (CannotBuildError, OutOfTimeError) as error:
        found.append(_failed(entry, name, str(error)))
    except Exception as error:
        found.append(_failed(entry, name, f"the trial failed: {type(error).__name__}: {error}"))
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return found


def _out_of_time(*_: object) -> None:
    raise OutOfTimeError(f"more than {LIMIT} s of CPU time")


def _failed(entry: str, name: str, why: str) -> dict[str, Any]:
    return {"entry": entry, "name": name, "problem": why[:600]}
