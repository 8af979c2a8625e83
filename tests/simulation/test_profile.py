"""Profiles of devices: what they hold, what ops cost on them, and that a measured one can be read again."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.count_ops import CountOps
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import graphckpt
from graphckpt.errors import ConfigError
from graphckpt.simulation.fake_device import FakeDevice
from graphckpt.simulation.op_costs import flops_of, moved_bytes
from graphckpt.simulation.profile import DeviceProfile, load_profile, profile_names
from graphckpt.simulation.write_profile import CudaBenchmark, DeviceBenchmark, copy_rates, profile, write_profile

aten = torch.ops.aten
PROFILES = Path(graphckpt.__file__).parent / "simulation" / "profiles"


def seconds_of(device: DeviceProfile, func: object, *args: object) -> float:
    return device.op_seconds(func, args, {}, func(*args))  # type: ignore[operator]


class TestProfiles:
    def test_every_packaged_profile_is_whole(self) -> None:
        assert profile_names() == [
            "a100-40g", "a100-80g", "a10g", "a6000", "b200", "cpu", "h100", "h200", "l4", "l40s", "rtx3060", "rtx3080",
            "rtx3090", "rtx4060ti-16g", "rtx4070", "rtx4090", "rtx5090", "t4", "v100-16g", "v100-32g",
        ]  # fmt: skip
        for name in profile_names():
            device = load_profile(name)
            assert device.name == name
            assert {"float32", "float64", "bfloat16", "float16"} <= set(device.flops)
            assert all(0 < share <= 1 for share in device.efficiency.values())
            assert device.copy_out > 0
            assert device.copy_in > 0
            if device.kind == "cuda":
                assert device.rounding == 512
                assert device.capability is not None
                # `parseChosenWorkspaceSize` of PyTorch's CublasHandlePool.cpp: 32 MiB for 9.x, 10.x and 12.x
                assert device.workspace_bytes == (33_554_432 if device.capability >= (9, 0) else 8_519_680)
                assert device.context_bytes == 512 * 2**20
                assert ("flash" in device.attention) == (device.capability >= (8, 0))
                # `check_prefer_cudnn_attention` of its sdp_utils.cpp
                assert (device.attention[0] == "cudnn") == (device.capability in ((9, 0), (10, 0)))

    def test_every_figure_has_a_source(self) -> None:
        for name in profile_names():
            lines = (PROFILES / f"{name}.yaml").read_text(encoding="utf-8").splitlines()
            explained = (
                "name",
                "kind",
                "capability",
                "copy_in",
                "workspace_bytes",
                "matmul",
                "convolution",
                "attention",
            )
            explained += ("bandwidth", "copy")  # by the comment at their head
            for line, before in zip(lines[1:], lines, strict=False):
                key, _, value = line.strip().partition(": ")
                if value and not line.startswith("#") and key not in explained:
                    assert "#" in line or before.startswith("#"), f"{name}: {line}"

    @pytest.mark.parametrize(("name", "percentage"), [("h100", 80.3), ("h200", 80.3), ("b200", 77.6)])
    def test_products_reach_the_same_share_of_the_highest_measured_rate(self, name: str, percentage: float) -> None:
        of_a100 = load_profile("a100-80g").efficiency["matmul"] / 86.9
        assert load_profile(name).efficiency["matmul"] == pytest.approx(of_a100 * percentage, abs=5e-4)

    @pytest.mark.parametrize(("name", "variants"), [("v100", "v100-16g, v100-32g"), ("a100", "a100-40g, a100-80g")])
    def test_a_short_name_lists_its_variants(self, name: str, variants: str) -> None:
        with pytest.raises(ConfigError) as error:
            load_profile(name)
        first = variants.partition(",")[0]
        assert str(error.value) == f"device: expected one of {variants}, got {name!r} · fix: use {first!r}"

    def test_a_memory_replaces_that_of_the_profile(self) -> None:
        device = load_profile("h100").with_memory("24GiB")
        assert (device.name, device.memory_bytes) == ("h100 of 24.0 GiB", 24 * 2**30)
        assert replace(device, name="h100", memory_bytes=80_000_000_000) == load_profile("h100")

    @pytest.mark.parametrize(
        ("memory", "message"),
        [
            ("24Gi", "memory: '24Gi': unknown unit 'Gi' · fix: use 'GiB'"),
            (24, "memory: expected at least 1 MiB, got 24 B · fix: '24GiB'"),
            ("1MiB", "memory: expected more than the 512 MiB of the context of a process, got 1.00 MiB · fix: '24GiB'"),
            ("512MiB", "the context of a process, got 512 MiB · fix: '24GiB'"),
        ],
    )
    def test_a_memory_that_is_not_one_is_an_error(self, memory: int | str, message: str) -> None:
        with pytest.raises(ConfigError, match=re.escape(message)):
            load_profile("h100").with_memory(memory)

    def test_the_example_of_the_docs_is_a_profile(self, tmp_path: Path) -> None:
        page = Path("docs/reference/planning.md").read_text(encoding="utf-8").partition("### Custom profiles")[2]
        example = page.partition("```yaml\n")[2].partition("```")[0]
        (tmp_path / "a40.yaml").write_text(example)
        device = load_profile(tmp_path / "a40.yaml")
        assert example.count("\n") <= 20
        assert device.context_bytes == 512 * 2**20
        assert "disk_write" not in example
        assert {field.name for field in fields(DeviceProfile)} - set(yaml.safe_load(example)) == {
            "disk_write",
            "disk_read",
        }

    def test_the_context_has_a_default_for_each_kind(self) -> None:
        values = {"name": "x", "memory_bytes": 1, "flops": {"float32": 1.0}, "memory_bandwidth": 1.0}
        assert DeviceProfile(kind="cuda", **values).context_bytes == 512 * 2**20
        assert DeviceProfile(kind="cpu", **values).context_bytes == 0
        assert DeviceProfile(kind="cuda", context_bytes=7, **values).context_bytes == 7

    def test_an_unknown_device_is_one_clear_error(self) -> None:
        with pytest.raises(ConfigError) as error:
            load_profile("h20")
        assert str(error.value) == (
            f"device: unknown profile 'h20' · did you mean 'h200'? · fix: use one of {', '.join(profile_names())}; "
            'or write a profile of about 20 lines, see "Custom profiles" in docs/reference/planning.md'
        )

    def test_all_faults_of_a_file_are_told_at_once(self, tmp_path: Path) -> None:
        path = tmp_path / "mine.yaml"
        path.write_text("name: mine\nkind: cuda\nmemory_bytes: 1\nflop: {}\n")
        with pytest.raises(ConfigError, match="did you mean 'flops'") as error:
            load_profile(path)
        assert "flops: is missing" in str(error.value)
        assert "memory_bandwidth: is missing" in str(error.value)

        path.write_text("name: mine\nkind: tpu\nmemory_bytes: 0\nflops: {float32: 1.0}\nmemory_bandwidth: fast\n")
        with pytest.raises(ConfigError) as error:
            load_profile(path)
        for fault in ("got 'tpu'", "memory_bytes: expected a number above 0, got 0", "memory_bandwidth: expected a"):
            assert fault in str(error.value)

    def test_a_file_that_is_missing_or_no_profile_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"device: the file .* does not exist"):
            load_profile(tmp_path / "none.yaml")
        (tmp_path / "list.yaml").write_text("- 1\n")
        with pytest.raises(ConfigError, match="expected fields, one per line"):
            load_profile(tmp_path / "list.yaml")
        (tmp_path / "broken.yaml").write_text("a: [\n")
        with pytest.raises(ConfigError, match="expected YAML"):
            load_profile(tmp_path / "broken.yaml")

    def test_a_saved_profile_reads_back_equal(self, tmp_path: Path) -> None:
        load_profile("h200").save(tmp_path / "copy.yaml", comment="one line\nand another")
        assert load_profile(tmp_path / "copy.yaml") == load_profile("h200")

    def test_bytes_are_rounded_up_to_what_the_allocator_hands_out(self) -> None:
        h200 = load_profile("h200")
        assert [h200.rounded(n) for n in (0, 1, 512, 513)] == [0, 512, 512, 1024]
        assert load_profile("cpu").rounded(7) == 7


class TestOpSeconds:
    device = load_profile("a100-80g")

    def test_a_large_product_takes_its_arithmetic_and_a_sum_its_bytes(self) -> None:
        x = torch.zeros(8192, 8192, dtype=torch.bfloat16, device="meta")
        launch = self.device.launch_seconds
        assert seconds_of(self.device, aten.mm.default, x, x) == pytest.approx(2 * 8192**3 / (0.7 * 312e12) + launch)
        assert seconds_of(self.device, aten.add.Tensor, x, x) == pytest.approx(6 * 8192**2 / (0.8 * 2039e9) + launch)

    def test_views_and_empty_tensors_take_no_time(self) -> None:
        x = torch.zeros(8, 8, device="meta")
        assert seconds_of(self.device, aten.view.default, x, [64]) == 0
        assert seconds_of(self.device, aten.t.default, x) == 0
        assert seconds_of(self.device, aten._unsafe_view.default, x, [64]) == 0
        assert seconds_of(self.device, aten.detach.default, x) == 0
        assert seconds_of(self.device, aten.empty.memory_format, [8, 8]) == 0

    def test_an_expanded_tensor_is_read_once(self) -> None:
        row = torch.zeros(1, 4096, device="meta")
        whole = torch.zeros(4096, 4096, device="meta")
        assert seconds_of(self.device, aten.add.Tensor, whole, row.expand(4096, 4096)) < seconds_of(
            self.device, aten.add.Tensor, whole, whole
        )

    def test_attention_counts_its_pairs_and_a_causal_one_half_of_them(self) -> None:
        query = torch.zeros(1, 16, 4096, 128, dtype=torch.bfloat16, device="meta")
        op = aten._scaled_dot_product_flash_attention.default
        full, causal = (seconds_of(self.device, op, query, query, query, 0.0, flag) for flag in (False, True))
        launch = self.device.launch_seconds
        assert full == pytest.approx(4 * 16 * 4096**2 * 128 / (0.5 * 312e12) + launch)
        assert causal - launch == pytest.approx((full - launch) / 2)

    def test_backward_of_attention_takes_five_products_where_forward_takes_two(self) -> None:
        ops: dict[str, float] = {}

        class Seconds(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                ops[str(func)] = TestOpSeconds.device.op_seconds(func, args, kwargs or {}, result)
                return result

        query = torch.zeros(1, 8, 4096, 64, dtype=torch.bfloat16, device="meta", requires_grad=True)
        with Seconds():
            aten._scaled_dot_product_flash_attention(query, query, query)[0].sum().backward()
        launch = self.device.launch_seconds
        forward = ops["aten._scaled_dot_product_flash_attention.default"] - launch
        backward = ops["aten._scaled_dot_product_flash_attention_backward.default"] - launch
        assert backward == pytest.approx(2.5 * forward)

    def test_products_in_float32_are_faster_where_tf32_is_allowed(self) -> None:
        x = torch.zeros(8192, 8192, device="meta")
        plain = seconds_of(self.device, aten.mm.default, x, x)
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            assert seconds_of(self.device, aten.mm.default, x, x) < plain / 4
        finally:
            torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize(("name", "kernel"), [("h100", "cudnn"), ("h200", "cudnn"), ("a100-80g", "flash")])
def test_attention_runs_on_the_kernel_that_the_device_prefers(name: str, kernel: str) -> None:
    with FakeDevice(load_profile(name)), CountOps() as ops:
        q = torch.randn(2, 4, 64, 64, dtype=torch.bfloat16, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
    assert ops.counts[f"aten._scaled_dot_product_{kernel}_attention.default"] == 1
    assert ops.counts[f"aten._scaled_dot_product_{kernel}_attention_backward.default"] == 1


@pytest.mark.parametrize(
    ("name", "dtype", "kernel"),
    [
        ("t4", torch.float16, "efficient"),
        ("t4", torch.float32, "efficient"),
        ("v100-16g", torch.bfloat16, "math"),  # whose efficient kernel needs capability 8.0 for it
        ("a100-40g", torch.bfloat16, "flash"),
        ("b200", torch.bfloat16, "cudnn"),
        ("rtx5090", torch.bfloat16, "flash"),
    ],
)
def test_older_devices_run_attention_on_other_kernels(name: str, dtype: torch.dtype, kernel: str) -> None:
    with FakeDevice(load_profile(name)), CountOps() as ops:
        q = torch.randn(2, 4, 64, 64, dtype=dtype, requires_grad=True)
        torch.nn.functional.scaled_dot_product_attention(q, q, q).sum().backward()
    ran = [op for op in ops.counts if "_attention" in op and "backward" not in op]
    assert ran == ([] if kernel == "math" else [f"aten._scaled_dot_product_{kernel}_attention.default"])


class TestExtraBytes:
    query = torch.zeros(2, 8, 100, 64, dtype=torch.bfloat16, device="meta")
    op = aten._scaled_dot_product_flash_attention_backward.default

    @pytest.mark.parametrize(
        ("device", "kernel", "num_bytes"),
        [
            ("h200", "flash", 4 * 2 * 8 * 128 * (64 + 1)),  # sums in float32, of lengths rounded up
            ("h100", "cudnn", 4 * 2 * 8 * 100 * (64 + 1)),
            ("h200", "efficient", 4 * 2 * 8 * 100),
            ("cpu", "flash", 0),
        ],
    )
    def test_backward_of_attention_sums_in_float32(self, device: str, kernel: str, num_bytes: int) -> None:
        op = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward").default
        assert load_profile(device).op_extra_bytes(op, (self.query,) * 4) == num_bytes

    @pytest.mark.parametrize(("count", "num_bytes"), [(3072, 0), (3073, 32 * 3073)])
    def test_many_indices_are_sorted_in_buffers(self, count: int, num_bytes: int) -> None:
        args = (self.query, torch.zeros(count, dtype=torch.long, device="meta"))
        assert load_profile("h200").op_extra_bytes(aten.embedding_dense_backward.default, args) == num_bytes

    def test_grouped_heads_are_spread_for_their_gradients(self) -> None:
        key = self.query[:, :2]
        plain = load_profile("h200").op_extra_bytes(self.op, (self.query, self.query, self.query, self.query))
        grouped = load_profile("h200").op_extra_bytes(self.op, (self.query, self.query, key, key))
        assert grouped - plain == 2 * 2 * 8 * 100 * 64 * 2

    def test_an_op_of_which_nothing_is_known_takes_nothing(self) -> None:
        assert load_profile("h200").op_extra_bytes(aten.mm.default, (self.query, self.query)) == 0


class TestProfileDevice:
    @pytest.fixture(autouse=True)
    def _small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(DeviceBenchmark, "sizes", (32, 64))
        monkeypatch.setattr(DeviceBenchmark, "block_bytes", 2**20)
        monkeypatch.setattr(DeviceBenchmark, "disk_bytes", 2**20)

    def test_the_cpu_is_measured_and_its_file_can_be_read(self, tmp_path: Path) -> None:
        lines: list[str] = []
        measured = write_profile(
            tmp_path / "here.yaml", "cpu", name="here", seconds=0.001, folder=tmp_path, report=lines.append
        )
        assert load_profile(tmp_path / "here.yaml") == measured
        assert measured.name == "here"
        assert all(rate > 0 for rate in measured.flops.values())
        assert measured.launch_seconds > 0
        assert measured.disk_read > 0
        assert measured.context_bytes == 0
        assert len(lines) == len(measured.flops) + 7
        assert [path.name for path in tmp_path.iterdir()] == ["here.yaml"]

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
    def test_a_cuda_build_without_a_device_measures_the_cpu(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
        assert write_profile(tmp_path / "here.yaml", seconds=0.001, folder=tmp_path).context_bytes == 0

    @pytest.mark.parametrize("place", ["host", "disk"])
    def test_copies_alone_are_measured(self, place: str) -> None:
        assert all(rate > 0 for rate in copy_rates("cpu", place))

    def test_a_folder_that_is_missing_is_told_before_anything_is_measured(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"the folder .* does not exist"):
            write_profile(tmp_path / "none" / "here.yaml", "cpu")
        with pytest.raises(ConfigError, match=r"expected a file that ends in \.yaml, got .*x\.txt · fix: use x\.yaml"):
            write_profile(tmp_path / "x.txt", "cpu")

    @pytest.mark.parametrize(
        ("device", "message"),
        [(each, f"profile: device: expected cuda, .* or cpu, got {each} · fix") for each in ("cuda", "meta", "tpu")],
    )
    def test_a_device_that_cannot_be_measured_is_told(self, device: str, message: str) -> None:
        if device == "cuda" and torch.cuda.is_available():
            pytest.skip("there is one")
        with pytest.raises(ConfigError, match=message):
            profile(device)

    @pytest.mark.parametrize(
        ("printed", "free", "num_bytes"),
        [
            ("print(2**21, flush=True)", (10 * 2**30, 9 * 2**30), 2**30 - 2**21),
            ("print(2**21, flush=True)", (10 * 2**30, 11 * 2**30), None),  # another process has ended meanwhile
            ("sys.exit('busy')", (10 * 2**30, 9 * 2**30), None),  # the device admits one process
            ("", (10 * 2**30, 9 * 2**30), None),  # the process prints nothing until it is killed
        ],
    )
    def test_a_context_is_what_another_process_takes_beside_its_tensors(
        self, printed: str, free: tuple[int, int], num_bytes: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(
            "graphckpt.simulation.write_profile._IN_CONTEXT", f"import sys\n{printed}\nsys.stdin.readline()"
        )
        monkeypatch.setattr("graphckpt.simulation.write_profile._CONTEXT_SECONDS", 120.0 if printed else 0.5)
        readings = iter(free)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (next(readings), 80 * 2**30))
        bench = object.__new__(CudaBenchmark)
        bench.device = torch.device("cuda", 0)
        assert bench.context() == num_bytes


@pytest.mark.gpu
def test_the_context_of_a_device_is_measured_in_a_process_of_its_own() -> None:
    num_bytes = CudaBenchmark(torch.device("cuda", 0), seconds=0.001).context()
    assert (
        num_bytes is None or 2**20 < num_bytes < 2**31
    )  # None: on the simulated device, whose processes share nothing


@pytest.mark.parametrize(
    ("op", "shapes"),
    [(torch.ops.aten.mm.default, [(3, 4), (4, 5)]), (torch.ops.aten.bmm.default, [(2, 3, 4), (2, 4, 5)])],
)
def test_a_matrix_product_counts_as_in_the_formulas_of_pytorch(op: OpOverload, shapes: list[tuple[int, ...]]) -> None:
    arguments = tuple(torch.zeros(shape) for shape in shapes)
    result = op(*arguments)
    assert flops_of(op, arguments, {}, result) == flop_registry[op.overloadpacket](*arguments, out_val=result)


def test_expanded_tensors_are_read_once_and_views_not_at_all() -> None:
    aten = torch.ops.aten
    rows, one, empty = torch.zeros(8, 4), torch.zeros(1, 4).expand(8, 4), torch.zeros(1, 0).expand(8, 0)
    assert moved_bytes(aten.add.Tensor, (rows, one), {}, rows + one) == 4 * (32 + 4 + 32)
    assert moved_bytes(aten.add.Tensor, (empty, empty), {}, empty + empty) is None
    assert moved_bytes(aten.cat.default, ([rows, rows],), {}, torch.cat([rows, rows])) == 4 * (64 + 64)
    assert moved_bytes(aten._unsafe_view.default, (rows, [4, 8]), {}, rows.view(4, 8)) is None


def test_a_file_that_changes_is_read_anew_and_each_profile_has_values_of_its_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    load_profile("h100").save(file)
    first, second = load_profile(file), load_profile(file)
    assert first == second
    first.flops["float32"] = 1.0  # type: ignore[index]
    assert load_profile(file) == second
    replace(second, memory_bytes=2**30).save(file)
    assert load_profile(file).memory_bytes == 2**30
