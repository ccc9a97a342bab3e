"""Which modules could hold attention, and what they are called.

Nothing is decided by names alone: a name or the code of a `forward` makes a module a
*candidate*, and only a call seen at run time makes it a site. A candidate that never gives a
call is reported, so that blindness is loud.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

# Wrappers put these parts into module names; canonical names survive a restart without them.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_WRAPPER_CLASSES = {
    "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine",
}  # fmt: skip

_ATTENTION_CALLS = re.compile(r"scaled_dot_product|flash_attn|flex_attention|memory_efficient_att")
_ATTENTION_NAME = re.compile(r"att(ention|n)(?!.*(mask|pool_|norm))", re.IGNORECASE)
_UNREADABLE = "unreadable_softmax"  # stands for code that cannot be read
_POSSIBLE = re.compile(
    r"^(?!.*Output).*(softmax|attention|attn|sdpa|scaled_dot_product|memory_efficient)|^exp2?$",
    re.IGNORECASE,
)
_KNOWN = {"torch", "builtins", "math", "numpy", "operator", "functools", "itertools"}

ROOT = "(root)"  # the name of the watched model itself


def canonical_name(name: str, *, wrapped: bool = True) -> str:
    """The module name without what torch.compile, DDP, FSDP and checkpoint wrappers add.

    `wrapped` says that the watched module is such a wrapper, whose part `module` is the model.
    """
    parts = [p for p in name.split(".") if p and p not in _WRAPPERS]
    while wrapped and parts and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts) or ROOT


def named_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of a model by its canonical name, wrappers left out."""
    wrapped = _is_wrapper(model)
    found = {}
    for name, module in model.named_modules():
        found[canonical_name(name, wrapped=wrapped)] = module  # the wrapped one comes last
    return found


def _is_wrapper(model: nn.Module) -> bool:
    inner = getattr(model, "_orig_mod", model)
    return any(kind.__name__ in _WRAPPER_CLASSES for kind in type(inner).__mro__)


def identity(module: nn.Module) -> int:
    """What tells a module from others: nn.DataParallel's replicas share it with the original."""
    return id(module._forward_pre_hooks)


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that look like attention: by class name, or because their code calls a kernel.

    Only the innermost ones count (`BertAttention` holds `BertSelfAttention`). Returns
    {canonical name: module}.
    """
    looks = {n: m for n, m in named_modules(model).items() if _looks_like_attention(m)}
    return {
        name: module
        for name, module in looks.items()
        if not any(name == ROOT or other.startswith(f"{name}.") for other in looks if other != name)
    }


def _looks_like_attention(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return True
    if _is_torch_s_own(type(module)):
        return False
    used = set(_names_used(module, depth=0))
    if any(_ATTENTION_CALLS.search(name) for name in used):
        return True
    # channel attention and the like weigh with a sigmoid: the name alone is not enough
    named = _ATTENTION_NAME.search(type(module).__name__) is not None
    return named and any(_POSSIBLE.search(name) for name in used)


def attention_is_possible(model: nn.Module) -> bool:
    """Whether any module could compute attention; False only when that is certain.

    torch.nn's own modules are known; for others the names that their forward uses are read,
    through the methods and functions it calls. Where code cannot be read, attention is possible.
    """
    return any(map(_could_attend, {(type(m), _forward_of(m)): m for m in model.modules()}.values()))


def _could_attend(module: nn.Module) -> bool:
    kind = type(module)
    if _is_torch_s_own(kind) and not re.search("attention|transformer", kind.__name__.lower()):
        return False
    return bool(
        isinstance(module, nn.MultiheadAttention)
        or _ATTENTION_NAME.search(kind.__name__)
        or any(_POSSIBLE.search(name) for name in _names_used(module, depth=3))
        or _holds_a_function(module)
    )


def _is_torch_s_own(kind: type) -> bool:
    return kind.__module__.startswith("torch.nn.modules")


def _holds_a_function(module: nn.Module) -> bool:
    """Whether a module was given a function that is not torch's own: it could be attention."""
    return any(
        callable(value) and not isinstance(value, type | nn.Module) and _is_foreign(value)
        for name, value in vars(module).items()
        if not name.startswith("_")
    )


def _names_used(module: nn.Module, *, depth: int) -> Iterator[str]:
    """Names that a module's forward uses, with the methods it calls on itself.

    Functions up to `depth` calls away are read too. A forward that has no code of Python (a
    scripted module) uses a name that may be anything.
    """
    forward = _forward_of(module)
    if not isinstance(forward, types.FunctionType):
        yield _UNREADABLE
        return
    yield from _names_in(forward, type(module), depth, set())


def _forward_of(module: nn.Module) -> object:
    """The function behind a module's forward, under its decorators."""
    forward: Any = vars(module).get("forward", getattr(type(module), "forward", None))
    forward = inspect.unwrap(forward)
    return getattr(forward, "__func__", forward)


def _names_in(
    function: types.FunctionType, owner: type, depth: int, seen: set[int]
) -> Iterator[str]:
    if id(function) in seen:
        return
    seen.add(id(function))
    for code in _codes(function.__code__):
        for name in code.co_names:
            yield name
            member: Any = getattr(owner, name, None)
            method = inspect.unwrap(member)
            if isinstance(method, types.FunctionType):
                yield from _names_in(method, owner, depth, seen)
                continue
            called = function.__globals__.get(name)
            if depth > 0 and isinstance(called, types.FunctionType):
                yield from _names_in(called, owner, depth - 1, seen)
            elif depth > 0 and callable(called) and not isinstance(called, type | nn.Module):
                # a compiled or scripted callable: its own name is all there is to read
                yield _UNREADABLE if _is_foreign(called) else name


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those of the functions, lambdas and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_foreign(called: object) -> bool:
    """Whether a callable comes from outside Python, torch and NumPy, or was scripted."""
    if type(called).__name__ in ("ScriptFunction", "RecursiveScriptModule"):
        return True
    module = getattr(called, "__module__", None)
    return isinstance(module, str) and module.split(".")[0] not in _KNOWN


def head_count(module: nn.Module) -> int | None:
    """The number of heads that a module declares, under the field's usual names."""
    for name in ("num_heads", "n_heads", "n_head", "num_attention_heads", "heads", "nhead"):
        value = getattr(module, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def soft_cap(module: nn.Module) -> float | None:
    """The soft-cap on attention logits that a module or its config asks for."""
    for owner in (module, getattr(module, "config", None)):
        for name in (
            "attn_logit_softcapping",
            "attn_logit_softcap",
            "attention_logit_cap",
            "softcap",
        ):
            value = getattr(owner, name, None)
            if isinstance(value, int | float) and value > 0:
                return float(value)
    return None
