"""Which modules could hold attention, and what they are called.

Nothing is decided by names alone: a name or the code of a `forward` makes a module a
*candidate*, and only a call seen at run time makes it a site. A candidate that never gives a
call is reported, so that blindness is loud.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator

from torch import nn

# Wrappers put these parts into module names; canonical names survive a restart without them.
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

_ATTENTION_CALLS = re.compile(r"scaled_dot_product|flash_attn|flex_attention|memory_efficient_att")
_ATTENTION_NAME = re.compile(r"att(ention|n)(?!.*(mask|pool_|norm))", re.IGNORECASE)
_POSSIBLE = re.compile(r"softmax|attention|attn|sdpa", re.IGNORECASE)

ROOT = "(root)"  # the name of the watched model itself


def canonical_name(name: str) -> str:
    """The module name without what torch.compile, DDP, FSDP and checkpoint wrappers add."""
    parts = [p for p in name.split(".") if p and p not in _WRAPPERS]
    while parts and parts[0] == "module":
        parts = parts[1:]
    return ".".join(parts) or ROOT


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that look like attention: by class name, or because their code calls a kernel.

    Only the innermost ones count (`BertAttention` holds `BertSelfAttention`). Returns
    {canonical name: module}.
    """
    looks = {
        name: module for name, module in model.named_modules() if _looks_like_attention(module)
    }
    return {
        canonical_name(name): module
        for name, module in looks.items()
        if not any(other.startswith(f"{name}." if name else "") for other in looks if other != name)
    }


def _looks_like_attention(module: nn.Module) -> bool:
    if isinstance(module, nn.MultiheadAttention):
        return True
    used = list(_names_used(type(module), depth=0))
    if any(_ATTENTION_CALLS.search(name) for name in used):
        return True
    # channel attention and the like weigh with a sigmoid: the name alone is not enough
    named = _ATTENTION_NAME.search(type(module).__name__) is not None
    return named and any(_POSSIBLE.search(name) for name in used)


def attention_is_possible(model: nn.Module) -> bool:
    """Whether any module could compute attention; False only when that is certain.

    torch.nn's own modules are known; for others the names that their methods use are read,
    through the functions they call. Where code cannot be read, attention is possible.
    """
    kinds = {type(m) for m in model.modules()}
    return any(
        issubclass(kind, nn.MultiheadAttention)
        or _ATTENTION_NAME.search(kind.__name__)
        or any(_POSSIBLE.search(name) for name in _names_used(kind, depth=3))
        or _holds_functions(kind, model)
        for kind in kinds
        if not kind.__module__.startswith("torch.nn.modules")
        or "attention" in kind.__name__.lower()
        or "transformer" in kind.__name__.lower()
    )


def _holds_functions(kind: type, model: nn.Module) -> bool:
    """Whether a module of the class was given a function: it could be attention."""
    return any(
        isinstance(value, types.FunctionType | types.BuiltinFunctionType)
        for module in model.modules()
        if type(module) is kind
        for name, value in vars(module).items()
        if not name.startswith("_")
    )


def _names_used(kind: type, *, depth: int) -> Iterator[str]:
    """Names that the methods of a module class use, and those of functions up to `depth` away."""
    for base in kind.__mro__:
        if base is nn.Module:
            return
        for member in vars(base).values():
            if isinstance(member, types.FunctionType):
                yield from _names_in(member, depth, set())


def _names_in(function: types.FunctionType, depth: int, seen: set[int]) -> Iterator[str]:
    if id(function) in seen:
        return
    seen.add(id(function))
    for code in _codes(function.__code__):
        for name in code.co_names:
            yield name
            called = function.__globals__.get(name)
            if depth > 0 and isinstance(called, types.FunctionType):
                yield from _names_in(called, depth - 1, seen)
            elif depth > 0 and callable(called) and not isinstance(called, type):
                # a compiled or scripted callable: its own name is all there is to read
                yield "unreadable_softmax" if _is_foreign(called) else name


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """A code object and those of the functions, lambdas and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _is_foreign(called: object) -> bool:
    module = getattr(called, "__module__", "") or ""
    return not module.startswith(("torch", "builtins", "math", "numpy"))


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
