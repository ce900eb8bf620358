"""Every private name of torch, and every unwritten rule of it, that the package relies on.

A name with an underscore may go with any release of torch. So each is read here and nowhere else
(``tests/test_surface.py`` holds that), and has a test in ``tests/test_torch_internals.py`` that
says what would break. On a torch that is newer than every tested one, ``torch_self_tests`` decides.
"""

from __future__ import annotations

from shardwise.torch_internals.self_tests import decide_on_newer_torch

if __name__ == "shardwise.torch_internals":  # before the names that a newer torch may lack
    decide_on_newer_torch(__file__)

import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import attrgetter, methodcaller
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._dynamo import eval_frame
from torch._functorch import eager_transforms, pyfunctorch, vmap
from torch._guards import TracingContext
from torch._subclasses import fake_tensor
from torch.autograd.graph import Node
from torch.nn.utils import parametrize
from torch.optim import _muon
from torch.utils import _foreach_utils, _python_dispatch, _pytree
from torch.utils.hooks import RemovableHandle

_SLOTS = cast("Any", Tensor)

# ---- tensors ---------------------------------------------------------------------------------

#: In this context, operations on our classes of tensors are those of plain tensors.
disable_torch_function = torch._C.DisableTorchFunctionSubclass
#: As ``__torch_function__`` of a class: it has methods of its own and torch's plain operations.
NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl

# What ``param.grad`` and ``param.data`` do, past the properties of our classes.
get_grad: Callable[[Tensor], Tensor | None] = _SLOTS.grad.__get__
set_grad: Callable[[Tensor, Tensor | None], None] = _SLOTS.grad.__set__
get_data: Callable[[Tensor], Tensor] = _SLOTS.data.__get__
set_data: Callable[[Tensor, Tensor], None] = _SLOTS.data.__set__
is_sparse: Callable[[Tensor], bool] = _SLOTS.is_sparse.__get__
#: What it is a view of, as autograd knows it.
base_of: Callable[[Tensor], Tensor | None] = _SLOTS._base.__get__
#: How often a tensor was written in place. Views of one base have one number.
get_version: Callable[[Tensor], int] = _SLOTS._version.__get__
#: How many own it in C++: its object in Python is one, a ``.grad`` or a graph another.
tensor_uses: Callable[[Tensor], int] = _SLOTS._use_count


def read_by_compiled_code() -> bool:
    """Does AOTAutograd look at a property of ours? It reads ``data``, and writes nothing."""
    return str(sys._getframe(2).f_globals["__name__"]).startswith("torch._functorch.")


#: Functions that hand tensors to C++ and do not ask their class for ``__torch_function__``.
UNSEEN_CALLS: tuple[tuple[Any, str], ...] = (
    (torch.autograd.Function, "apply"),
    (torch.jit.ScriptFunction, "__call__"),
    (vmap, "_add_batch_dim"),
    (eager_transforms, "_wrap_for_grad"),
    (eager_transforms, "_wrap_functional_tensor"),
    (Tensor, "__new__"),
    (torch.autograd.Variable, "__new__"),
    (torch, "tensor"),
    (torch, "as_tensor"),
    (torch, "asarray"),
    (torch.nested, "nested_tensor"),
    (torch.utils.dlpack, "to_dlpack"),
    (torch, "sparse_coo_tensor"),
    (torch.utils, "swap_tensors"),
    *((Tensor, name) for name in ("new", "new_tensor", "set_", "as_subclass")),
)
#: They ask for shapes first, and leave early on a rank that has no elements.
INITIALISATIONS = tuple(
    (nn.init, name)
    for name in dir(nn.init)
    if name.endswith("_") and name[0] != "_" and name not in ("constant_", "zeros_", "ones_")
)


def script_as(function: Callable[..., Any], original: Callable[..., Any]) -> None:
    """Make ``torch.jit.script`` compile ``function`` as the operator that ``original`` is."""
    if (operator := torch.jit._builtins._find_builtin(original)) is not None:
        torch.jit._builtins._register_builtin(function, operator)


def storage_key(tensor: Tensor) -> int:
    """The same number for tensors in the same storage, also while that has no memory."""
    return int(tensor.untyped_storage()._cdata)


def storage_uses(tensor: Tensor) -> int:
    """The owners of its storage, with those of torch's one Python object for it. Compare two."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) + sys.getrefcount(storage)


#: ``(flat, like) → `` views of ``flat``, one after the other, in the shapes of ``like``; one call.
split_flat: Callable[[Tensor, list[Tensor]], list[Tensor]] = torch._C._nn.unflatten_dense_tensors


_TRACKING = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView)
#: Gives views a version of their own inside the block, where ``detach_()`` takes them.
untracked_views = partial(torch._C._ExcludeDispatchKeyGuard, _TRACKING)


def take_in_lists(kind: type[Tensor]) -> None:
    """Make ``torch.nn.utils`` pass lists of this class at once, as it does plain tensors."""
    if kind not in _foreach_utils._foreach_supported_types:
        _foreach_utils._foreach_supported_types.append(kind)


# One kernel for many tensors.
foreach_copy_ = torch._foreach_copy_
foreach_zero_ = torch._foreach_zero_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
fused_adamw_ = torch._fused_adamw_

#: ``(matrix, coefficients, steps, eps) →`` orthogonalised, in bfloat16; may overwrite ``matrix``.
orthogonalize = _muon._zeropower_via_newtonschulz
#: ``(lr, adjust_lr_fn, shape) →`` the learning rate of Muon for a matrix of this shape.
muon_learning_rate = _muon._adjust_lr

#: Attention in one kernel, which keeps no scores: ``(output, logsumexp)``. Also on meta tensors.
flash_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
flash_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

#: Products of groups of rows, such as an expert's: ``(rows, weights, ends of groups)``.
grouped_mm = torch.ops.aten._grouped_mm

OpOverload = torch._ops.OpOverload
FakeTensorMode = fake_tensor.FakeTensorMode
#: A context in which ``__torch_dispatch__`` is told of each kernel, those of backward included.
TorchDispatchMode = _python_dispatch.TorchDispatchMode
tree_leaves = _pytree.tree_leaves
tree_map = _pytree.tree_map
tree_map_only = _pytree.tree_map_only

# ---- modules ---------------------------------------------------------------------------------

# What a module holds itself, in the dicts in which it holds it.
parameters_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = attrgetter("_parameters")
buffers_of: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = attrgetter("_modules")


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's own parameters and buffers, with the names that it has for them."""
    named = (*parameters_of(module).items(), *buffers_of(module).items())
    return [(name, tensor) for name, tensor in named if tensor is not None]


#: The method of a module by which ``.to()``, ``.half()``, ``.cuda()``, … convert its tensors.
CONVERT = "_apply"
#: Not 0 inside ``parametrize.cached()``, where a later call uses what an earlier one has computed.
keeps_parametrized: Callable[[], int] = partial(getattr, parametrize, "_cache_enabled")
#: In the metadata that a hook before ``load_state_dict`` gets: was ``assign=True`` said?
ASSIGN = "assign_to_params_buffers"

# ---- autograd --------------------------------------------------------------------------------

#: The number of the backward pass that this thread carries out, or -1.
graph_task: Callable[[], int] = torch._C._current_graph_task_id
#: Is the graph of the backward pass that goes on kept for another one?
keeps_graph: Callable[[], bool] = torch._C._autograd._get_current_graph_task_keep_graph
#: Will the backward pass that goes on execute this node? An error where it hands a leaf's out.
engine_executes: Callable[[Node], bool] = torch._C._will_engine_execute_node
#: The number that the next node of this thread gets. Backward goes from high numbers to low ones.
next_sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
#: The node that autograd executes on this thread, if any.
current_node: Callable[[], Node | None] = torch._C._current_autograd_node
#: The number that says when its thread made the node.
sequence_number: Callable[[Node], int] = methodcaller("_sequence_nr")
_ACCUMULATE_GRAD: Any = cast("Any", torch._C._functions).AccumulateGrad


def identity(node: Node) -> object:
    """Return what is the node's own for life, as its object in Python is not."""
    # torch calls it a method, and it is a dict
    return cast("Any", node.metadata).setdefault("shardwise", object())


def is_accumulate_grad(node: Node) -> bool:
    """Does the node add to a leaf's ``.grad``?"""
    return type(node) is _ACCUMULATE_GRAD


#: Call a function when the backward pass that goes on has ended; not where it raises.
queue_callback: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)
#: The hooks that ``register_post_accumulate_grad_hook`` adds to: a dict, or ``None``.
after_accumulation: Callable[[nn.Parameter], Any] = attrgetter("_post_accumulate_grad_hooks")


def set_after_accumulation(param: nn.Parameter, hooks: Any) -> None:
    """Add such hooks to a frozen parameter, too. autograd calls them in the dict's order."""
    param._post_accumulate_grad_hooks = hooks


def hooks_behind(handle: RemovableHandle) -> OrderedDict[int, Any]:
    """The dict of hooks that a handle would remove its own from; torch calls them in its order."""
    return handle.hooks_dict_ref() or OrderedDict()


#: The hooks on a tensor's gradient, which may keep what they are given; ``None``: there are none.
hooks_of: Callable[[Tensor], Any] = _SLOTS._backward_hooks.__get__


def computes_forward_derivatives() -> bool:
    """Are derivatives computed along with values (``torch.autograd.forward_ad``)?"""
    return torch.autograd.forward_ad._current_level >= 0


def is_transformed() -> bool:
    """Does a transform of ``torch.func`` look at what is computed?"""
    return torch._C._functorch.peek_interpreter_stack() is not None


#: The tensor in a wrapper that a transform of ``torch.func`` has left behind; another as it is.
unwrap_if_dead: Callable[[Tensor], Tensor] = torch._C._functorch.unwrap_if_dead


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Its ``apply`` in C, where no transform looks at what is computed: 14 calls of Python less."""
    in_c: Any = super(torch.autograd.Function, function)
    return cast("Callable[..., Any]", in_c.apply)


def outside_transforms() -> AbstractContextManager[Any]:
    """Return a context in which no transform of ``torch.func`` looks at what is computed."""
    return pyfunctorch.temporarily_clear_interpreter_stack() if is_transformed() else _AS_IT_IS


_AS_IT_IS = nullcontext()


# ---- torch.compile ---------------------------------------------------------------------------

NO_GRAPH = (
    "shardwise gathers and frees a unit here, and a graph cannot hold collectives: compile "
    "without fullgraph=True, or let shard(model, compile=True) compile the units"
)


def skip_in_dynamo(*functions: Callable[..., Any]) -> None:
    """These, and what they call, run as they are written, also inside a compiled region.

    With ``fullgraph=True`` torch's error gives the reason. ``torch.compiler.disable`` imports the
    compiler for everybody and costs a microsecond a call.
    """
    skip = eval_frame._FrameAction.SKIP
    strategy = eval_frame._FrameExecStrategy(skip, skip)
    for function in functions:
        eval_frame.set_code_exec_strategy(function.__code__, strategy)
        function._torchdynamo_disable = True  # type: ignore[attr-defined]  # and are not inlined
        function._torchdynamo_disable_msg = NO_GRAPH  # type: ignore[attr-defined]


def end_graph() -> None:
    """Raises the error that leaves what comes to Python, where dynamo traces a program."""
    if TracingContext.try_get() is not None:
        raise sys.modules["torch._dynamo.exc"].Unsupported(NO_GRAPH)


def is_compiled(module: nn.Module) -> bool:
    """Was it compiled, by ``module.compile()`` or by ``torch.compile`` of it or its forward?"""
    original = getattr(module.forward, "_torchdynamo_orig_callable", None)
    return original is not None or module._compiled_call_impl is not None


def watch_compiler(
    dynamo: ModuleType, start: Callable[[Any], None], end: Callable[[Any], None]
) -> None:
    """Call ``start`` and ``end`` around each compilation, until ``torch._dynamo.reset()``."""
    if start not in dynamo.callback_handler.start_callbacks:
        dynamo.on_compile_start(start)
        dynamo.on_compile_end(end)
