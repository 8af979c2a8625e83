"""Makes a failing programme smaller, one part after another, as long as it fails in the same way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz.programme import Fields, Node, Programme, Step


def shrink(programme: Programme, fails: Callable[[Programme], bool], most: int = 2000) -> Programme:
    """Returns a programme for which ``fails`` is true, and of whose smaller ones none of the first ``most`` is."""
    tried = {programme}
    while True:
        for smaller in _smaller(programme):
            if smaller in tried:
                continue
            tried.add(smaller)
            if len(tried) > most:
                return programme
            if fails(smaller):
                programme = smaller
                break
        else:
            return programme


def _smaller(programme: Programme) -> Iterator[Programme]:
    steps = programme.steps
    for i in range(len(steps)):
        if len(steps) > 1:
            yield replace(programme, steps=steps[:i] + steps[i + 1 :])
    for root in _smaller_nodes(programme.root, is_root=True):
        yield replace(programme, root=root)
    for i, step in enumerate(steps):
        for simpler in (Step("plain"), replace(step, autocast=False), replace(step, needs_grad=True)):
            if simpler != step:
                yield replace(programme, steps=(*steps[:i], simpler, *steps[i + 1 :]))


def _smaller_nodes(node: Node, *, is_root: bool = False) -> Iterator[Node]:
    children = node.children
    for i, child in enumerate(children):
        if len(children) > 1:
            yield replace(node, children=children[:i] + children[i + 1 :])
        if child.children:
            yield replace(node, children=(*children[:i], *child.children, *children[i + 1 :]))
    policies = node.policies
    for i, (name, fields) in enumerate(policies):
        yield replace(node, policies=policies[:i] + policies[i + 1 :])
        for simpler in _simpler_fields(fields):
            yield replace(node, policies=(*policies[:i], (name, simpler), *policies[i + 1 :]))
    for i, child in enumerate(children):
        for smaller in _smaller_nodes(child):
            yield replace(node, children=(*children[:i], smaller, *children[i + 1 :]))
    if children and not is_root and (node.kind, node.arguments) != ("Chain", ""):
        kept = tuple(("", fields) for name, fields in policies if name in ("", "inner"))
        if len(dict(kept)) == len(kept):
            yield replace(node, kind="Chain", arguments="", policies=kept)
    if not children and (node.kind, node.arguments) != ("Linear", ""):
        yield replace(node, kind="Linear", arguments="", policies=tuple(p for p in policies if not p[0]))
        if node.arguments:
            yield replace(node, arguments="")


def _simpler_fields(fields: Fields) -> Iterator[Fields]:
    for i, (name, value) in enumerate(fields):
        if len(fields) > 1:
            yield fields[:i] + fields[i + 1 :]
        simpler = {"activation_checkpointing": "True", "offload": "'disk'", "min_elements": "1"}.get(name, value)
        if value not in (simpler, "False"):
            yield (*fields[:i], (name, simpler), *fields[i + 1 :])
