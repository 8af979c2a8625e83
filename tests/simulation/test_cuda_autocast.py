"""A simulated GPU casts under autocast as PyTorch's own kernels for CUDA do, op by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import graphckpt
from graphckpt._compat_fake import CASTS_ON_CUDA
from graphckpt.errors import ConfigError
from graphckpt.simulation.cuda_autocast import KINDS
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.profile import load_profile


class Inputs:
    """Small tensors on a device, in the type of autocast and in float32."""

    def __init__(self, device: str, low: torch.dtype) -> None:
        def new(*shape: int, dtype: torch.dtype = low) -> torch.Tensor:
            return torch.ones(*shape, device=device, dtype=dtype)

        self.x, self.v, self.y = new(4, 4), new(4), new(4, 4, dtype=torch.float32)
        self.b, self.m = new(2, 4, 4), new(2, 4, 4, 4)
        self.w = new(4, dtype=torch.float32)
        self.i = torch.zeros(4, dtype=torch.long, device=device)
        self.ii = torch.zeros(4, 4, dtype=torch.long, device=device)
        self.weights = [new(16, 4), new(16, 4), new(16), new(16)]
        self.gru = [new(12, 4), new(12, 4), new(12), new(12)]
        self.v5 = new(1, 2, 4, 4, 4)
        self.grid = new(2, 4, 4, 2, dtype=torch.float32)


nn_ops: Any = torch._C._nn
CALLS: dict[str, Callable[[Inputs], Any]] = {
    # with a kernel for CUDA, by its name
    "_convolution": lambda t: F.conv1d(t.b, t.b[:1].expand(4, 4, 4)),
    "_scaled_dot_product_flash_attention": lambda t: F.scaled_dot_product_attention(t.m, t.m, t.m),
    "_upsample_bicubic2d_aa": lambda t: F.interpolate(t.m, size=(2, 2), mode="bicubic", antialias=True),
    "_upsample_bilinear2d_aa": lambda t: F.interpolate(t.m, size=(2, 2), mode="bilinear", antialias=True),
    "_upsample_nearest_exact1d": lambda t: F.interpolate(t.b, size=2, mode="nearest-exact"),
    "_upsample_nearest_exact2d": lambda t: F.interpolate(t.m, size=2, mode="nearest-exact"),
    "_upsample_nearest_exact3d": lambda t: F.interpolate(t.v5, size=2, mode="nearest-exact"),
    "acos": lambda t: t.x.acos(),
    "addbmm": lambda t: torch.addbmm(t.x, t.b, t.b),
    "addcdiv": lambda t: torch.addcdiv(t.x, t.x, t.y),
    "addcmul": lambda t: torch.addcmul(t.x, t.x, t.y),
    "addmm": lambda t: torch.addmm(t.y, t.x, t.x),
    "addmv": lambda t: torch.addmv(t.w, t.x, t.v),
    "addr": lambda t: torch.addr(t.y, t.v, t.v),
    "asin": lambda t: torch.asin(t.x),
    "atan2": lambda t: torch.atan2(t.x, t.y),
    "baddbmm": lambda t: torch.baddbmm(t.b, t.b, t.b),
    "bilinear": lambda t: F.bilinear(t.x, t.y, t.b),
    "binary_cross_entropy": lambda t: F.binary_cross_entropy(t.x, t.x),
    "binary_cross_entropy_with_logits": lambda t: F.binary_cross_entropy_with_logits(t.x, t.x),
    "bmm": lambda t: t.b @ t.b,
    "cdist": lambda t: torch.cdist(t.x, t.x),
    "chain_matmul": lambda t: torch.chain_matmul(t.y, t.y),
    "conv1d": lambda t: F.conv1d(t.b, t.b[:1].expand(4, 4, 4).float()),
    "conv2d": lambda t: F.conv2d(t.m, t.m[:1].float()),
    "conv3d": lambda t: F.conv3d(t.v5, t.v5.float()),
    "conv_tbc": lambda t: torch.conv_tbc(t.b, t.b, t.v),
    "conv_transpose1d": lambda t: F.conv_transpose1d(t.b, t.b[:1].expand(4, 4, 4).float()),
    "conv_transpose2d": lambda t: F.conv_transpose2d(t.m, t.m[:1].expand(4, 4, 4, 4).float()),
    "conv_transpose3d": lambda t: F.conv_transpose3d(t.v5, t.v5.expand(2, 2, 4, 4, 4).float()),
    "convolution": lambda t: torch.convolution(t.b, t.b, None, [1], [0], [1], False, [0], 1),
    "cosh": lambda t: t.x.cosh(),
    "cosine_embedding_loss": lambda t: F.cosine_embedding_loss(t.x, t.x, t.v),
    "cosine_similarity": lambda t: F.cosine_similarity(t.x, t.x),
    "cross": lambda t: torch.cross(t.x[:, :3], t.y[:, :3], dim=-1),
    "cumprod": lambda t: t.x.cumprod(0),
    "cumsum": lambda t: t.x.cumsum(0),
    "dist": lambda t: torch.dist(t.x, t.x),
    "dot": lambda t: torch.dot(t.v, t.w),
    "einsum": lambda t: torch.einsum("ij,kj->ik", t.y, t.y),
    "erfinv": lambda t: t.x.erfinv(),
    "exp": lambda t: t.x.exp(),
    "expm1": lambda t: torch.expm1(t.x),
    "frobenius_norm": lambda t: torch.norm(t.x, dim=(0, 1)),
    "grid_sampler": lambda t: F.grid_sample(t.m, t.grid, align_corners=False),
    "group_norm": lambda t: F.group_norm(t.x, 2),
    "gru_cell": lambda t: torch.gru_cell(t.y, t.y, *t.gru),
    "hinge_embedding_loss": lambda t: F.hinge_embedding_loss(t.x, t.x),
    "huber_loss": lambda t: F.huber_loss(t.x, t.x),
    "index_put": lambda t: t.x.index_put((t.i,), t.y),
    "kl_div": lambda t: F.kl_div(t.x, t.x, reduction="batchmean"),
    "l1_loss": lambda t: F.l1_loss(t.x, t.x),
    "layer_norm": lambda t: F.layer_norm(t.x, (4,)),
    "linalg_matrix_norm": lambda t: torch.linalg.matrix_norm(t.x),
    "linalg_multi_dot": lambda t: torch.linalg.multi_dot([t.y, t.y]),
    "linalg_vecdot": lambda t: torch.linalg.vecdot(t.y, t.y),
    "linalg_vector_norm": lambda t: torch.linalg.vector_norm(t.x),
    "linear": lambda t: F.linear(t.y, t.x),
    "log": lambda t: t.x.log(),
    "log10": lambda t: t.x.log10(),
    "log1p": lambda t: t.x.log1p(),
    "log2": lambda t: t.x.log2(),
    "log_softmax": lambda t: F.log_softmax(t.x, -1),
    "logsumexp": lambda t: torch.logsumexp(t.x, -1),
    "lstm_cell": lambda t: torch.lstm_cell(t.y, [t.y, t.y], *t.weights),
    "margin_ranking_loss": lambda t: F.margin_ranking_loss(t.v, t.v, t.v),
    "matmul": lambda t: torch.matmul(t.y, t.y),
    "mm": lambda t: torch.mm(t.y, t.y),
    "mse_loss": lambda t: F.mse_loss(t.x, t.x),
    "multi_margin_loss": lambda t: F.multi_margin_loss(t.x, t.i),
    "multilabel_margin_loss": lambda t: F.multilabel_margin_loss(t.x, t.ii),
    "mv": lambda t: t.y.mv(t.w),
    "native_layer_norm": lambda t: torch.native_layer_norm(t.x, (4,), None, None, 1e-5)[0],
    "nll_loss": lambda t: F.nll_loss(t.x, t.i),
    "nll_loss2d": lambda t: F.nll_loss(t.m, torch.zeros_like(t.m[:, 0], dtype=torch.long)),
    "norm": lambda t: t.x.norm(),
    "nuclear_norm": lambda t: torch.norm(t.x, "nuc"),
    "pdist": lambda t: F.pdist(t.x),
    "poisson_nll_loss": lambda t: F.poisson_nll_loss(t.x, t.x),
    "pow": lambda t: (t.x.pow(2), t.x**2, 2**t.x, t.x**t.x),
    "prelu": lambda t: F.prelu(t.y, t.w),
    "prod": lambda t: (t.x.prod(), t.x.prod(0)),
    "reciprocal": lambda t: t.x.reciprocal(),
    "renorm": lambda t: torch.renorm(t.x, 2, 0, 1.0),
    "rms_norm": lambda t: F.rms_norm(t.x, (4,)),
    "rnn_relu_cell": lambda t: torch.rnn_relu_cell(t.y, t.y, t.y, t.y, t.w, t.w),
    "rnn_tanh_cell": lambda t: torch.rnn_tanh_cell(t.y, t.y, t.y, t.y, t.w, t.w),
    "rsqrt": lambda t: t.x.rsqrt(),
    "scaled_dot_product_attention": lambda t: F.scaled_dot_product_attention(t.m.float(), t.m, t.m),
    "scatter_add": lambda t: t.x.scatter_add(0, t.ii, t.y),
    "sinh": lambda t: t.x.sinh(),
    "smooth_l1_loss": lambda t: F.smooth_l1_loss(t.x, t.x),
    "soft_margin_loss": lambda t: F.soft_margin_loss(t.x, t.x),
    "softmax": lambda t: (F.softmax(t.x, -1), t.x.softmax(-1), torch.softmax(t.x, dim=-1), F.softmin(t.x, -1)),
    "softplus": lambda t: F.softplus(t.x),
    "sum": lambda t: (t.x.sum(), t.x.sum(0), torch.sum(t.x, dim=(0, 1))),
    "tan": lambda t: t.x.tan(),
    "tensordot": lambda t: torch.tensordot(t.x, t.y, 1),
    "triplet_margin_loss": lambda t: F.triplet_margin_loss(t.x, t.x, t.x),
    "upsample_bicubic2d": lambda t: F.interpolate(t.m, size=(2, 2), mode="bicubic"),
    "upsample_bilinear2d": lambda t: F.interpolate(t.m, size=(2, 2), mode="bilinear"),
    "upsample_linear1d": lambda t: F.interpolate(t.b, size=2, mode="linear"),
    "upsample_nearest1d": lambda t: F.interpolate(t.b, size=2),
    "upsample_nearest2d": lambda t: F.interpolate(t.m, size=2),
    "upsample_nearest3d": lambda t: F.interpolate(t.v5, size=2),
    "upsample_trilinear3d": lambda t: F.interpolate(t.v5, size=2, mode="trilinear"),
    "vdot": lambda t: torch.vdot(t.v, t.w),
}
WITHOUT_CALL = {"_thnn_fused_gru_cell", "_thnn_fused_lstm_cell", "cudnn_convolution", "cudnn_convolution_transpose"}
"""Ops that PyTorch calls itself, and only where the tensors are on CUDA."""

NEEDS_CUDA = {
    "_convolution", "conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d", "cross", "grid_sampler", "gru_cell",
    "nll_loss2d", "cross_entropy of images",
}  # fmt: skip
"""Calls that raise on fake tensors of CUDA where there is none: the documented kind says what their results are."""

MORE: dict[str, Callable[[Inputs], Any]] = {
    # without one, of their own or for CUDA alone
    "adaptive_avg_pool": lambda t: F.adaptive_avg_pool2d(t.m, 2),
    "area": lambda t: F.interpolate(t.m, size=2, mode="area"),
    "avg_pool3d": lambda t: F.avg_pool3d(t.v5, 2),
    "batch_norm": lambda t: F.batch_norm(t.x, None, None, training=True),
    "cat": lambda t: (torch.cat([t.x, t.y]), torch.stack([t.x, t.y])),
    "celu": lambda t: (F.celu(t.x), F.elu(t.x), F.gelu(t.x), F.silu(t.x), F.mish(t.x), F.hardswish(t.x)),
    "cross_entropy": lambda t: F.cross_entropy(t.x, t.i),
    "cross_entropy of images": lambda t: F.cross_entropy(t.m, torch.zeros_like(t.m[:, 0], dtype=torch.long)),
    "cross_entropy of probabilities": lambda t: F.cross_entropy(t.x, t.x),
    "cross_entropy with weights": lambda t: F.cross_entropy(t.x, t.i, t.w, ignore_index=0, reduction="none"),
    "cross_entropy that smooths": lambda t: F.cross_entropy(t.x, t.i, label_smoothing=0.1),
    "embedding": lambda t: F.embedding(t.i, t.x),
    "glu": lambda t: F.glu(t.x),
    "in place": lambda t: (t.x.clone().exp_(), t.x.clone().pow_(2)),
    "instance_norm": lambda t: F.instance_norm(t.b),
    "linalg_norm": lambda t: (torch.linalg.norm(t.x), torch.linalg.norm(t.v)),
    "logsigmoid": lambda t: F.logsigmoid(t.x),
    "masked_fill": lambda t: t.x.masked_fill(t.x > 0, 0.0),
    "mean": lambda t: (t.x.mean(), t.x.std(), t.x.var(0), t.x.amax(), t.x.max(0)[0]),
    "multilabel_soft_margin_loss": lambda t: F.multilabel_soft_margin_loss(t.x, t.x),
    "normalize": lambda t: F.normalize(t.x),
    "of float32": lambda t: (t.y.sum(), t.y.softmax(-1), t.y.exp(), t.y + t.x),
    "of float64": lambda t: (t.y.double().exp(), t.y.double() @ t.y.double(), t.y.double().sum()),
    "of integers": lambda t: (t.i.sum(), t.ii.cumsum(0), t.ii.prod()),
    "pairwise_distance": lambda t: F.pairwise_distance(t.x, t.x),
    "sigmoid": lambda t: (t.x.sigmoid(), t.x.tanh(), t.x.sqrt(), t.x.erf(), t.x.sin()),
    "softmax with a dtype": lambda t: (F.softmax(t.x, -1, torch.float64), t.x.sum(dtype=torch.float64)),
    "special": lambda t: (torch.special.log_softmax(t.x, -1, dtype=None), torch.special.expm1(t.x)),
    "where": lambda t: (torch.where(t.x > 0, t.x, t.y), torch.lerp(t.x, t.x, 0.5), t.x.clamp(0, 1)),
}


def types_of(call: Callable[[Inputs], Any], low: torch.dtype) -> list[str]:
    try:
        results = call(Inputs("cuda", low))
    except (RuntimeError, ConfigError) as error:
        return ["refused" if "autocast" in str(error) else f"{type(error).__name__}: {error}"]
    return [str(result.dtype) for result in pytree.tree_leaves(results)]


def test_each_op_that_autocast_casts_for_is_of_a_known_kind_and_is_called() -> None:
    """A release of PyTorch with another op fails here, and names it."""
    assert sorted(CASTS_ON_CUDA - KINDS.keys()) == []
    assert sorted(KINDS.keys() - CASTS_ON_CUDA) == []
    assert sorted(CASTS_ON_CUDA - CALLS.keys() - WITHOUT_CALL) == []


@pytest.mark.filterwarnings("ignore:torch.chain_matmul is deprecated")
@pytest.mark.parametrize("name", [*CALLS, *MORE])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_results_have_the_type_of_the_kernels_of_cuda(name: str, dtype: torch.dtype) -> None:
    call = (CALLS | MORE)[name]
    device = FakeDevice(load_profile("h100"))
    with device, torch.autocast("cuda", dtype):
        simulated = types_of(call, dtype)
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        with FakeTensorMode():
            if name in NEEDS_CUDA:
                with pytest.raises((RuntimeError, AssertionError)):
                    call(Inputs("cuda", dtype))
                expected = [str(dtype if KINDS.get(name) == "lower" else torch.float32)]
            else:
                expected = types_of(call, dtype)
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)
    assert simulated == expected


def test_an_op_of_an_unknown_kind_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(KINDS, "logsumexp")
    device = FakeDevice(load_profile("h100"))
    with (
        device,
        torch.autocast("cuda"),
        pytest.raises(ConfigError, match=r"test_cuda_autocast.py.*logsumexp under autocast"),
    ):
        torch.logsumexp(torch.ones(4, device="cuda"), 0)


def peak(loss_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> int:
    def make() -> tuple[nn.Module, Callable[[], None]]:
        model = nn.Sequential(nn.Embedding(1024, 64), nn.Linear(64, 64), nn.Linear(64, 1024, bias=False))
        tokens = torch.zeros(512, dtype=torch.long, device="cuda")

        def step() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(model(tokens), tokens)
            loss.backward()
            model.zero_grad()

        return model.to("cuda"), step

    return graphckpt.plan(make, device="h100", memory_budget="1GiB", candidates=["full"]).predicted_peak_bytes


@pytest.mark.parametrize("op", [lambda z: torch.logsumexp(z, -1), lambda z: F.rms_norm(z, (1024,)), lambda z: z.exp()])
def test_an_op_in_float32_keeps_a_copy_of_its_input(op: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert peak(lambda z, _: op(z).mean()) == peak(lambda z, _: op(z.float()).mean())


def test_a_softmax_reads_low_precision_without_a_copy() -> None:
    """Its backward writes it, too: gradient and result in float32 are alive then, and the logits."""
    logits = 512 * 1024
    copied = peak(lambda z, tokens: F.cross_entropy(z.float(), tokens))
    assert peak(F.cross_entropy) == copied - 2 * logits
