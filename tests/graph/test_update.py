"""The update after build: clip, step, zero, schedule, once each; with several optimizers, scalers, micro-batches."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.train_graphs import B, Predict, SquareGraph, Train, adamw, batches, mlp, run_graph, run_plain, same
from torch import Tensor, nn
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    ExponentialLR,
    LambdaLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

from graphckpt import ConfigError, GraphError, errors

MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "exponential": lambda o: ExponentialLR(o, 0.5),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=3),
    "lambda": lambda o: LambdaLR(o, lambda step: 1 / (step + 1)),
    "one cycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=10),
    "sequential": lambda o: SequentialLR(o, [ExponentialLR(o, 0.9), ExponentialLR(o, 0.1)], milestones=[2]),
}


def pair(
    make_optimizer: MakeOptimizer = adamw, **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.optim.Optimizer]:
    ours, plain = mlp(**options), mlp(**options)
    return ours, make_optimizer(ours), plain, make_optimizer(plain)


def scaler(scale: float = 2.0**10) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)


def clipped_groups(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(
        [
            {"params": model[0].parameters(), "clip_grad_max_norm": 0.01},
            {"params": model[1].parameters(), "clip_grad_max_norm": 0.02, "clip_grad_norm_type": math.inf},
            {"params": model[2].parameters()},
        ],
        lr=0.5,
    )


def fast_sgd(model: nn.Module, lr: float = 0.2, momentum: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


OPTIMIZERS = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam")


LOOPS: dict[str, dict[str, Any]] = {
    **{kind: {"make": lambda m, k=kind: getattr(torch.optim, k)(m.parameters(), lr=0.05)} for kind in OPTIMIZERS},
    **{f"{kind} schedule": {"make": fast_sgd, "schedule": kind} for kind in SCHEDULERS},
    "a norm for each param group": {"make": clipped_groups, "unlike": {"make": lambda m: fast_sgd(m, 0.5, 0)}},
    **{
        f"{dtype}, {flag}": {"dtype": dtype, "flag": flag, "unlike": {}}
        for dtype in (torch.bfloat16, torch.float16)
        for flag in (None, True, "selective")
    },
    "scaler": {"make": clipped_groups, "has_scaler": True, "flag": True},
    **{f"{n} micro-batches": {"num_parts": n, "flag": True, "unlike": {}} for n in (2, 4)},
    "all of it": {
        "make": clipped_groups, "schedule": "exponential", "dtype": torch.bfloat16, "has_scaler": True, "num_parts": 2,
        "flag": True,
    },
}  # fmt: skip


def plain_loop(
    make: MakeOptimizer = adamw,
    *,
    schedule: str | None = None,
    has_scaler: bool = False,
    count: int = 8,
    **settings: Any,
) -> tuple[Any, ...]:
    """Returns losses and all that the loop leaves."""
    model = mlp()
    optimizer = make(model)
    scheduler = SCHEDULERS[schedule](optimizer) if schedule else None
    grad_scaler = scaler() if has_scaler else None
    losses = run_plain(model, optimizer, scheduler, count=count, scaler=grad_scaler, **settings)
    return losses, model, optimizer, scheduler, grad_scaler, torch.get_rng_state()


@pytest.mark.parametrize("case", LOOPS)
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # torch's SequentialLR calls itself so
def test_steps_equal_the_plain_loop(case: str) -> None:
    """Losses, weights, rates, scale and random stream; settings that are ``unlike`` give other weights."""
    settings = {"make": adamw, "schedule": None, "has_scaler": False, "flag": None, "unlike": None, **LOOPS[case]}
    flag, unlike = settings.pop("flag"), settings.pop("unlike")
    ours = mlp()
    optimizer = settings["make"](ours)
    graph = Train(ours, optimizer, SCHEDULERS[settings["schedule"]](optimizer) if settings["schedule"] else None)
    graph.model[1].config.activation_checkpointing = flag
    if settings["has_scaler"]:
        graph.set_grad_scaler(scaler())
    if "dtype" in settings:
        graph.config.enable_amp(True, dtype=settings["dtype"])
    graph.config.set_gradient_accumulation_steps(settings.get("num_parts", 1))
    losses = run_graph(graph, 8)
    random_state = torch.get_rng_state()
    plain_losses, plain, plain_optimizer, scheduler, grad_scaler, plain_random_state = plain_loop(**settings)
    assert same(losses, plain_losses)
    assert same(ours, plain)
    assert torch.equal(random_state, plain_random_state)
    assert not same(ours, mlp() if unlike is None else plain_loop(**unlike)[1])
    assert all(p.grad is None for p in ours.parameters())
    assert optimizer.param_groups[0]["lr"] == plain_optimizer.param_groups[0]["lr"]
    if scheduler is not None:
        assert graph._update.schedulers[0].last_epoch == scheduler.last_epoch == 8
    if grad_scaler is not None:
        assert graph._update.scaler.get_scale() == grad_scaler.get_scale() != 2.0**10


def test_a_clip_norm_that_is_set_later_holds() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    graph = Train(model, optimizer)
    run_graph(graph)
    optimizer.param_groups[0]["clip_grad_max_norm"] = 0.0
    before = [p.clone() for p in model.parameters()]
    run_graph(graph, 1)
    assert same(before, list(model.parameters()))


def two_optimizers(model: nn.Module) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    return torch.optim.SGD(model[0].parameters(), lr=0.3), torch.optim.AdamW([*model[1].parameters()], lr=0.1)


def test_several_optimizers_step_and_schedule_each() -> None:
    ours, plain = mlp(), mlp()
    graph = Train(ours)
    schedulers = []
    for optimizer in two_optimizers(ours):
        schedulers.append(ExponentialLR(optimizer, 0.5))
        graph.add_optimizer(optimizer, lr_sch=schedulers[-1])
    losses = run_graph(graph)

    plain_optimizers = two_optimizers(plain)
    plain_schedulers = [ExponentialLR(optimizer, 0.5) for optimizer in plain_optimizers]
    torch.manual_seed(3)
    plain_losses = []
    for x, y in batches(4):
        loss = nn.functional.cross_entropy(plain(x), y)
        loss.backward()
        for part in (*plain_optimizers, *plain_schedulers):
            part.step()
        plain.zero_grad()
        plain_losses.append(loss.detach())
    assert same(losses, plain_losses)
    assert same(ours, plain)
    assert [s.last_epoch for s in schedulers] == [4, 4]


MISSPELT = {
    "clip_grad_norm": "clip_grad_max_norm",
    "clip_grad_norm_": "clip_grad_max_norm",
    "clip_max_norm": "clip_grad_max_norm",
    "Clip_Grad_Max_Norm": "clip_grad_max_norm",
    "cilp_grad_max_norm": "clip_grad_max_norm",
    "max_grad_norm": "clip_grad_max_norm",
    "gradient_clip_val": "clip_grad_max_norm",
    "clip_value": "clip_grad_max_norm",
    "clip_norm_type": "clip_grad_norm_type",
    "clip_grad_type": "clip_grad_norm_type",
}


CLIPPING: list[tuple[dict[str, Any], str]] = [
    ({"clip_grad_norm_type": 2.0}, "a param group has clip_grad_norm_type without clip_grad_max_norm · fix: add it"),
    ({"clip_grad_max_norm": "1"}, "clip_grad_max_norm of a param group is '1' · fix: use a number, or leave"),
    ({"clip_grad_max_norm": -1.0}, "clip_grad_max_norm of a param group is -1.0 · fix: use a number, or leave the key"),
    ({"clip_grad_max_norm": 1, "clip_grad_norm_type": "2"}, "clip_grad_norm_type of a param group is '2' · fix: use a"),
    *(({key: 1}, f"a param group has {key!r}, .* expected {meant!r} · fix: rename") for key, meant in MISSPELT.items()),
]
WRONG_OPTIMIZERS: dict[str, tuple[Any, Any, str]] = {
    "none": (lambda m: None, None, "expected a torch.optim.Optimizer, got None · fix: pass one"),
    "module": (lambda m: m, None, "expected a torch.optim.Optimizer, got Sequential · fix: pass one"),
    "lbfgs": (lambda m: torch.optim.LBFGS(m.parameters()), None, "LBFGS runs the forward itself, .* · fix: use it"),
    "no scheduler": (adamw, lambda o: "cosine", "expected an LRScheduler as lr_sch, got str · fix: pass one, or None"),
    "plateau": (adamw, ReduceLROnPlateau, "ReduceLROnPlateau needs a metric, .* · fix: leave it out and call its step"),
    "scheduler of another": (adamw, lambda o: ExponentialLR(adamw(mlp()), 0.5), "lr_sch belongs to another .* · fix"),
    **{
        str(fields): (lambda m, fields=fields: torch.optim.SGD([{"params": m.parameters(), **fields}]), None, message)
        for fields, message in CLIPPING
    },
}
NOT_A_DTYPE = "expected torch.float16 or torch.bfloat16, got"


@pytest.mark.parametrize(
    ("setting", "arguments", "message"),
    [
        ("enable_amp", {"mode": 1}, "expected a bool as mode, got 1 · fix: use True or False"),
        ("enable_amp", {"dtype": "bfloat16"}, f"{NOT_A_DTYPE} 'bfloat16'"),
        ("enable_amp", {"dtype": torch.float32}, f"{NOT_A_DTYPE} torch.float32 · fix: torch.bfloat16"),
        *(
            ("set_gradient_accumulation_steps", {"value": n}, f"expected a positive int, got {n!r} · fix: use 4")
            for n in (0, 1.5, True, None)
        ),
    ],
)
def test_settings_refuse_wrong_values(setting: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"{setting}: {message}")):
        getattr(Train(mlp()).config, setting)(**arguments)


@pytest.mark.parametrize("case", WRONG_OPTIMIZERS)
def test_add_optimizer_refuses_wrong_optimizers(case: str) -> None:
    make, schedule, message = WRONG_OPTIMIZERS[case]
    model = mlp()
    graph = Train(model)
    optimizer = make(model)
    with pytest.raises(GraphError, match=rf"^{graph.name}\.add_optimizer: {message}"):
        graph.add_optimizer(optimizer, lr_sch=None if schedule is None else schedule(optimizer))
    assert not graph.training


@pytest.mark.parametrize("is_new_group", [True, False])
def test_a_misspelt_clipping_key_that_comes_later_is_an_error_before_the_next_step(is_new_group: bool) -> None:
    model = mlp()
    optimizer = torch.optim.SGD([*model[0].parameters()], lr=0.1)
    graph = Train(model, optimizer)
    run_graph(graph, 1)
    if is_new_group:
        optimizer.add_param_group({"params": model[-1].parameters(), "clip_grad_norm": 1.0})
    else:
        optimizer.param_groups[0]["clip_grad_norm"] = 1.0
    before = [parameter.clone() for parameter in model.parameters()]
    for _ in range(2):
        with pytest.raises(GraphError, match=r"'clip_grad_norm', which clips nothing: expected 'clip_grad_max_norm'"):
            run_graph(graph, 1)
    assert same(before, list(model.parameters()))


@pytest.mark.parametrize(
    ("renamed", "value", "message"),
    [
        ("clip_grad_norm", 1.0, "'clip_grad_norm', which clips nothing"),
        ("clip_grad_max_norm", -1.0, "clip_grad_max_norm of a param group is -1.0"),
        ("clip_grad_max_norm", math.nan, "clip_grad_max_norm of a param group is nan"),
    ],
)
def test_clipping_that_changes_between_steps_is_checked_before_the_next_one(
    renamed: str, value: float, message: str
) -> None:
    model = mlp()
    optimizer = torch.optim.SGD([{"params": [*model.parameters()], "clip_grad_max_norm": 1.0}], lr=0.1)
    graph = Train(model, optimizer)
    run_graph(graph, 1)
    before = [parameter.clone() for parameter in model.parameters()]
    del optimizer.param_groups[0]["clip_grad_max_norm"]
    optimizer.param_groups[0][renamed] = value
    with pytest.raises(GraphError, match=message):
        run_graph(graph, 1)
    assert same(before, list(model.parameters()))


def test_keys_of_the_user_and_of_the_optimizer_itself_are_left_alone() -> None:
    class Clips(torch.optim.SGD):
        def __init__(self, params: Any) -> None:
            super().__init__(params, lr=0.1)
            self.defaults["clip_threshold"] = 1.0
            for group in self.param_groups:
                group["clip_threshold"] = 1.0

    model = mlp()
    mine = {"name": "all", "lr_scale": 0.5, "layer_decay": 0.9, "weight_norm": True}
    graph = Train(model)
    graph.add_optimizer(Clips([{"params": model.parameters(), **mine}]))
    run_graph(graph, 1)


def test_a_parameter_cannot_be_in_two_optimizers() -> None:
    model = mlp()
    graph = Train(model, adamw(model))
    with pytest.raises(GraphError, match="a parameter is in two optimizers · fix: give each parameter to one of them"):
        graph.add_optimizer(adamw(model[0]))
    run_graph(graph, 1)


def test_stepping_in_build_is_an_error_that_leaves_no_hook() -> None:
    model = mlp()
    optimizer = adamw(model)

    class Steps(Train):
        def build(self, x: Tensor, y: Tensor) -> Tensor:
            loss = super().build(x, y)
            optimizer.step()
            return loss

    graph = Steps(model, optimizer)
    with pytest.raises(GraphError) as error:
        run_graph(graph, 1)
    assert str(error.value) == (
        f"{graph.name}.build called optimizer.step(), which the graph does itself after build · fix: remove it"
    )
    assert same(model[0], mlp()[0])
    model(batches(1)[0][0]).sum().backward()
    optimizer.step()


def test_a_forgotten_backward_is_an_error_on_every_call() -> None:
    class Forgets(Train):
        forget = True

        def build(self, x: Tensor, y: Tensor) -> Tensor:
            return self.loss(self.model(x), y) if self.forget else super().build(x, y)

    model = mlp()
    graph = Forgets(model, adamw(model))
    message = (
        f"{graph.name}: no backward in build reached a parameter of its optimizers · "
        "fix: call loss.backward() in build, and no zero_grad() after it"
    )
    with pytest.raises(GraphError, match=re.escape(message)):
        run_graph(graph, 1)
    graph.forget = False
    run_graph(graph, 6)
    graph.forget = True
    with pytest.raises(GraphError, match=re.escape(message)):
        run_graph(graph, 1)


def test_gradients_from_outside_are_not_added_to() -> None:
    ours, optimizer, plain, plain_optimizer = pair()
    graph = Train(ours, optimizer)
    for warm in (False, True):
        parameter = list(ours.parameters())[-1 if warm else 0]
        parameter.grad = torch.full_like(parameter, 100.0)
        run_graph(graph, 6)
        run_plain(plain, plain_optimizer, count=6)
        assert same(ours, plain)


def test_parameters_of_no_optimizer_keep_their_gradients() -> None:
    ours, plain = mlp(), mlp()
    optimizer = torch.optim.SGD(ours[1].parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain[1].parameters(), lr=0.1)
    ours[0].weight.grad = kept = torch.ones_like(ours[0].weight)
    run_graph(Train(ours, optimizer))
    run_plain(plain, plain_optimizer)
    assert same(ours, plain)
    assert ours[0].weight.grad is kept
    assert torch.equal(kept, torch.ones_like(kept))
    assert ours[2].weight.grad is None


def test_a_param_group_that_is_added_later_learns() -> None:
    ours, plain = mlp(), mlp()
    optimizer = torch.optim.SGD(ours[0].parameters(), lr=0.1)
    plain_optimizer = torch.optim.SGD(plain[0].parameters(), lr=0.1)
    graph = Train(ours, optimizer)
    run_graph(graph, 5)
    run_plain(plain, plain_optimizer, count=5)
    plain.zero_grad()
    optimizer.add_param_group({"params": list(ours[2].parameters())})
    plain_optimizer.add_param_group({"params": list(plain[2].parameters())})
    run_graph(graph, 5)
    run_plain(plain, plain_optimizer, count=5)
    assert same(ours, plain)
    assert not same(ours[2], mlp()[2])


def test_a_layer_that_is_unfrozen_later_learns() -> None:
    ours, optimizer, plain, plain_optimizer = pair()
    graph = Train(ours, optimizer)
    for frozen in (True, False):
        for model in (ours, plain):
            model[0].requires_grad_(not frozen)
        run_graph(graph, 5)
        run_plain(plain, plain_optimizer, count=5)
        assert same(ours, plain)
        assert same(ours[0], mlp()[0]) is frozen


def test_an_exception_in_build_leaves_nothing() -> None:
    class Fails(Train):
        fail = False

        def build(self, x: Tensor, y: Tensor) -> Tensor:
            loss = super().build(x, y)
            if self.fail:
                raise KeyboardInterrupt
            return loss

    ours, optimizer, plain, plain_optimizer = pair(p=0.0)
    graph = Fails(ours, optimizer)
    graph.model[1].config.activation_checkpointing = True
    for warm in (False, True):
        buffers = {name: buffer.clone() for name, buffer in ours.named_buffers()}
        graph.fail = True
        with pytest.raises(KeyboardInterrupt):
            run_graph(graph, 1)
        graph.fail = False
        assert all(p.grad is None for p in ours.parameters())
        assert "forward" not in ours[1].__dict__
        assert "model" not in graph.__dict__
        for name, buffer in ours.named_buffers():
            buffer.copy_(buffers[name])  # the plain loop's forward would have moved them as well
        assert same(run_graph(graph, 6), run_plain(plain, plain_optimizer, count=6)), warm
        assert same(ours, plain)


@pytest.mark.parametrize(
    ("dtype", "has_scaler", "num_warnings"),
    [(torch.float16, False, 1), (torch.float16, True, 0), (torch.bfloat16, False, 0)],
)
def test_float16_without_a_scaler_is_logged_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    dtype: torch.dtype,
    has_scaler: bool,
    num_warnings: int,
) -> None:
    monkeypatch.setattr(errors, "_WARNED", set())
    for _ in range(2):
        model = mlp()
        graph = Train(model, adamw(model))
        graph.config.enable_amp(dtype=dtype)
        if has_scaler:
            graph.set_grad_scaler(torch.amp.GradScaler("cpu"))
        run_graph(graph, 2)
    fixes = [message for message in caplog.messages if "fix: set_grad_scaler(torch.amp.GradScaler())" in message]
    assert len(fixes) == len(caplog.messages) == num_warnings


def test_amp_in_an_evaluation_graph_and_off_again() -> None:
    graph, x = Predict(mlp().eval()), batches(1)[0][0]
    graph.config.enable_amp(dtype=torch.bfloat16)
    assert [graph(x).dtype for _ in range(5)] == [torch.bfloat16] * 5
    graph.config.enable_amp(False)
    assert [graph(x).dtype for _ in range(5)] == [torch.float32] * 5


def test_an_overflow_skips_the_step_and_the_schedule() -> None:
    model = mlp()
    optimizer = adamw(model)
    schedule = ExponentialLR(optimizer, 0.5)
    graph, grad_scaler = Train(model, optimizer, schedule), scaler()
    graph.set_grad_scaler(grad_scaler)
    x, y = batches(1)[0]
    graph(x, y)
    weights, rate, steps = model[2].weight.clone(), optimizer.param_groups[0]["lr"], schedule.last_epoch
    graph(x * 1e38, y)
    assert grad_scaler.get_scale() == 2.0**9
    assert torch.equal(model[2].weight, weights)
    assert (optimizer.param_groups[0]["lr"], schedule.last_epoch) == (rate, steps)
    assert graph.state_dict()["System-Train-TrainStep"] == 1
    assert all(p.grad is None for p in model.parameters())
    model[1][1].reset_running_stats()
    graph(x, y)
    assert not torch.equal(model[2].weight, weights)
    assert schedule.last_epoch == steps + 1


def test_a_scaler_with_two_optimizers_of_which_one_is_not_reached() -> None:
    model, other = mlp(), nn.Linear(2, 2)
    graph = Train(model, adamw(model))
    graph.other = other
    graph.add_optimizer(adamw(other))
    graph.set_grad_scaler(scaler())
    before = [p.clone() for p in other.parameters()]
    run_graph(graph)
    assert same(before, list(other.parameters()))
    assert not same(model, mlp())


def test_set_grad_scaler_refuses_a_string_and_takes_none() -> None:
    ours, optimizer, plain, plain_optimizer = pair()
    graph = Train(ours, optimizer)
    with pytest.raises(GraphError, match=r"set_grad_scaler: expected a GradScaler, got str · fix: pass a"):
        graph.set_grad_scaler("dynamic")
    graph.set_grad_scaler(scaler())
    graph.set_grad_scaler(None)
    assert same(run_graph(graph), run_plain(plain, plain_optimizer))


def test_a_scaler_needs_the_tensors_own_backward() -> None:
    class Other(Train):
        def build(self, x: Tensor, y: Tensor) -> Tensor:
            loss = self.loss(self.model(x), y)
            torch.autograd.backward(loss)
            return loss

    model = mlp()
    graph = Other(model, adamw(model))
    graph.set_grad_scaler(scaler())
    with pytest.raises(GraphError, match=r"ran no loss.backward\(\), which is where the scaler acts · fix: call it"):
        run_graph(graph, 1)
    assert same(model[0], mlp()[0])


@pytest.mark.parametrize("steps", [2, 4])
def test_accumulation_packs_outputs(steps: int) -> None:
    class Packs(Train):
        def build(self, x: Tensor, y: Tensor) -> Any:
            shapes.append(tuple(x.shape))
            logits = self.model(x)
            loss = self.loss(logits, y)
            loss.backward()
            return {"loss": loss, "logits": logits, "text": "same", "n": x.shape[0], "nothing": None}

    shapes: list[Any] = []
    ours, plain, (x, y) = mlp(), mlp(), batches(1)[0]
    graph = Packs(ours, adamw(ours))
    graph.config.set_gradient_accumulation_steps(steps)
    torch.manual_seed(3)
    output = graph(x, y)
    assert shapes == [(B // steps, 4)] * steps
    torch.manual_seed(3)
    logits = [plain(part) for part in x.chunk(steps)]
    losses = map(nn.functional.cross_entropy, logits, y.chunk(steps))
    assert same([output["loss"], output["logits"]], [torch.stack([*losses]), torch.cat(logits)])
    assert (output["text"], output["n"], output["nothing"]) == ("same", B // steps, None)
    assert not output["logits"].requires_grad


def test_accumulation_cuts_nested_tensors_and_passes_the_rest() -> None:
    class Looks(SquareGraph):
        def build(self, batch: Any, scale: Tensor, *, flag: bool) -> Any:
            loss = super().build(batch["x"][0] * scale)
            return loss, batch["x"][0].shape[0], flag, batch["name"]

    graph = Looks(nn.Linear(2, 2))
    graph.config.set_gradient_accumulation_steps(2)
    loss, rows, flag, name = graph({"x": [torch.ones(6, 2)], "name": "a"}, torch.tensor(2.0), flag=True)
    assert (loss.shape, rows, flag, name) == ((2,), 3, True, "a")


@pytest.mark.parametrize("rows", [7, 0])
def test_a_batch_that_cannot_be_cut_is_named(rows: int) -> None:
    model = mlp()
    graph = Train(model, adamw(model))
    graph.config.set_gradient_accumulation_steps(2)
    x, y = batches(1)[0]
    with pytest.raises(GraphError) as error:
        graph(x, y[:rows])
    assert str(error.value) == (
        f"input `y` of shape [{rows}] cannot be cut into 2 micro-batches · "
        "fix: make its dim 0 a multiple of 2, the gradient accumulation steps"
    )
    assert same(model, mlp())


def test_micro_batches_must_return_the_same_structure() -> None:
    class Odd(Train):
        def build(self, x: Tensor, y: Tensor) -> Any:
            loss = super().build(x, y)
            self.calls = getattr(self, "calls", 0) + 1
            return [loss] * self.calls

    model = mlp()
    graph = Odd(model, adamw(model))
    graph.config.set_gradient_accumulation_steps(2)
    with pytest.raises(GraphError, match="build returned 1, 2 values for the micro-batches · fix: return the same"):
        run_graph(graph, 1)
    assert same(list(model.parameters()), list(mlp().parameters()))


def test_accumulation_without_an_optimizer_does_nothing() -> None:
    graph = Train(mlp().eval())
    graph.config.set_gradient_accumulation_steps(4)
    assert run_graph(graph, 1)[0].shape == ()


@pytest.mark.parametrize("is_of_class", [True, False])
def test_an_optimizer_with_a_zero_grad_of_its_own_keeps_it(is_of_class: bool) -> None:
    model, calls = mlp(), []
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)

    def zero_grad(*_: object) -> None:
        calls.append(torch.optim.Optimizer.zero_grad(optimizer))

    if is_of_class:
        optimizer.__class__ = type("Own", (torch.optim.SGD,), {"zero_grad": zero_grad})
    else:
        optimizer.zero_grad = zero_grad
    run_graph(Train(model, optimizer))
    assert len(calls) == 4
    assert all(p.grad is None for p in model.parameters())
