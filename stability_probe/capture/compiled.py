"""The compiled seam: puts the reader into the graphs that torch.compile makes.

For the backend inductor it is a pre-grad pass, beside whatever pass the user has set; its
`uuid` is a part of the key under which compiled graphs are cached. Other backends run no such
pass: for them the graph is rewritten just before the compiler hands it over. Both are in place
while a probe watches, and gone after the last one is closed.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.callback import callback_handler
from torch._dynamo.output_graph import OutputGraph
from torch._inductor import config as inductor
from torch._inductor.custom_graph_pass import (
    CustomGraphPass,
    get_custom_graph_passes,
    get_hash_for_files,
)
from torch._inductor.virtualized import V

from stability_probe.capture import families as f
from stability_probe.capture import functions, observer, provenance, traced
from stability_probe.capture.kernels import KERNELS
from stability_probe.capture.observer import CompiledSeam, connect, disconnect, live
from stability_probe.capture.traced import (
    FUNCTIONS,
    MULTI_HEAD,
    WATCHED,
    meaning,
    observed,
    split_source,
)

_ATTENTION = f.SDPA | f.SOFTMAX | f.LOG_SOFTMAX | f.EXP | KERNELS | {MULTI_HEAD}
_TRANSPOSED = ("mT", "mH", "T", "H")  # attributes of a tensor that are views of it


def rewrite(graph: fx.Graph, sources: Mapping[fx.Node, str] | None = None) -> None:
    """Makes the nodes of a graph that may be a part of attention call `observed` instead.

    Args:
        graph: as the compiler front end hands it over: torch functions and tensor methods.
        sources: the graph's placeholders that are parameters, and where they come from; a
            graph of its own knows them, one that is part of another does not.
    """
    if sources is None:
        sources = {n: s for n in graph.find_nodes(op="placeholder") if (s := _source(n))}
    for part, inner in _parts(graph, sources):
        rewrite(part.graph, inner)
        part.recompile()
    attends = any(_function(n) in _ATTENTION for n in graph.nodes)
    for node in list(graph.nodes):
        if node.target is observed:
            _own(node, sources)
        elif attends and _may_matter(node, sources):
            _wrap(node)
            _own(node, sources)


def _source(node: fx.Node) -> str:
    """The compiler's name of a placeholder that is a parameter or a buffer; else empty."""
    known = getattr(node, "_dynamo_source", None) or getattr(
        node.meta.get("grapharg"), "source", None
    )
    name = str(getattr(known, "name", ""))
    return name if split_source(name)[1] else ""


def _parts(
    graph: fx.Graph, sources: Mapping[fx.Node, str]
) -> Iterator[tuple[fx.GraphModule, dict[fx.Node, str]]]:
    """Graphs inside the graph (checkpointed regions), with the parameters handed to them."""
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        for i, argument in enumerate(node.args):
            if not isinstance(argument, fx.Node) or argument.op != "get_attr":
                continue
            part = getattr(graph.owning_module, str(argument.target), None)
            if isinstance(part, fx.GraphModule):
                names = part.graph.find_nodes(op="placeholder")
                given = node.args[i + 1 : i + 1 + len(names)]
                pairs = zip(names, given, strict=False)
                yield part, {n: sources[g] for n, g in pairs if g in sources}


def _function(node: fx.Node) -> Any:
    """The function of a node, as the eager seam knows it; of a rewritten one, that of before."""
    if node.op == "call_method":
        return getattr(torch.Tensor, str(node.target), None)
    if node.target is observed:
        return meaning(FUNCTIONS[json.loads(str(node.args[0]))["function"]])
    return meaning(node.target) if node.op == "call_function" else None


def _may_matter(node: fx.Node, sources: Mapping[fx.Node, str]) -> bool:
    function = _function(node)
    if function is getattr:
        return node.args[1] in _TRANSPOSED
    if function not in WATCHED:
        return False
    # a product with a parameter is a projection or a router, and no attention
    return function not in f.PRODUCT or not any(_is_parameter(a, sources) for a in node.args)


def _is_parameter(argument: Any, sources: Mapping[fx.Node, str]) -> bool:
    """Whether a node is a parameter, or a parameter seen through a view."""
    while isinstance(argument, fx.Node):
        if argument in sources:
            return "_parameters" in sources[argument]
        function, first = _function(argument), 3 if argument.target is observed else 0
        if len(argument.args) <= first or not (function in f.VIEWS or function is getattr):
            return False
        argument = argument.args[first]
    return False


def _wrap(node: fx.Node) -> None:
    """Puts `observed` in the place of the node's function."""
    method = node.op == "call_method"
    function: Any = getattr(torch.Tensor, str(node.target)) if method else node.target
    if function not in FUNCTIONS:
        FUNCTIONS.append(function)
    stack = [[key, path] for key, (path, _) in node.meta.get("nn_module_stack", {}).items()]
    step = {"number": next(_NUMBERS), "function": FUNCTIONS.index(function), "stack": stack}
    node.op, node.target = "call_function", observed
    node.args = (json.dumps(step), "", None, *node.args)


def _own(node: fx.Node, sources: Mapping[fx.Node, str]) -> None:
    """Gives a rewritten node the parameter that tells whose call it is: the nearest one."""
    if not sources or node.args[2] is not None:
        return
    path = [p for _, p in json.loads(str(node.args[0]))["stack"]]
    here = path[-1].split(".") if path else []

    def nearness(owner: fx.Node) -> int:
        root, name = split_source(sources[owner])
        there = f"{root}.{name}".split(".")
        return sum(a == b for a, b in zip(here, there, strict=False))

    owner = max(sources, key=nearness)
    step, _, _, *rest = node.args
    node.args = (step, sources[owner], owner, *rest)


def _numbers() -> Iterator[int]:
    number = 0
    while True:
        yield (number := number + 1)


_NUMBERS = _numbers()


class PreGradPass(CustomGraphPass):
    """Inductor's pre-grad pass. What it does depends on the graph alone."""

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrites a graph that is compiled to run here, and none that is exported."""
        if not V.aot_compilation:
            rewrite(graph)

    def uuid(self) -> Any:
        """Changes with the code that decides what is traced."""
        modules = (observer, traced, functions, provenance, f)
        files = [m.__file__ for m in modules if m.__file__]
        return get_hash_for_files((__file__, *files))


_PASS = PreGradPass()
# The hooks that the warning is about know that an OptimizedModule is no module of the model.
_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"
_HAND_OVER = OutputGraph.call_user_compiler


def _hand_over(self: OutputGraph, gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
    """Rewrites a graph for a backend that runs no pre-grad pass, then hands it over."""
    if live() and not _is_inductor(self.compiler_fn):
        rewrite(gm.graph)
        gm.recompile()
    return _HAND_OVER(self, gm, example_inputs)


def _is_inductor(backend: Any) -> bool:
    while (inner := getattr(backend, "_torchdynamo_orig_backend", None)) is not None:
        backend = inner
    named = getattr(backend, "compiler_name", None) or getattr(backend, "__name__", "")
    return named in ("inductor", "compile_fx")


def _pause(_: Any) -> None:
    for seam in live():
        seam.taker.pause()


def _resume(_: Any) -> None:
    for seam in live():
        seam.taker.resume()


_CALLBACKS = (
    (callback_handler.start_callbacks, _pause),
    (callback_handler.end_callbacks, _resume),
)


def renew() -> None:
    """Sets what `torch._dynamo.reset()` drops; call it between steps."""
    for callbacks, ours in _CALLBACKS:
        if ours not in callbacks:
            callbacks.append(ours)


_USERS: list[Any] = []  # the pass that the user had set, while ours is beside it


def _install() -> None:
    passes = get_custom_graph_passes(inductor.pre_grad_custom_pass)
    if _PASS not in passes:
        _USERS[:] = [inductor.pre_grad_custom_pass]
        inductor.pre_grad_custom_pass = (*passes, _PASS)
    if OutputGraph.call_user_compiler is _HAND_OVER:
        OutputGraph.call_user_compiler = _hand_over  # type: ignore[method-assign]
        renew()
        warnings.filterwarnings("ignore", message=_WARNING, category=UserWarning)


def _uninstall() -> None:
    """Leaves what the user has set, before or since."""
    passes = get_custom_graph_passes(inductor.pre_grad_custom_pass)
    others = tuple(p for p in passes if p is not _PASS)
    if _PASS in passes:
        unchanged = _USERS and get_custom_graph_passes(_USERS[0]) == others
        inductor.pre_grad_custom_pass = _USERS[0] if unchanged else others or None
    if OutputGraph.call_user_compiler is _hand_over:
        OutputGraph.call_user_compiler = _HAND_OVER  # type: ignore[method-assign]
        for callbacks, ours in _CALLBACKS:
            callbacks[:] = [c for c in callbacks if c is not ours]
        warnings.filters[:] = [w for w in warnings.filters if not _is_ours(w)]  # type: ignore[index]


def _is_ours(entry: tuple[Any, ...]) -> bool:
    """Whether a filter of warnings is the one set here."""
    return bool(getattr(entry[1], "pattern", entry[1]) == _WARNING)


def open_seam(taker: observer.Taker, model: nn.Module) -> CompiledSeam:
    """From now on what is compiled of the model reports its attention calls to `taker`."""
    seam = CompiledSeam(taker, model)
    connect(seam)
    _install()
    return seam


def close_seam(seam: CompiledSeam) -> None:
    """The seam reports nothing any more; after the last one nothing is rewritten."""
    disconnect(seam)
    if not live():
        _uninstall()
