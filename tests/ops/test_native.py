"""What type checkers are told of the extension is what was built."""

import ast
import inspect
import re
from pathlib import Path

from fastdp import _native

STUB = ast.parse(Path(inspect.getfile(_native)).with_name("_native.pyi").read_text())


def declared(node):
    return [argument.arg for argument in node.args.args if argument.arg != "self"]


def built(function):
    return [name for name in re.findall(r"(\w+): ", function.__doc__.splitlines()[0]) if name != "self"]


def test_every_function_is_declared_with_its_arguments():
    functions = {node.name: declared(node) for node in STUB.body if isinstance(node, ast.FunctionDef)}
    public = {name: value for name, value in vars(_native).items() if not name.startswith("__")}
    assert functions == {name: built(value) for name, value in public.items() if not inspect.isclass(value)}
    classes = [node for node in STUB.body if isinstance(node, ast.ClassDef)]
    assert {node.name for node in classes} == {name for name, value in public.items() if inspect.isclass(value)}
    for node in classes:
        methods = {method.name: declared(method) for method in node.body if isinstance(method, ast.FunctionDef)}
        assert methods == {name: built(getattr(public[node.name], name)) for name in methods}
