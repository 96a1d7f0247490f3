"""The house keeps its floors: no import goes upward or round in a circle, and no module reads another's private names."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: Lowest first; whatever is not named here is a program and stands above them all.
FLOORS = (
    set("_native distributed distribution files kernels locks ops tls tls_proxy untrusted validate".split()),
    {"calls"},
    {"accounting", "engine"},
    {"verify"},
    {"private"},
    {"methods"},
    {"builder", "entry", "integrations", "optim"},
)
#: The rooms of the engine, lowest first; its other files stand above them.
ENGINE = ({"errors", "bounds"}, {"uses"}, {"loss", "rules"}, {"capture", "clip"})
#: Private names of other people's libraries that are read for want of public ones, and why.
FOREIGN = {
    "_BatchNorm": "the base class of torch's batch normalisations",
    "_C": "the id of the backward pass that is running",
    "_current_graph_task_id": "the same",
    "_will_engine_execute_node": "whether it comes to a parameter",
    "_execution_engine": "what comes when it ends",
    "_indices": "the rows that a data set of `datasets` picks, which it tells in no other way",
    "_autograd": "whether hooks on what autograd saves are active",
    "_base": "what a product's output is a view of",
    "_are_functorch_transforms_active": "what torch asks before it applies a function",
    "_make_wrapper_subclass": "how torch makes a tensor that holds no data",
    "_get_active_ddp_module": "which wrapper of data parallelism a forward pass is in",
    "_call_impl": "a call of a module with its hooks, in which fully_shard gathers weights",
    "_compiled_call_impl": "what torch calls in its place, before any hook",
    "_get_fsdp_state": "what fully_shard keeps of a module",
    "_fsdp_param_groups": "the weights of it that are gathered together",
    "_all_gather_comm": "how they are gathered",
    "_all_gather_process_group": "among whom",
    "_use_post_forward_mesh": "whether that is another group in the backward pass",
    "_disable_current_modes": "how torch leaves those who follow operations out of some",
    "_version": "whether a tensor was written to",
    "_foreach_add_": "additions to many tensors in one launch",
    "_foreach_div_": "divisions of many tensors in one launch",
    "_assert_async": "a check on the device that the host does not wait for",
    "_schema": "the arguments of a registered operator",
    "_forward_pre_hooks": "the order in which a module's hooks run",
    "_forward_hooks": "whether a module's hooks are those of the first batch",
    "_backward_hooks": "the same",
    "_global_forward_hooks": "whether those of every module are",
    "_global_forward_pre_hooks": "the same",
    "_global_backward_hooks": "the same",
    "_parameters": "a module's own parameters, where it is only looked at",
    "_buffers": "buffers are put back where a module holds them",
    "_optimizer_step_pre_hooks": "whether somebody else looks at gradients before the step",
    "_optimizer_step_post_hooks": "whether somebody else acts after a step, whom ours must follow",
    "_tokenizer": "the tokenizer that transformers wraps",
    "_post_accumulate_grad_hooks": "hooks of the user's on parameters, which see no example's gradient",
    "_nn": "the losses below torch.nn.functional, which a loop may have imported before",
    "_getframe": "the line of code that selects tokens",
    "_is_view": "whether torch lets a model write into a layer's output",
    "_unsafe_view": "an output that it may write into",
}


def modules():
    found = {}
    for folder, prefix in (("fastdp", ""), ("kernels", "fastdp.")):
        for path in sorted((ROOT / folder).rglob("*.py")):
            name = prefix + ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = ast.parse(path.read_text())
    return found


MODULES = modules()


def imports(tree):
    """Modules of the package that a module imports, wherever in it, annotations' imports included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "fastdp")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "fastdp":
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                yield inner if inner in MODULES else node.module


# The root hands out public names when asked for them; what it imports for annotations alone is no floor's business.
GRAPH = {name: set(imports(tree)) for name, tree in MODULES.items() if name != "fastdp"}


def floor(module):
    room, *inner = module.split(".")[1:]
    height = height_in(FLOORS, room)
    return (height, height_in(ENGINE, inner[0]) if room == "engine" and inner else 0)


def height_in(floors, room):
    return next((height for height, rooms in enumerate(floors) if room in rooms), len(floors))


def test_no_import_goes_upward():
    upward = [
        (name, found)
        for name, every in GRAPH.items()
        for found in every
        if (floor(name)[0] < len(FLOORS) if found == "fastdp" else floor(found) > floor(name))
    ]
    assert upward == []


def reached(start):
    seen, waiting = set(), [start]
    while waiting:
        new = (GRAPH.get(waiting.pop(), set()) & GRAPH.keys()) - seen
        seen |= new
        waiting += new
    return seen


def test_no_imports_run_in_a_circle():
    reach = {name: reached(name) for name in GRAPH}
    circles = {
        frozenset(other for other in reach[name] if name in reach[other]) for name in GRAPH if name in reach[name]
    }
    assert circles == set()


def private_names(tree):
    """Names with a leading underscore that a module defines: functions, classes, attributes and assignments."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and getattr(node.value, "id", "") == "self"
        ):
            yield node.attr


def private_reads(tree):
    """Names with a leading underscore that a module reads of something, and of what."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            yield node.attr, ast.unparse(node.value)
        elif isinstance(node, ast.ImportFrom):
            yield from ((alias.name, str(node.module)) for alias in node.names)


def test_no_module_reads_anothers_private_names():
    """What a class of ours inherits from another library, such as a hook that it overrides, is its own."""
    defined = {name: set(private_names(tree)) for name, tree in MODULES.items()}
    ours = set().union(*defined.values())
    found = {}
    for name, tree in MODULES.items():
        for attribute, owner in private_reads(tree):
            private = attribute.startswith("_") and not attribute.startswith("__") and attribute != "_native"
            inherited = owner in ("self", "cls", "super()") and attribute not in ours
            if private and not inherited and attribute not in defined[name] and attribute not in FOREIGN:
                found.setdefault(name, set()).add(attribute)
    assert found == {}


#: How often tests read private names of ours, by file or folder, and why no public name serves. The counts may only fall.
IN_TESTS = {
    "conftest.py": (1, "runs that outlived their test, which no caller holds any more"),
    "kernels": (7, "five kernels, under the names that profiles of a GPU have"),
    "ops": (2, "a lock that is held during a fork, and the file in which a container states its memory"),
    "engine/test_head.py": (1, "where leaving logits out pays, at the size of toys"),
    "engine/test_memory.py": (1, "the same"),
    "private/test_noise_of_release.py": (2, "the positions that are drawn, which say how many rounds they take"),
    "accounting": (1, "a ledger's open file, which a kill closes"),
    "finetune": (2, "the recorder of a GPU, and the device that a run takes for one"),
    "methods": (3, "a route that is chosen, and one draw of a mechanism on a stream that can be drawn again"),
    "split": (6, "what a vendor and a customer keep between calls"),
}


def test_tests_read_private_names_where_no_public_one_serves():
    ours = set().union(*(set(private_names(tree)) for tree in MODULES.values()))
    # A named tuple's fields are public.
    others = {"_", "_fields", *FOREIGN}
    ours = {name for name in ours if name.startswith("_") and not name.startswith("__")} - others
    found = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text, name = path.read_text(), path.relative_to(ROOT / "tests").as_posix()
        if ours.isdisjoint(re.findall(r"\b_\w+", text)):
            continue
        tree = ast.parse(text)
        read = [attribute for attribute, owner in private_reads(tree) if owner not in ("self", "cls")]
        calls = [
            node
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and (getattr(node.func, "attr", "") or getattr(node.func, "id", "")).endswith("attr")
        ]
        read += [
            a.value for node in calls for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)
        ]
        foreign = ours - set(private_names(tree))
        count = sum(attribute.split(".")[-1] in foreign for attribute in read)
        place = name if name in IN_TESTS else name.split("/")[0]
        found[place] = found.get(place, 0) + count
    assert {place: n for place, n in found.items() if n > IN_TESTS.get(place, (0,))[0]} == {}
    assert all(reason for _, reason in IN_TESTS.values())
