"""What torch does not promise, and the package relies on. Each test says what breaks without it."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim.optimizer import register_optimizer_step_pre_hook

from shardwise import torch_internals as internals


class Token:
    """Something to hold."""


class Silent(Tensor):
    __torch_function__: Any = internals.NO_TORCH_FUNCTION


class Loud(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError("an operation was seen")


def loud(value: Tensor) -> Tensor:
    value.__class__ = Loud
    return value


# ---- tensors ---------------------------------------------------------------------------------


def test_owners_of_a_tensor_and_of_its_storage_are_counted() -> None:
    """Else a mean gradient would be overwritten that somebody still holds."""
    param, values = nn.Parameter(torch.ones(3)), torch.ones(4)
    view = values[:3]
    before = internals.storage_uses(values)
    assert internals.tensor_uses(view) == 1
    param.grad = view
    assert internals.tensor_uses(view) == 2
    product = torch.ones(3, requires_grad=True) * view
    assert internals.tensor_uses(view) == 3
    alias = view.detach()
    assert internals.storage_uses(values) == before + 1
    storage = view.untyped_storage()
    assert internals.storage_uses(values) > before + 1
    del product, alias, storage
    param.grad = None
    assert internals.tensor_uses(view) == 1
    assert internals.storage_uses(values) == before


def test_an_untracked_view_is_a_tensor_of_its_own_for_autograd() -> None:
    """Else ``p.grad.detach_()``, torch's ``zero_grad()`` of old, would raise for each gradient."""
    flat = torch.zeros(4)
    with internals.untracked_views():
        first, _ = internals.split_flat(flat, [torch.empty(2), torch.empty(2)])
    assert first.detach_().data_ptr() == flat.data_ptr()
    assert (internals.get_version(first.add_(1)), internals.get_version(flat)) == (1, 0)


def test_lists_of_a_class_are_taken_by_one_function() -> None:
    """Else torch's ``clip_grad_norm_`` would make a collective for each parameter."""
    calls_seen = list[str]()

    class Noted(Tensor):
        @classmethod
        def __torch_function__(
            cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            calls_seen.append(func.__name__)
            with internals.disable_torch_function():
                return func(*args, **(kwargs or {}))

    gradients = [torch.ones(2).as_subclass(Noted) for _ in range(2)]
    for calls in (0, 1):
        calls_seen.clear()
        torch.nn.utils.get_total_norm(gradients)
        assert calls_seen.count("_foreach_norm") == calls
        internals.take_in_lists(Noted)


def test_a_class_may_leave_operations_to_torch() -> None:
    """Else a gathered parameter would pay for Python at every operation of the model."""
    tensor = torch.ones(2)
    tensor.__class__ = Silent
    assert type(tensor + 1) is Tensor


def test_operations_of_our_classes_can_be_plain_for_a_while() -> None:
    """Else what carries out an operation on a shard would be asked about it again, without end."""
    tensor = loud(torch.ones(2))
    with internals.disable_torch_function():
        assert (tensor + 1).sum() == 4
    with pytest.raises(AssertionError):
        tensor + 1


def test_grad_and_data_are_reached_past_the_properties_of_a_class() -> None:
    """Else every step would pay for our own properties, several times for each parameter."""

    class Hidden(Silent):
        grad = data = property()  # which can be neither read nor set

    tensor, grad = torch.ones(2), torch.zeros(2)
    tensor.__class__ = Hidden
    internals.set_grad(tensor, grad)
    assert internals.get_grad(tensor) is grad
    internals.set_data(tensor, torch.ones(3))
    assert internals.get_data(tensor).shape == (3,)


def test_a_gradient_stays_where_data_gets_another_shape() -> None:
    """A gathered parameter keeps its shard's gradient: torch compares shapes when one is set."""
    param, grad = nn.Parameter(torch.ones(4)), torch.ones(4)
    param.grad = grad
    internals.set_data(param, torch.ones(2, 4))
    assert internals.get_grad(param) is grad
    with pytest.raises(RuntimeError):
        internals.set_grad(param, torch.ones(4))


def test_data_of_another_dtype_makes_autograd_forget_the_node_that_accumulates() -> None:
    """In mixed precision each gather makes a new node, so the engine adds up a parameter's uses."""
    param = nn.Parameter(torch.ones(2))
    before = get_gradient_edge(param).node
    internals.set_data(param, torch.ones(2, dtype=torch.bfloat16))
    assert get_gradient_edge(param).node is not before


def test_writes_in_place_are_counted_also_by_views_and_not_through_data() -> None:
    """Else writes to a parameter in its unit's forward pass would be lost without a word."""
    base = torch.ones(4)
    view, own = base[:2], base.data
    before = internals.get_version(view)
    own.add_(1)
    assert internals.get_version(view) == before
    base.add_(1)
    assert internals.get_version(view) == before + 1


def test_a_view_knows_its_base() -> None:
    """Else an output that is changed in place would hide the node by which its call is known."""
    base = torch.ones(4, requires_grad=True) * 1
    assert internals.base_of(base[:2]) is base
    assert internals.base_of(base) is None


def test_a_storage_has_one_key_with_and_without_memory() -> None:
    """Else an output that is a view of a parameter would be freed with its unit."""
    tensor = torch.ones(4)
    key = internals.storage_key(tensor)
    tensor.untyped_storage().resize_(0)
    assert internals.storage_key(tensor.view(2, 2)) == key
    assert internals.storage_key(torch.ones(4)) != key


def test_a_flat_tensor_is_split_into_views() -> None:
    """Else a gather would cost a call for each parameter."""
    flat = torch.arange(6.0)
    first, second = internals.split_flat(flat, [torch.empty(2, 2), torch.empty(2)])
    assert first.tolist() == [[0, 1], [2, 3]]
    second.zero_()
    assert flat.tolist() == [0, 1, 2, 3, 0, 0]


def test_one_call_serves_many_tensors() -> None:
    """Else small gradients would cost a call each."""
    written, read = [torch.zeros(2), torch.zeros(3)], [torch.ones(2), torch.ones(3)]
    internals.foreach_copy_(written, read)
    internals.foreach_mul_(written, 2.0)
    assert [float(norm) for norm in internals.foreach_norm(written, 1)] == [4, 6]


def test_the_fused_optimizer_takes_flat_tensors() -> None:
    """Else the flat optimizer would be torch's unfused one, several times as slow."""
    param, grad, step = torch.ones(3), torch.ones(3), torch.ones(())
    internals.fused_adamw_(
        [param], [grad], [torch.zeros(3)], [torch.zeros(3)], [], [step], lr=0.5, beta1=0.9,
        beta2=0.99, weight_decay=0.0, eps=0.0, amsgrad=False, maximize=False,
    )  # fmt: skip
    torch.testing.assert_close(param, torch.full((3,), 0.5))


def test_muon_computes_in_bfloat16_and_does_not_see_how_a_matrix_came_together() -> None:
    """Else what travels between ranks would have to be wider, or results would not be torch's."""
    torch.manual_seed(0)
    matrix, coefficients = torch.randn(9, 5), (3.4445, -4.7750, 2.0315)
    whole = internals.orthogonalize(matrix, coefficients, 5, 1e-7)
    assert whole.dtype is torch.bfloat16
    narrow = internals.orthogonalize(matrix.bfloat16(), coefficients, 5, 1e-7)
    assert torch.equal(whole, narrow)
    assert torch.linalg.svdvals(whole.float()).sub(1).abs().max() < 0.5
    assert internals.muon_learning_rate(0.1, None, torch.Size((16, 4))) == 0.2
    assert internals.muon_learning_rate(0.1, "match_rms_adamw", torch.Size((16, 4))) == 0.1 * 0.8


def test_elementwise_kernels_of_muon_round_alike_wherever_an_element_lies() -> None:
    """Else momentum on shards would have other bits than on whole matrices."""
    torch.manual_seed(0)
    whole, other = torch.randn(1003), torch.randn(1003)
    for weight in (0.05, 0.95):
        expected = whole.lerp(other, weight)
        parts = [a.clone().lerp(b.clone(), weight) for a, b in _uneven(whole, other)]
        assert torch.equal(torch.cat(parts), expected)
    expected = whole.add(other.bfloat16(), alpha=-0.0123)
    parts = [a.clone().add(b.bfloat16(), alpha=-0.0123) for a, b in _uneven(whole, other)]
    assert torch.equal(torch.cat(parts), expected)


def _uneven(*tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    return zip(*(tensor.split([1, 3, 33, 463, 503]) for tensor in tensors), strict=True)


@pytest.mark.parametrize("number", range(len(internals.UNSEEN_CALLS)))
def test_some_functions_hand_tensors_to_c_and_do_not_ask_their_class(number: int) -> None:
    """Else shards would be seen there, and ``unseen_calls`` would not be needed."""

    owner: Any = internals.UNSEEN_CALLS[number][0]

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return torch.ones(2)

    def transformed(transform: Any) -> Any:
        return transform(lambda _: torch.zeros(()))

    torch_jit: Any = torch.jit
    dlpack: Any = torch.utils.dlpack
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of being deprecated, by another class in each version
        scripted = torch_jit.trace(torch.abs, torch.ones(2))
    uses = (
        Doubled.apply,
        scripted,
        lambda value: torch.func.vmap(lambda x: owner._add_batch_dim(value, 0, 1) + x)(
            torch.ones(2)
        ),
        transformed(torch.func.grad),
        transformed(torch.func.functionalize),
        torch.Tensor,
        torch.autograd.Variable,
        torch.tensor,
        torch.as_tensor,
        torch.asarray,
        lambda value: torch.nested.nested_tensor([value]),
        dlpack.to_dlpack,
        lambda value: torch.sparse_coo_tensor([[0, 1]], value),  # type: ignore[arg-type]
        lambda value: torch.utils.swap_tensors(value, loud(torch.ones(2))),
        torch.ones(1).new,
        torch.ones(1).new_tensor,
        lambda value: torch.ones(1).set_(value),
        lambda value: value.as_subclass(Tensor),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's advice on copies of tensors
        uses[number](loud(torch.ones(2)))


def test_a_function_is_scripted_as_the_operator_that_it_stands_for() -> None:
    """Else a script that calls ``torch.tensor`` could not be compiled once that is replaced."""
    internals.script_as(negated, torch.neg)
    script: Any = torch.jit.script
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scripted = script(calls_negated)
    assert torch.equal(scripted(torch.ones(2)), -torch.ones(2))


def negated(*args: Any) -> Tensor:
    raise AssertionError("torch has the operator")


def calls_negated(x: Tensor) -> Tensor:
    return negated(x)


# ---- modules ---------------------------------------------------------------------------------


def test_modules_hold_what_is_theirs_in_dicts_that_may_be_changed() -> None:
    """Else buffers could not be put on another device without their module's properties."""
    module = nn.Sequential(nn.BatchNorm1d(2))
    norm = module[0]
    assert internals.children_of(module) == {"0": norm}
    assert list(internals.parameters_of(norm)) == ["weight", "bias"]
    replacement = torch.zeros(2)
    internals.buffers_of(norm)["running_var"] = replacement
    assert norm.running_var is replacement


def test_load_state_dict_tells_its_hooks_of_assign() -> None:
    """Else ``assign=True`` would replace shards by parameters that no rank trains."""
    assigns: list[object] = []

    def note(module: Any, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
        assigns.append(metadata.get(internals.ASSIGN, False))

    model = nn.Linear(2, 2)
    model.register_load_state_dict_pre_hook(note)
    model.load_state_dict(model.state_dict())
    model.load_state_dict(model.state_dict(), assign=True)
    assert assigns == [False, True]


# ---- autograd --------------------------------------------------------------------------------


def test_nodes_are_numbered_as_they_are_made() -> None:
    """Else a call whose inputs need no gradient would not be known to have ended."""
    leaf = torch.ones(2, requires_grad=True)
    first = internals.next_sequence_number()
    one = leaf * 2
    two = one * 2
    assert one.grad_fn is not None
    assert two.grad_fn is not None
    assert internals.sequence_number(one.grad_fn) == first
    assert internals.sequence_number(two.grad_fn) == first + 1


def test_a_node_keeps_an_object_that_is_its_own() -> None:
    """Else one node that ends a call and begins another would not be known to be one."""
    one = torch.ones(2, requires_grad=True) * 2
    two = one * 2
    assert one.grad_fn is not None
    assert two.grad_fn is not None
    own = internals.identity(one.grad_fn)
    gc.collect()
    assert internals.identity(two.grad_fn.next_functions[0][0]) is own  # type: ignore[arg-type]
    assert internals.identity(two.grad_fn) is not own


def test_torch_says_whether_it_keeps_what_parametrizations_have_computed() -> None:
    """Else a backward pass would read the freed weight of the call that computed it first."""
    assert not internals.keeps_parametrized()
    with nn.utils.parametrize.cached():
        assert internals.keeps_parametrized()
    assert not internals.keeps_parametrized()


def test_a_leafs_node_is_told_from_others() -> None:
    """Else a unit whose input is a leaf would wait for a gradient that comes in any order."""
    leaf = torch.ones(2, requires_grad=True)
    assert internals.is_accumulate_grad(get_gradient_edge(leaf).node)
    assert not internals.is_accumulate_grad(get_gradient_edge(leaf * 2).node)


def test_a_backward_pass_has_a_number_and_calls_back_at_its_end() -> None:
    """Else nobody would reduce what is left over, and deliver the gradients."""
    leaf, log = torch.ones(2, requires_grad=True), list[object]()

    def hook(_: Tensor) -> None:
        log.append(internals.graph_task() >= 0)
        internals.queue_callback(lambda: log.append("end"))

    leaf.register_hook(hook)
    assert internals.graph_task() == -1
    (leaf * 2).sum().backward()
    assert log == [True, "end"]


def test_what_calls_back_goes_where_a_backward_pass_raises() -> None:
    """Else parameters would stay whole, and without their gradients, in the handler of a user."""
    leaf, log = torch.ones(2, requires_grad=True), list[object]()
    references: list[weakref.ref[object]] = []

    def hook(_: Tensor) -> None:
        token = Token()
        references.append(weakref.ref(token))
        internals.queue_callback(partial(log.append, token))
        raise ValueError("on purpose")

    leaf.register_hook(hook)
    with pytest.raises(ValueError, match="on purpose"):
        (leaf * 2).sum().backward()
    assert references[0]() is None
    assert not log


@pytest.mark.parametrize("kept", [False, True])
def test_a_backward_pass_tells_whether_its_graph_is_kept(kept: bool) -> None:
    """Else units would be freed though a pass through a recorded graph is to come."""
    leaf, log = torch.ones(2, requires_grad=True), list[bool]()
    leaf.register_hook(lambda _: log.append(internals.keeps_graph()))
    (leaf * 2).sum().backward(retain_graph=kept)
    assert log == [kept]


def test_a_transform_of_torch_func_is_noticed() -> None:
    """Else units would be freed before its gradients come."""
    log = [internals.is_transformed()]

    def square(x: Tensor) -> Tensor:
        log.append(internals.is_transformed())
        return x**2

    torch.func.grad(square)(torch.ones(()))
    assert log == [False, True]


def test_outside_of_transforms_tensors_are_plain_and_can_be_written() -> None:
    """Else a gather in the middle of one would fail."""
    memory = torch.zeros(3)

    def product(x: Tensor) -> Tensor:
        with internals.outside_transforms():
            assert not internals.is_transformed()
            memory.copy_(torch.arange(3.0))
        assert internals.is_transformed()
        return x * memory

    rows = torch.func.vmap(torch.func.jacrev(product))(torch.ones(2, 3))
    assert torch.equal(rows, torch.arange(3.0).diag().expand(2, 3, 3))


@pytest.mark.filterwarnings("ignore:.torch.jit.script")  # that torch imports for duals
def test_forward_derivatives_are_told_from_values_alone() -> None:
    """Else they would come to a function that has none."""
    assert not internals.computes_forward_derivatives()
    with torch.autograd.forward_ad.dual_level():
        assert internals.computes_forward_derivatives()


def test_hooks_on_a_gradient_are_seen() -> None:
    """Else one would keep memory of the engine, where the next gradient is written."""
    leaf = torch.ones(2, requires_grad=True)
    assert not internals.hooks_of(leaf)
    handle = leaf.register_hook(lambda _: None)
    assert internals.hooks_of(leaf)
    handle.remove()
    assert not internals.hooks_of(leaf)


@pytest.mark.parametrize("passes_to", ["everything", "the leaf", "another leaf"])
def test_the_engine_tells_what_a_pass_executes(passes_to: str) -> None:
    """Else ``autograd.grad`` would hand out this rank's gradient of a parameter in silence."""
    leaf, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    answers: list[object] = []

    def hook(_: Tensor) -> None:
        try:
            answers.append(internals.engine_executes(get_gradient_edge(leaf).node))
        except RuntimeError:
            answers.append("handed out")

    product = leaf * other
    product.register_hook(hook)
    if passes_to == "everything":
        product.sum().backward()
    else:
        torch.autograd.grad(product.sum(), leaf if passes_to == "the leaf" else other)
    expected = {"everything": True, "the leaf": "handed out", "another leaf": False}
    assert answers == [expected[passes_to]]


def test_hooks_after_accumulation_are_called_in_the_order_of_their_dict() -> None:
    """Else hooks of users would find that our hook took the gradient away."""
    param, log = nn.Parameter(torch.ones(2)), list[str]()
    hooks = OrderedDict({0: lambda _: log.append("first"), 1: lambda _: log.append("second")})
    internals.set_after_accumulation(param, hooks)
    assert internals.after_accumulation(param) is hooks
    param.sum().backward()
    assert log == ["first", "second"]


def test_a_handle_leads_to_the_hooks_beside_its_own() -> None:
    """Else the hooks of models that are gone would stay on every optimizer of the process."""

    def hook(*_: Any) -> None: ...

    handle = register_optimizer_step_pre_hook(hook)
    assert hook in internals.hooks_behind(handle).values()
    handle.remove()
    assert hook not in internals.hooks_behind(handle).values()


# ---- torch.compile ---------------------------------------------------------------------------


def test_marked_functions_run_outside_graphs_and_compilations_are_announced() -> None:
    """Else the compiler would trace our hooks, or refuse parameters with a shard's gradient."""
    import torch._dynamo

    log: list[str] = []
    internals.watch_compiler(
        torch._dynamo, lambda _: log.append("start"), lambda _: log.append("end")
    )

    def ours(x: Tensor) -> Tensor:
        log.append("ours")
        return x

    internals.skip_in_dynamo(ours)
    compiled = torch.compile(lambda x: ours(x + 1) * 2, backend="eager")
    try:
        compiled(torch.ones(2))
        compiled(torch.ones(2))
    finally:
        torch._dynamo.reset()
    assert log.count("ours") == 2
    assert log[0] == "start"
    assert "end" in log


# ---- graphs ----------------------------------------------------------------------------------


def test_fake_tensors_have_shapes_and_no_values() -> None:
    """Without them a trace would need the model's memory."""
    with internals.FakeTensorMode():
        product = torch.empty(1 << 20, 1 << 20) @ torch.empty(1 << 20, 2)
    assert product.shape == (1 << 20, 2)


def test_operations_say_whether_their_result_is_a_view() -> None:
    """Without it views of parameters would be kept for the backward pass, and be stale there."""
    aten = torch.ops.aten
    assert isinstance(aten.t.default, internals.OpOverload)
    assert aten.t.default.is_view
    assert aten.view.default.is_view
    assert not aten.mm.default.is_view
    assert not aten.add_.Tensor.is_view


# ---- kernels ---------------------------------------------------------------------------------


class Kernels(internals.TorchDispatchMode):
    """The kernels of a block, each with the node that ran it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[tuple[str, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = internals.current_node()
        self.seen.append((func.overloadpacket.__name__, node is not None))
        return func(*args, **(kwargs or {}))


def test_a_mode_is_told_of_kernels_of_backward_and_the_node_that_runs_them() -> None:
    """Else what is planned of a step would not know which unit a kernel belongs to."""
    x = torch.ones(3, device="meta", requires_grad=True)
    with Kernels() as kernels:
        x.exp().sum().backward()
    assert ("exp", False) in kernels.seen
    assert ("mul", True) in kernels.seen


def test_attention_in_one_kernel_keeps_no_scores() -> None:
    """Else the memory of a planned step would grow with the square of the length."""
    query = torch.empty(2, 3, 5, 4, device="meta", requires_grad=True)
    outputs = internals.flash_attention(query, query, query, 0.0, True)
    assert [tensor.shape for tensor in outputs] == [query.shape, (2, 3, 5)]
    assert type(outputs[0].grad_fn).__name__.startswith("ScaledDotProductFlash")
    assert internals.flash_attention_backward.__name__ == (
        internals.flash_attention.__name__ + "_backward"
    )


def test_code_that_was_compiled_looks_at_the_data_of_parameters_and_writes_nothing() -> None:
    """Without it one rank that compiles alone seems to have written to its parameters."""
    answers: list[bool] = []

    class AskingParameter(nn.Parameter):
        __torch_function__: Any = internals.NO_TORCH_FUNCTION

        @property
        def data(self) -> Tensor:  # type: ignore[override]
            answers.append(internals.read_by_compiled_code())
            return internals.get_data(self)

    weight = AskingParameter(torch.ones(2, 2))

    def multiplied(x: Tensor) -> Tensor:
        return x @ weight

    compiled: Any = torch.compile(multiplied, backend="aot_eager")
    assert compiled(torch.ones(2, 2)).sum() == 8
    assert all(answers)
    assert weight.data.sum() == 4  # asked by a test, which could write to it
    assert not answers[-1]
