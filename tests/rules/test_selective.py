"""Ops that the recomputation of a `selective` block skips, and results that it frees: ops counted, bytes measured."""

from __future__ import annotations

import copy
import subprocess
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.count_ops import CountOps
from helpers.layer_stacks import stack_of
from helpers.modules import as_module
from helpers.peaks import saved_bytes, tracked_peak
from torch import nn
from torch._ops import OpOverload
from torch.utils.checkpoint import SelectiveCheckpointContext

import graphckpt
from graphckpt.rules import Selective
from graphckpt.rules.effects import statistics_of

# Legend: N rows, D width, H hidden width

Save = str | list[str] | Callable[..., bool]


@as_module(lambda: {"norm": nn.LayerNorm(32), "up": nn.Linear(32, 128), "down": nn.Linear(128, 32)})
def Block(self: Any, x_ND: torch.Tensor) -> torch.Tensor:
    """Seven cheap ops between two products, as GPT-2's GELU."""
    h_NH = self.up(self.norm(x_ND))
    g_NH = 0.5 * h_NH * (1.0 + torch.tanh(0.8 * (h_NH + 0.04 * torch.pow(h_NH, 3.0))))
    return x_ND + self.down(g_NH)


def made(block: Callable[[], nn.Module] = Block, num: int = 3, rows: int = 64) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model = stack_of(block, num)
    return model, torch.randn(rows, 32)


def step(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    model(x).square().sum().backward()
    return [p.grad for p in model.parameters()]


def under(model: nn.Module, save: Save, **more: Any) -> graphckpt.Handle:
    return graphckpt.apply(model, {"*": {"activation_checkpointing": Selective(save), **more}})


def counted(model: nn.Module, x: torch.Tensor, save: list[str] | str, **more: Any) -> tuple[dict[str, int], int]:
    """Returns the ops of a third step, its peak, and whether the gradients are those of the plain step."""
    expected = step(model, x)
    with under(model, save, **more):
        for _ in range(2):
            step(model, x)
        with CountOps() as counts:
            found = step(model, x)
        peak_bytes = tracked_peak(model, lambda: step(model, x))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    return {name.removeprefix("aten."): count for name, count in counts.counts.items()}, peak_bytes


TANH = ["aten.addmm.default[0]", "aten.tanh.default"]


def test_ops_that_lead_only_to_a_saved_result_are_not_recomputed_even_if_it_is_on_disk() -> None:
    model, x = made(rows=256)
    plain, _ = counted(model, x, [])
    ops, _ = counted(model, x, TANH)
    # a forward of each block, and in backward what a product with the hidden size is made of, but for the tanh
    assert plain["tanh.default"] == 6
    assert ops["tanh.default"] == 3
    assert plain["pow.Tensor_Scalar"] - ops["pow.Tensor_Scalar"] == 3, "it only leads up to tanh; the other 3: backward"
    assert plain["addmm.default"] == 9, "the product that ends a block is not recomputed in any case"
    assert ops["addmm.default"] == 6
    assert counted(model, x, TANH, offload="disk", min_elements=1)[0]["tanh.default"] == 3


def test_a_result_that_no_recomputation_reads_is_not_kept() -> None:
    model, x = made(rows=1024)
    both, peak_of_both = counted(model, x, "matmul")
    one, peak_of_one = counted(model, x, ["aten.addmm.default[0]"])
    assert both == one
    assert peak_of_both == peak_of_one


def test_the_second_product_of_a_block_alone_can_be_named() -> None:
    @as_module(lambda: {name: nn.Linear(32, 32) for name in ("one", "other", "last")})
    def Two(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.sin(self.other(torch.sin(self.one(x)))))

    model, x = made(Two)
    ops, _ = counted(model, x, ["aten.addmm.default[1]"])
    assert ops["addmm.default"] == 9 + 3, "the first one is recomputed, as the sine behind it saves it"
    ops, _ = counted(model, x, ["aten.addmm.default[0,1]"])
    assert ops["addmm.default"] == 9
    assert counted(model, x, ["aten.addmm.default[0]", "aten.addmm.default[1]"])[0] == ops, "or apart"


def test_ops_that_do_not_run_are_named() -> None:
    model, x = made(num=1)
    with under(
        model, ["aten.addmm.default[0]", "aten.relu.default", "attention[0]", "aten.tanh.default[0,9]"]
    ) as handle:
        step(model, x)
        notes = str(handle.explain(show=False).rows)
    for name in ("aten.relu.default", "attention[0]", "aten.tanh.default[0,9]"):
        assert f"the block does not run {name}" in notes
    assert "no aten.addmm" not in notes


@as_module(lambda: {"up": nn.Linear(32, 32), "down": nn.Linear(32, 32)})
def TwoWays(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Takes another way for some inputs, with tensors of the same shapes."""
    h = self.up(x)
    if torch.is_grad_enabled() and x.sum() > 0:
        h = torch.tanh(torch.sin(h) + torch.cos(h))
    else:
        h = torch.tanh(torch.cos(h) * torch.sin(h).exp())
    return self.down(h)


@pytest.mark.parametrize(
    ("block", "save", "batches"),
    [
        (Block, TANH, [torch.randn(n, 32) for n in (8, 64, 8, 32, 64, 8)]),
        (TwoWays, ["aten.tanh.default"], [sign * torch.rand(16, 32) for sign in (1, 1, -1, 1, -1, -1, 1)]),
    ],
    ids=["other shapes", "another way"],
)
def test_calls_of_other_shapes_and_ways_leave_recipes_of_their_own(
    block: Callable[[], nn.Module], save: list[str], batches: list[torch.Tensor]
) -> None:
    model, _ = made(block)
    expected = [step(model, x) for x in batches]
    with under(model, save):
        for x, grads in zip(batches, expected, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(grads, step(model, x), strict=True))


@as_module(lambda: {"up": nn.Linear(32, 32), "down": nn.Linear(32, 32)})
def ReadsBeside(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A kernel that is no op of PyTorch reads what the ops only pass on, which nothing shows."""
    h = self.up(x)
    y = torch.sin(h)
    beside = torch.from_numpy(y.detach().numpy().copy())
    return self.down(torch.tanh(y.detach() * 2) + h + beside)


def test_a_tensor_that_a_foreign_kernel_reads_is_recomputed_after_all() -> None:
    model, x = made(ReadsBeside)
    ops, _ = counted(model, x, ["aten.addmm.default[0]", "aten.tanh.default"])
    assert ops["sin.default"] == 6, "the sine is read, by no op"


@as_module(lambda: {"up": nn.Linear(32, 64), "down": nn.Linear(64, 32), "drop": nn.Dropout(0.5)})
def Drops(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.drop(self.down(torch.tanh(self.drop(torch.sin(self.up(x))))))


@as_module(lambda: {"block": Block()})
def Shared(self: Any, x: torch.Tensor) -> torch.Tensor:
    """One block that runs three times: autocast casts its weights in the first call only."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return self.block(self.block(self.block(x)))


@pytest.mark.parametrize(
    "save", ["matmul", ["aten._to_copy.default[0,1,2]"], ["aten._to_copy.default", "aten.tanh.default[0]"]]
)
def test_casts_of_weights_that_only_the_first_call_makes_do_not_shift_other_results(save: list[str] | str) -> None:
    model, x = made(Shared, num=1)
    expected = step(model, x)
    with graphckpt.apply(model, {"0.block": {"activation_checkpointing": Selective(save)}}) as handle:
        for _ in range(8):
            assert all(torch.equal(a, b) for a, b in zip(expected, step(model, x), strict=True))
        assert "by number are not kept" not in str(handle.explain(show=False).rows)


def test_random_ops_keep_their_place_in_the_stream() -> None:
    model, x = made(Drops)
    ops, _ = counted(model, x, ["aten.tanh.default"])
    assert ops["tanh.default"] == 3
    ops, _ = counted(model, x, ["aten.addmm.default[0]"])
    assert ops["addmm.default"] == 6, "the mask of the last dropout wants the size of the product, not its values"


class DrawsMasks(Drops):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, _ = torch.native_dropout(self.up(x), 0.5, True)
        return self.drop(self.down(h.sin()))


def test_numbers_behind_a_kept_random_result_are_those_of_the_original_forward() -> None:
    model, x = made(DrawsMasks)
    ops, _ = counted(model, x, ["aten.native_dropout.default"])
    assert ops["native_dropout.default"] == 3, "only the original forwards draw"


@as_module(lambda: {"up": nn.Linear(32, 64), "down": nn.Linear(64, 32)})
def InPlace(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = torch.sin(self.up(x))
    h += 1
    h.mul_(2.0)
    h = torch.tanh(h.relu_())
    return x + self.down(h)


def test_edits_of_what_is_skipped_are_skipped_with_it() -> None:
    model, x = made(InPlace)
    plain, _ = counted(model, x, [])
    ops, _ = counted(model, x, TANH)
    assert ops["tanh.default"] == 3
    assert plain["sin.default"] - ops["sin.default"] in (0, 3)
    counted(model, x, ["aten.sin.default"])  # edited after it was kept


def gather(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        flat = torch.empty(2, *x.shape)
        torch._foreach_copy_(list(flat.unbind(0)), [h.detach(), x.detach()])
    return h * flat.mean(0)


def split_into(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        flat = torch.empty(x.numel())
        parts = [part.view(len(x), -1) for part in flat.split([len(x) * 20, len(x) * 12])]
        torch.split_with_sizes_copy(torch.cat([h.detach()[:, 8:], x[:, :8]], 1), [20, 12], dim=1, out=parts)
    return h * flat.view(x.shape).cos()


def scale_slices(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    torch._foreach_mul_([h[:, :9], h[:, 9:]], 0.5)
    return h.sigmoid() + x


def scale_overlapping_slices(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    torch._foreach_add_([h[:, :20], h[:, 12:], h], 0.25)
    return h.sigmoid() * x


def sort_into(h: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        both = torch.empty(2, *x.shape, dtype=torch.float64)
        torch.frexp(h.detach().double(), out=(both[0], torch.empty(x.shape, dtype=torch.int32)))
        torch.aminmax(h.detach().double(), dim=0, out=(both[1][0], both[1][1]))
    return h * both[0].float() + both[1, :2].float().sum()


@pytest.mark.parametrize("write", [gather, split_into, scale_slices, scale_overlapping_slices, sort_into])
@pytest.mark.parametrize("save", ["matmul", TANH, ["aten.addmm.default[1]"], []])
def test_ops_that_write_several_views_of_one_storage(
    write: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], save: list[str] | str
) -> None:
    @as_module(lambda: {"gate": nn.Linear(32, 32), "out": nn.Linear(32, 32)})
    def Writes(self: Any, x_ND: torch.Tensor) -> torch.Tensor:
        return x_ND + self.out(torch.tanh(write(self.gate(x_ND), x_ND)))

    model, x = made(Writes)
    expected = step(model, x)
    with under(model, save) as handle:
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(expected, step(model, x), strict=True))
        assert handle.explain(show=False).rows[1].reruns == 1


def test_a_policy_function_is_called_for_each_op_each_time() -> None:
    asked = []

    def every_second(context: SelectiveCheckpointContext, func: OpOverload, *args: Any, **kwargs: Any) -> bool:
        asked.append(func)
        return func is torch.ops.aten.addmm.default and len(asked) % 2 == 0

    model, x = made()
    expected = step(model, x)
    numbers = []
    with under(model, every_second):
        for _ in range(3):
            asked.clear()
            assert all(torch.equal(a, b) for a, b in zip(expected, step(model, x), strict=True))
            numbers.append(len(asked))
    assert numbers[0] == numbers[1] == numbers[2] > 0


def kept_bytes(save: Save) -> int:
    model, x = made(rows=256)
    expected = step(model, x)
    with under(model, save):
        kept = saved_bytes(model, x, lambda y: y.square().sum())
        assert all(torch.equal(a, b) for a, b in zip(expected, step(model, x), strict=True))
    return kept


def test_a_policy_function_keeps_no_result_that_no_recomputation_reads() -> None:
    aten = torch.ops.aten

    def last(
        context: SelectiveCheckpointContext, op: OpOverload, first: torch.Tensor, *args: Any, **kwargs: Any
    ) -> bool:
        """Chooses the second product and the sum behind it, after which autograd saves nothing."""
        return op in (aten.addmm.default, aten.add.Tensor) and first.shape[-1] == 32

    assert kept_bytes(last) == kept_bytes([])
    both = kept_bytes(lambda context, op, *args, **kwargs: op in (aten.addmm.default, aten.tanh.default))
    assert both == kept_bytes(["aten.addmm.default", "aten.tanh.default"]) > kept_bytes([])


class Tag:
    """Lives as long as what it is put on."""


def test_nothing_of_a_call_outlives_it() -> None:
    model, x = made(num=1)
    with under(model, TANH):
        for _ in range(3):
            out = model(x)
            held = weakref.ref(out.grad_fn.metadata.setdefault("here", Tag()))
            out.sum().backward()
            del out
            assert held() is None


NUMBERS = r"numbers of calls in brackets, .* fix: write aten\.addmm\.default\[0,2\]"
NO_FUNCTION = r"list of ops or a policy function, got .*\[torch\.ops\.aten\.mm"


@pytest.mark.parametrize(
    ("save", "message"),
    [
        (["aten.softmx"], r"did you mean 'aten\.softmax'"),
        (["softmx"], r"expected an op or one of matmul, attention"),
        (["aten.addmm.defualt"], r"'aten\.addmm' has no such overload, .* fix: use .*aten\.addmm\.default"),
        (["aten.addmm.default.__class__"], r"no such overload, got 'aten\.addmm\.default\.__class__'"),
        (["aten.addmm._schemas"], r"'aten\.addmm' has no such overload, .* fix: use .*aten\.addmm\.default"),
        (["aten.pow"], r"no such overload, got 'aten\.pow' · fix: use aten\.pow\.Tensor_Tensor"),
        ([torch.ops.aten.pow], r"no such overload, got 'aten\.pow' · fix: use aten\.pow\.Tensor_Tensor"),
        (["aten.name"], r"expected an op or one of matmul, attention"),
        (["load_library.__class__"], r"expected an op or one of matmul, attention"),
        (["aten.addmm.default[0,]"], NUMBERS),
        (["aten.addmm.default[]"], NUMBERS),
        (["aten.addmm.default[a]"], NUMBERS),
        (torch.mm, NO_FUNCTION),
        (torch.nn.functional.softmax, NO_FUNCTION),
        (torch.ops.aten.mm.default, NO_FUNCTION),
    ],
)
def test_a_name_that_is_not_an_op_is_refused(save: object, message: str) -> None:
    with pytest.raises(graphckpt.ConfigError, match=message):
        Selective(save)


def test_explain_counts_no_result_that_is_not_kept() -> None:
    model, x = made(rows=256)
    with under(model, "matmul") as handle:
        step(model, x)
        rows = {row.block: row.bytes_after for row in handle.explain(show=False).rows}
    hidden, width = 256 * 128 * 4, 256 * 32 * 4
    assert rows["1"] == hidden + width, "the product of the hidden size and the block's input"


class Tries(nn.Module):
    """Counts the failures of a part of its forward, of which there are none."""

    failures = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        try:
            y = torch.where(x > 0, x * 2, x.exp())
            y[:, 0] = x[:, 1]
            y = y.masked_fill(x.abs() > 2, 0.0)
        except RuntimeError:
            self.failures += 1
            raise
        return y * 2


def test_a_forward_that_catches_errors_catches_none_of_the_engine() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Tries())
    with graphckpt.apply(model, {"1": {"activation_checkpointing": Selective(["aten.mul.Tensor[1]"])}}):
        for _ in range(2):
            model(torch.randn(4, 8)).sum().backward()
    assert model[1].failures == 0


class CatchesFailedOp(nn.Module):
    """In some calls, an op fails, and forward goes on; in some, another op runs first."""

    def __init__(self, fails_in: set[int], adds_in: set[int]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.fails_in, self.adds_in, self.calls = fails_in, adds_in, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls in self.adds_in:
            x = x + 1
        if self.calls in self.fails_in:
            try:
                self.first(x[:, :3])
            except RuntimeError:
                x = x * 2
        return self.second(self.first(x).tanh()).tanh()


@pytest.mark.parametrize("policy", [Selective("matmul"), Selective(["aten.addmm.default[1]"])], ids=["all", "numbered"])
@pytest.mark.parametrize(
    ("fails_in", "adds_in"),
    [({1}, set()), ({1, 2}, set()), ({2}, set()), ({2}, {2}), ({2, 3}, {3})],
    ids=["first call", "each call", "later call", "later call with another op", "first call of another schedule"],
)
def test_ops_that_fail_are_counted_in_no_call(fails_in: set[int], adds_in: set[int], policy: Selective) -> None:
    def gradients(model: nn.Module) -> list[torch.Tensor]:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        outputs = [model(x) for _ in range(3)]
        return list(torch.autograd.grad(sum(y.square().sum() for y in outputs), [x, *model.parameters()]))

    torch.manual_seed(0)
    plain = CatchesFailedOp(fails_in, adds_in)
    model = copy.deepcopy(plain)
    with graphckpt.apply(model, {"": policy}):
        ours = gradients(model)
    assert all(map(torch.equal, ours, gradients(plain)))


@as_module(lambda: {"linear": nn.Linear(8, 8)})
def ChangesItsOps(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Saves another shape in the recomputation, and runs another op behind the last one that saves a tensor."""
    y = self.linear(x)[: self.rows].tanh()
    return y.mul(2) if self.rows == 4 else y.add(1)


ChangesItsOps.rows = 4  # of the class: an attribute of the module is put back for the recomputation


def test_a_recomputation_that_differs_is_named_whatever_ops_come_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), ChangesItsOps())
    with graphckpt.apply(model, {"1": {"activation_checkpointing": Selective(["aten.addmm.default[0]"])}}):
        for _ in range(2):
            model(torch.randn(8, 8)).sum().backward()
        loss = model(torch.randn(8, 8)).sum()
        monkeypatch.setattr(ChangesItsOps, "rows", 2)
        with pytest.raises(graphckpt.RecomputeError, match=r"expected float32\[4, 8\], got float32\[2, 8\]"):
            loss.backward()


# --- batch norms, which update running statistics that their schemas do not mark

NORM = "aten.native_batch_norm.default"


@as_module(lambda: {"up": nn.Linear(8, 8), "norm": nn.BatchNorm1d(8), "down": nn.Linear(8, 8)})
def ReadsStatistics(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Multiplies by statistics that the norm has just updated: the gradient of ``y`` is a multiple of them."""
    y = self.norm(self.up(x))
    return self.down(torch.tanh(y * self.norm.running_mean * self.norm.running_var))


@as_module(lambda: {"norm": nn.BatchNorm1d(8, affine=False)})
def ReadsStatisticsAlone(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A norm of which autograd saves nothing."""
    self.norm(x.detach())
    return x * self.norm.running_mean


@as_module(lambda: {"norm": nn.InstanceNorm1d(2, affine=True, track_running_stats=True)})
def NormalizesInstances(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Its norm repeats the statistics for each sample, updates the copy, and writes the mean of that back."""
    return self.norm(x.view(-1, 2, 4)).view(-1, 8) * self.norm.running_mean.repeat(4)


def everything(context: SelectiveCheckpointContext, op: OpOverload, *args: Any, **kwargs: Any) -> bool:
    return True


@pytest.mark.parametrize("block", [ReadsStatistics, ReadsStatisticsAlone, NormalizesInstances])
@pytest.mark.parametrize("save", [everything, [NORM], ["aten.addmm.default", "aten.tanh.default", "aten.mul.Tensor"]])
@pytest.mark.parametrize("is_nested", [False, True])
def test_ops_behind_a_kept_batch_norm_read_the_statistics_that_it_has_updated(
    block: Callable[[], nn.Module], save: Save, is_nested: bool
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), block())
    model = copy.deepcopy(plain)
    policies = {name: Selective(save) for name in (["", "1"] if is_nested else ["1"])}
    handle = graphckpt.apply(model, policies, determinism_check="values")
    results = []
    for each in (plain, model):
        torch.manual_seed(1)
        for _ in range(3):
            each(torch.randn(6, 8)).square().sum().backward()
        results.append([*(p.grad for p in each.parameters() if p.grad is not None), *each.buffers()])
    handle.remove()
    assert all(map(torch.equal, *results))


def test_a_kept_batch_norm_does_not_run_again() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(ReadsStatistics()), torch.randn(6, 8)
    counts = {}
    for save in ([NORM], ["aten.addmm.default"]):
        with graphckpt.apply(model, {"0": Selective(save)}):
            for _ in range(2):
                model(x).sum().backward()
            loss = model(x).sum()
            with CountOps() as counts[save[0]]:
                loss.backward()
    assert [each.counts[NORM] for each in counts.values()] == [0, 1]


@pytest.mark.parametrize("training", [True, False])
def test_the_statistics_of_an_op_are_those_that_its_kernel_writes(training: bool) -> None:
    x, mean, var = torch.randn(6, 8), torch.zeros(8), torch.ones(8)
    args = (x, None, None, mean, var, training, 0.1, 1e-5)
    written = statistics_of(torch.ops.aten.native_batch_norm.default, args, {})
    versions = mean._version, var._version
    torch.ops.aten.native_batch_norm.default(*args)
    assert (mean._version, var._version) == versions, "a kernel that counts versions needs no such list"
    assert [bool(mean.any()), not torch.equal(var, torch.ones(8))] == [training, training]
    assert [t is other for t, other in zip(written, (mean, var), strict=False)] == ([True, True] if training else [])
    keywords = {"running_mean": mean, "running_var": var, "training": training}
    assert len(statistics_of(torch.ops.aten.native_batch_norm.default, args[:3], keywords)) == 2 * training
    assert statistics_of(torch.ops.aten.addmm.default, (x, x, x), {}) == []


@as_module(lambda: {"up": nn.Linear(8, 8), "down": nn.Linear(8, 8)})
def NormalizesWithArguments(self: Any, x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
    y = nn.functional.batch_norm(self.up(x), mean, var, training=True)
    return self.down(torch.tanh(y * mean * var))


@pytest.mark.parametrize("policy", [True, Selective(everything), Selective([NORM]), Selective(["aten.addmm.default"])])
def test_running_statistics_among_the_arguments_are_updated_once(policy: bool | Selective) -> None:
    results = []
    for flag in (False, policy):
        torch.manual_seed(0)
        block, statistics = NormalizesWithArguments(), (torch.zeros(8), torch.ones(8))
        with graphckpt.apply(block, {"": {"activation_checkpointing": flag}}, determinism_check="none"):
            for _ in range(3):
                block(torch.randn(6, 8), *statistics).square().sum().backward()
        results.append([*(p.grad for p in block.parameters()), *statistics])
    assert all(map(torch.equal, *results))


@as_module(lambda: {"first": nn.Linear(8, 8), "last": nn.Linear(8, 8)})
def ReadsStatistic(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        scale = torch.tanh(self.first(x)).abs().mean().item()
    return x + self.last(torch.tanh(self.first(x))) * scale


@pytest.mark.parametrize("save", ["matmul", ["aten.tanh.default"], lambda *args, **kwargs: True])
def test_results_of_inference_mode_may_be_kept(save: Save) -> None:
    steps = []
    for policies in ({}, {"*": Selective(save)}):
        torch.manual_seed(0)
        model = nn.Sequential(ReadsStatistic(), ReadsStatistic())
        with graphckpt.apply(model, policies):
            for _ in range(3):
                model(torch.ones(4, 8)).square().mean().backward()
        steps.append([p.grad for p in model.parameters()])
    assert all(map(torch.equal, *steps))


def test_a_skipped_result_leaves_the_recomputation_by_no_way() -> None:
    """Whatever reads it, the step is that of ``full``, or an error: never a tensor without memory, or a crash."""
    program = Path(__file__).with_name("skipped_results.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", program, "selective"], capture_output=True, text=True, check=True
    )
    outcomes = dict(line.split(": ") for line in done.stdout.splitlines())
    refused = {name for name, outcome in outcomes.items() if outcome == "RecomputeError"}
    assert refused == {"data", "set_", "swap_tensors"}  # as under `full`: their forwards read other weights each time
    assert len(outcomes) == 20
    assert {outcome for name, outcome in outcomes.items() if name not in refused} == {"equal"}
