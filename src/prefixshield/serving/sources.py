"""Signatures and attributes read off Python sources, without importing them.

Cheap enough for every start (the front end's modules would take seconds to import), and the same
for a release that is not installed. Names that a class inherits are not seen.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

#: Gives a file's text by its path below the folder of the packages; None: there is none.
Read = Callable[[str], str | None]


class Sources:
    """The modules of a package, parsed when they are first asked for."""

    def __init__(self, read: Read) -> None:
        self._read = read
        self._modules: dict[str, ast.Module] = {}

    def parameters(self, target: str) -> list[str] | None:
        """The parameters of ``module:Class.function`` without ``self``; None: not there."""
        node = self._find(target)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return None
        given = node.args
        ordered = [
            *(given.posonlyargs + given.args),
            *([given.vararg] if given.vararg else []),
            *given.kwonlyargs,
            *([given.kwarg] if given.kwarg else []),
        ]
        return [argument.arg for argument in ordered if argument.arg != "self"]

    def attributes(self, target: str) -> set[str] | None:
        """What ``module:Class`` defines and what its methods set on ``self``; None: not there."""
        node = self._find(target)
        if not isinstance(node, ast.ClassDef):
            return None
        names = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
        for child in ast.walk(node):
            match child:
                case ast.AnnAssign(target=ast.Name(id=name)):
                    names.add(name)
                case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                    names.add(name)
        return names

    def _find(self, target: str) -> ast.AST | None:
        module, _, path = target.partition(":")
        node: ast.AST | None = self._module(module)
        for name in path.split("."):
            inside = {getattr(child, "name", ""): child for child in getattr(node, "body", ())}
            node = inside.get(name)
        return node

    def _module(self, name: str) -> ast.Module:
        if name not in self._modules:
            path = name.replace(".", "/")
            text = self._read(f"{path}.py") or self._read(f"{path}/__init__.py") or ""
            self._modules[name] = ast.parse(text)
        return self._modules[name]
