"""A step without memory: as many bytes as the real one on the CPU, and the kernels of a device that is not there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.layer_stacks import linear_layers, tiny_gpt2
from helpers.modules import as_module
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
)

import graphckpt
from graphckpt._compat import is_fake
from graphckpt.errors import ConfigError
from graphckpt.ledger.live_memory import LiveBytes
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.op_costs import flops_of
from graphckpt.simulation.profile import load_profile

aten = torch.ops.aten


def gpt2() -> nn.Module:
    return tiny_gpt2(n_layer=2, n_embd=64, n_head=4, vocab_size=128, use_cache=True)


def llama() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **sizes, vocab_size=128))


def resnet() -> nn.Module:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[2, 1], layer_type="basic")
    return ResNetForImageClassification(config)


def mixtral() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return MixtralForCausalLM(MixtralConfig(num_hidden_layers=2, **sizes, vocab_size=128, num_local_experts=4))


def qwen_moe() -> nn.Module:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(num_hidden_layers=2, **sizes, head_dim=16, vocab_size=128, num_experts=8)
    return Qwen3MoeForCausalLM(config)


BLOCKS = {
    gpt2: "transformer.h.*",
    llama: "model.layers.*",
    mixtral: "model.layers.*",
    qwen_moe: "model.layers.*",
    resnet: "resnet.encoder.stages.*.layers.*",
}


def loss_of(model: nn.Module, **more: Any) -> torch.Tensor:
    if isinstance(model, ResNetForImageClassification):
        return model(pixel_values=torch.randn(2, 3, 32, 32), labels=torch.zeros(2, dtype=torch.long)).loss
    tokens = torch.zeros(2, 32, dtype=torch.long)
    return model(input_ids=tokens, labels=tokens, **more).loss


class Ops(TorchDispatchMode):
    """Sees which ops run, and what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.results: dict[str, list[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.results.setdefault(func.overloadpacket.__name__, []).append(result)
        return result


def levels(
    build: Callable[[], nn.Module], rule: bool | str, device: contextlib.AbstractContextManager[Any]
) -> list[tuple[int, int, int, int]]:
    """Returns live bytes after forward, backward and step, and the peak, of a first and of a second step."""
    found = []
    with device:
        is_mocked = is_fake(torch.zeros(1))
        model = build().train()
        graphckpt.apply(model, {BLOCKS[build]: rule})
        optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
        for _ in range(2):
            live = LiveBytes("meta" if is_mocked else "cpu", counts_fake=is_mocked, record_timeline=False)
            live.track([*model.parameters(), *model.buffers()])
            with live:
                loss = loss_of(model)
                forward = live.live_bytes
                loss.backward()
                backward = live.live_bytes
                optimizer.step()
                optimizer.zero_grad()
                del loss
            found.append((forward, backward, live.live_bytes, live.peak_bytes))
    return found


@pytest.mark.parametrize(
    ("build", "rule"),
    [(build, rule) for build in (gpt2, llama) for rule in (False, True, "selective")]
    + [(resnet, True), (mixtral, False), (mixtral, True), (qwen_moe, False)],
)
def test_a_step_on_fake_tensors_has_the_bytes_of_the_real_one(build: Callable[[], nn.Module], rule: bool | str) -> None:
    real = levels(build, rule, contextlib.nullcontext())
    assert levels(build, rule, FakeDevice(load_profile("cpu"))) == real


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_an_optimizer_that_modifies_lists_has_the_bytes_of_the_real_one(implementation: str) -> None:
    def levels_of(device: contextlib.AbstractContextManager[Any]) -> list[tuple[int, int]]:
        found = []
        with device:
            is_mocked = is_fake(torch.zeros(1))
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            optimizer = torch.optim.AdamW(model.parameters(), **{implementation: True})
            for _ in range(3):
                model(torch.ones(2, 8)).sum().backward()
                live = LiveBytes("meta" if is_mocked else "cpu", counts_fake=is_mocked, record_timeline=False)
                live.track(model.parameters())
                with live:
                    optimizer.step()
                optimizer.zero_grad()
                found.append((live.live_bytes, live.peak_bytes))
        return found

    assert levels_of(FakeDevice(load_profile("cpu"))) == levels_of(contextlib.nullcontext())


def test_an_edit_leaves_the_other_kept_results_of_a_fake_step_alone() -> None:
    """Fake storages have no addresses that tell them apart."""

    @as_module(lambda: {"one": nn.Linear(8, 8), "other": nn.Linear(8, 8)})
    def Edits(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.other(torch.sin(self.one(x)).mul_(2)).sin()

    def products(device: contextlib.AbstractContextManager[Any]) -> int:
        with device:
            model = nn.Sequential(Edits())
            graphckpt.apply(model, {"0": {"activation_checkpointing": {"rule": "selective", "save": "matmul"}}})
            for _ in range(2):
                with Ops() as ops:
                    model(torch.ones(4, 8, requires_grad=True)).sum().backward()
        return len(ops.results["addmm"])

    assert products(FakeDevice(load_profile("cpu"))) == products(contextlib.nullcontext()) == 2


class TestCudaKernels:
    """What stands in place of the CPU's kernels."""

    device = FakeDevice(load_profile("a100-80g"))

    @classmethod
    def _ops(cls, run: Callable[[], torch.Tensor]) -> dict[str, list[Any]]:
        with cls.device, Ops() as ops:
            run().sum().backward()
        return ops.results

    def test_flash_saves_query_key_value_result_and_row_sums(self) -> None:
        with self.device:
            query = torch.zeros(2, 4, 64, 32, dtype=torch.bfloat16, requires_grad=True)
            live = LiveBytes("meta", counts_fake=True)
            live.track([query])
            with live:
                out = F.scaled_dot_product_attention(query, query.clone(), query.clone(), is_causal=True)
                saved = live.live_bytes
            assert out.requires_grad
        each = 2 * 4 * 64 * 32 * 2
        assert 0 <= saved - (4 * each + 2 * 4 * 64 * 4) <= 64  # and the place in the random stream

    @pytest.mark.parametrize(
        ("dtype", "width", "has_mask", "kernel"),
        [
            (torch.bfloat16, 64, False, "_scaled_dot_product_flash_attention"),
            (torch.float16, 256, False, "_scaled_dot_product_flash_attention"),
            (torch.bfloat16, 20, False, "_scaled_dot_product_flash_attention"),
            (torch.bfloat16, 64, True, "_scaled_dot_product_efficient_attention"),
            (torch.float32, 64, False, "_scaled_dot_product_efficient_attention"),
            (torch.bfloat16, 512, False, "_scaled_dot_product_efficient_attention"),
            (torch.float64, 64, False, "_safe_softmax"),
        ],
    )
    def test_the_kernel_is_the_first_one_that_can(
        self, dtype: torch.dtype, width: int, has_mask: bool, kernel: str
    ) -> None:
        def run() -> torch.Tensor:
            x = torch.zeros(2, 4, 30, width, dtype=dtype, requires_grad=True)
            out = F.scaled_dot_product_attention(x, x, x, torch.ones(30, 30, dtype=torch.bool) if has_mask else None)
            assert out.shape == x.shape
            return out

        ops = self._ops(run)
        assert kernel in ops
        assert not any(name.endswith("for_cpu") for name in ops)

    def test_a_mask_that_wants_a_gradient_gets_one(self) -> None:
        """As the bias of positions of T5, where the kernel that Hopper prefers computes none."""
        with FakeDevice(load_profile("h200")), Ops() as ops:
            x, bias = (torch.zeros(2, 4, 32, n, dtype=torch.bfloat16, requires_grad=True) for n in (64, 32))
            F.scaled_dot_product_attention(x, x, x, bias).sum().backward()
            assert bias.grad is not None
        assert "_scaled_dot_product_efficient_attention" in ops.results

    def test_a_kernel_that_is_turned_off_is_not_taken(self) -> None:
        def run() -> torch.Tensor:
            x = torch.zeros(2, 4, 32, 64, dtype=torch.bfloat16, requires_grad=True)
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
                return F.scaled_dot_product_attention(x, x, x)

        assert "_scaled_dot_product_efficient_attention" in self._ops(run)

    def test_grouped_heads_stay_grouped(self) -> None:
        def run() -> torch.Tensor:
            x = torch.zeros(2, 4, 32, 64, dtype=torch.bfloat16, requires_grad=True)
            return F.scaled_dot_product_attention(x, x[:, :2], x[:, :2], enable_gqa=True)

        ops = self._ops(run)
        assert "_scaled_dot_product_flash_attention" in ops
        assert "repeat_interleave" not in ops

    @pytest.mark.parametrize("drop", [F.dropout, torch.dropout], ids=["functional", "torch"])
    def test_dropout_saves_a_mask_of_bytes(self, drop: Callable[..., torch.Tensor]) -> None:
        ops = self._ops(lambda: drop(torch.zeros(64, 64, requires_grad=True), 0.1, True))
        assert ops["native_dropout"][0][1].dtype is torch.bool
        assert "native_dropout" not in self._ops(lambda: drop(torch.zeros(4, requires_grad=True), 0.1, False))

    def test_multihead_attention_meets_the_kernels_inside(self) -> None:
        def run() -> torch.Tensor:
            layer = nn.MultiheadAttention(64, 4, dropout=0.1, batch_first=True, dtype=torch.bfloat16)
            x = torch.zeros(2, 32, 64, dtype=torch.bfloat16)
            return layer(x, x, x, need_weights=False)[0]

        assert "_scaled_dot_product_flash_attention" in self._ops(run)

    def test_the_cpu_keeps_its_own(self) -> None:
        with FakeDevice(load_profile("cpu")), Ops() as ops:
            x = torch.zeros(2, 4, 32, 64, requires_grad=True)
            F.scaled_dot_product_attention(x, x, x)
        assert "_scaled_dot_product_flash_attention_for_cpu" in ops.results

    def test_nothing_is_left_behind(self) -> None:
        before = F.dropout, torch.autocast.__init__, torch.utils.swap_tensors, torch.autograd._engine_run_backward
        with pytest.raises(ZeroDivisionError), self.device:
            raise ZeroDivisionError
        after = F.dropout, torch.autocast.__init__, torch.utils.swap_tensors, torch.autograd._engine_run_backward
        assert after == before
        assert not is_fake(torch.zeros(1))


class TestSteps:
    @pytest.mark.parametrize("rule", [False, True, "selective"])
    @pytest.mark.parametrize("autocast", [False, True])
    def test_a_second_run_meets_the_same_kernels(self, rule: bool | str, autocast: bool) -> None:
        device = FakeDevice(load_profile("a100-80g"))
        with device:
            model = gpt2().to("cuda")
            if not autocast:
                model.to(torch.bfloat16)
            graphckpt.apply(model, {BLOCKS[gpt2]: rule})
        with device, Ops() as ops:
            with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
                loss = loss_of(model)
            loss.backward()
        again = 2 if rule is True else 1
        assert len(ops.results["_scaled_dot_product_flash_attention"]) == 2 * again
        assert not any(name.endswith("for_cpu") for name in ops.results)
        normed = ops.results["native_layer_norm"][0][0]
        assert normed.dtype is (torch.float32 if autocast else torch.bfloat16)

    def test_transformers_makes_no_mask_where_a_real_step_makes_none(self) -> None:
        ones = {"attention_mask": torch.ones(2, 32, dtype=torch.long)}
        for more, is_padded, kernel in (({}, True, "flash"), (ones, False, "flash"), (ones, True, "efficient")):
            with FakeDevice(load_profile("a100-80g"), is_padded=is_padded) as device:
                model = llama().to(torch.bfloat16)
            with device, Ops() as ops:
                given = {key: torch.ones_like(value) for key, value in more.items()}
                loss_of(model, **given).backward()
            assert f"_scaled_dot_product_{kernel}_attention" in ops.results

    def test_an_optimizer_that_may_choose_takes_many_tensors_at_once_as_on_cuda(self) -> None:
        for options, op in (({}, "_foreach_sqrt"), ({"foreach": False}, "sqrt"), ({"fused": True}, "_fused_adamw_")):
            with FakeDevice(load_profile("a100-80g")):
                layer = nn.Linear(4, 4)
                optimizer = torch.optim.AdamW(layer.parameters(), **options)
                layer(torch.zeros(1, 4)).sum().backward()
                with Ops() as ops:
                    optimizer.step()
            assert op in ops.results
            assert optimizer.param_groups[0]["foreach"] is options.get("foreach")

    def test_a_loss_may_be_printed(self) -> None:
        with FakeDevice(load_profile("a100-80g")):
            loss = nn.Linear(4, 4)(torch.zeros(1, 4)).sum()
            assert (loss.item(), float(loss)) == (1.0, 1.0)

    def test_a_truncated_normal_distribution_is_drawn_once(self) -> None:
        with FakeDevice(load_profile("a100-80g")):
            weight = nn.Linear(8, 4).weight
            assert nn.init.trunc_normal_(weight, std=0.02) is weight
            assert is_fake(nn.init.trunc_normal_(torch.empty(3, 3), mean=5.0, a=4.0, b=5.5))
        assert nn.init.trunc_normal_(torch.empty(1000)).abs().max() < 2

    def test_a_shape_that_depends_on_values_is_one_clear_error(self) -> None:
        with FakeDevice(load_profile("a100-80g")), pytest.raises(ConfigError, match="reads the value of a tensor"):
            torch.zeros(4, dtype=torch.long).max().item()
        with FakeDevice(load_profile("a100-80g")), pytest.raises(ConfigError, match="plan on the device"):
            bool(torch.zeros(1) > 0)

    @pytest.mark.parametrize("build", [mixtral, qwen_moe])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("autocasts", [False, True])
    def test_mixtures_of_experts_run_in_each_dtype(
        self, build: Callable[[], nn.Module], dtype: torch.dtype, autocasts: bool
    ) -> None:
        def make_model() -> tuple[nn.Module, Callable[[], object]]:
            model = build().to(dtype).train()

            def step() -> None:
                with torch.autocast("cuda", torch.bfloat16, enabled=autocasts):
                    loss = loss_of(model)
                loss.backward()

            return model, step

        plan = graphckpt.plan(make_model, device="h100", memory_budget="min", candidates="full")
        assert plan.predicted_peak_bytes < plan.plain_peak_bytes

    def test_a_constructor_reads_values_of_small_tensors(self) -> None:
        @as_module(dict)
        def Rotary(self: Any, x: torch.Tensor) -> torch.Tensor:
            return x * self.scaled.sum()

        class ScaledRotary(Rotary):  # type: ignore[misc,valid-type]
            def __init__(self) -> None:
                super().__init__()
                frequencies = 1.0 / (10000 ** (torch.arange(0, 64, 2).float() / 64))
                frequencies[0] = 2.0
                self.num_scaled = sum(1 for frequency in frequencies if 6.28 / frequency > 100)
                self.rates = [rate.item() for rate in torch.linspace(0, 0.3, 4)]
                self.register_buffer("scaled", torch.stack([*frequencies]))

        def make_model() -> tuple[nn.Module, Callable[[], object]]:
            model = linear_layers(3, 64, ScaledRotary)
            models.append(model)
            return model, lambda: model(torch.zeros(8, 64)).sum().backward()

        models = [nn.Sequential(nn.Sequential(nn.Identity(), ScaledRotary()))]
        graphckpt.plan(make_model, device="h100", memory_budget="max", candidates="full")
        real, fake = (model[0][1] for model in models)
        assert (fake.num_scaled, fake.rates) == (real.num_scaled, real.rates)
        assert 0 < fake.num_scaled < 32
        assert is_fake(fake.scaled)
        assert fake.scaled.constant is None
        with FakeDevice(load_profile("h100")) as device:
            with device.building():
                norm = nn.LayerNorm(4)
            assert norm.to(torch.bfloat16).weight.dtype is torch.bfloat16

    def test_a_constructor_that_reads_random_values_is_named(self) -> None:
        class ReadsWeights(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                if torch.rand(3).sum() > 1:
                    self.linear = nn.Linear(3, 3)

        place = r"ReadsWeights \(test_fake_device.py, line \d+\) reads the value of a tensor by torch.Tensor.__bool__"
        with pytest.raises(ConfigError, match=f"the constructor of {place}.* fix: compute it without tensors"):
            graphckpt.plan(lambda: (ReadsWeights(), print), device="h100", memory_budget="max")

    def test_the_products_of_experts_are_counted(self) -> None:
        tokens, weights = torch.zeros(10, 4, device="meta"), torch.zeros(3, 4, 5, device="meta")
        assert flops_of(aten._grouped_mm.default, (tokens, weights), {}, None) == 2 * 10 * 4 * 5
        assert flops_of(aten._grouped_mm.default, (tokens.t(), torch.zeros(10, 5)), {}, None) == 2 * 10 * 4 * 5
        assert flops_of(aten._grouped_mm.default, (torch.zeros(3, 2, 4), weights), {}, None) == 3 * 2 * 2 * 4 * 5

    def test_a_llama_of_seven_billion_parameters_needs_no_memory(self) -> None:
        device = FakeDevice(load_profile("a100-80g"))
        with device:
            sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}
            model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=32, **sizes)).to(torch.bfloat16)
            live = LiveBytes("meta", counts_fake=True, record_timeline=False)
            live.track(model.parameters())
            assert live.live_bytes == 2 * sum(p.numel() for p in model.parameters()) > 12 * 2**30
            layers = model.model.layers
            model.model.layers = layers[:3]  # the others take as long again
            with live:
                tokens = torch.zeros(2, 2048, dtype=torch.long)
                model(tokens, labels=tokens).loss.backward()
        assert live.peak_bytes > 16 * 2**30


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
def test_a_capturable_optimizer_is_planned_and_stays_as_it_was(kind: type[torch.optim.Optimizer]) -> None:
    options = {} if kind is torch.optim.SGD else {"capturable": True}
    optimizers = []

    def make() -> tuple[nn.Module, Callable[[], None]]:
        model = linear_layers(3, 8, nn.ReLU)
        optimizers.append(kind(model.parameters(), lr=0.1, **options))

        def step() -> None:
            model(torch.ones(4, 8)).sum().backward()
            optimizers[-1].step()
            optimizers[-1].zero_grad()

        return model, step

    plan = graphckpt.plan(make, device="rtx3060", memory_budget="max")
    assert plan.predicted_peak_bytes > 0
    assert optimizers[-1].param_groups[0]["foreach"] is None
    assert optimizers[-1].param_groups[0].get("capturable", False) is bool(options)


def test_pytorch_does_not_remember_where_simulated_devices_are() -> None:
    """``torch.random.fork_rng`` would read the random state of CUDA devices from the CPU's module afterwards."""
    for _ in range(2):
        with FakeDevice(load_profile("h100")):
            torch.get_device_module("cuda")
        assert torch.get_device_module("cuda") is torch.cuda


def test_a_device_with_an_index_of_its_own_is_where_fake_tensors_are() -> None:
    with FakeDevice(load_profile("h200")):
        for device in (torch.device("cuda", 3), torch.device(type="cuda", index=3), torch.device("cuda:3")):
            assert torch.zeros(2, device=device).device.type == "cpu"
        assert torch.device("meta").type == "meta"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_moved", [True, False])
def test_a_fused_optimizer_updates_parameters_on_a_named_device_by_gradients_on_none(
    dtype: torch.dtype, is_moved: bool
) -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, vocab_size=64, pad_token_id=0
    )

    def make() -> tuple[nn.Module, Callable[[], None]]:
        model = LlamaForCausalLM(config).to(dtype)
        if is_moved:
            model.to("cuda")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(2, 16, dtype=torch.long)

        def step() -> None:
            inputs = tokens.to("cuda")
            model(input_ids=inputs, labels=inputs, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return model, step

    plan = graphckpt.plan(make, device="a10g", memory_budget="max", candidates=["full"], check=False, progress=False)
    assert plan.plain_peak_bytes > 0
