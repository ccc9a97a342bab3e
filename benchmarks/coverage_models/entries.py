"""The list of all entries of the sweep, and how one is run. An entry is `library:name`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

from .case import CannotBuildError, Case


def entries() -> list[str]:
    """Every entry, library by library."""
    from . import transformers_types

    return [f"hf:{name}" for name in transformers_types.model_types()]


def results(entry: str) -> list[dict[str, Any]]:
    """Trains the entry in every implementation; what cannot be built is a result with a reason."""
    from .trial import run

    library, _, name = entry.partition(":")
    found: list[dict[str, Any]] = []
    try:
        for case in _cases(library)(name):
            found.append({"entry": entry, **run(case).to_dict()})
            gc.collect()
    except CannotBuildError as error:
        found.append(_failed(entry, name, str(error)))
    except Exception as error:
        found.append(_failed(entry, name, f"the trial failed: {type(error).__name__}: {error}"))
    return found


def _failed(entry: str, name: str, why: str) -> dict[str, Any]:
    return {"entry": entry, "name": name, "problem": why[:600]}


def _cases(library: str) -> Callable[[str], Iterator[Case]]:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    from . import transformers_types

    return {"hf": transformers_types.cases}[library]
