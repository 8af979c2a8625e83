"""Profiles of devices: what they hold, what ops cost on them, and that a measured one can be read again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.count_ops import CountOps
from torch.utils._python_dispatch import TorchDispatchMode

from graphckpt.errors import ConfigError
from graphckpt.planning.fake_device import FakeDevice
from graphckpt.planning.profile import DeviceProfile, load_profile, profile_names
from graphckpt.planning.write_profile import DeviceBenchmark, copy_rates, profile, write_profile

aten = torch.ops.aten


def seconds_of(device: DeviceProfile, func: object, *args: object) -> float:
    return device.op_seconds(func, args, {}, func(*args))  # type: ignore[operator]


class TestProfiles:
    def test_every_packaged_profile_is_whole(self) -> None:
        assert profile_names() == ["a100-80g", "cpu", "h100", "h200", "rtx3090", "rtx4090"]
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
                assert device.workspace_bytes == (33_554_432 if device.capability >= (9, 0) else 8_519_680)

    def test_an_unknown_device_is_one_clear_error(self) -> None:
        with pytest.raises(ConfigError) as error:
            load_profile("h20")
        assert str(error.value) == (
            "device: unknown profile 'h20' · did you mean 'h200'? · fix: use one of a100-80g, cpu, h100, h200, "
            "rtx3090, rtx4090, or a profile file that `graphckpt profile-device` wrote"
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

    def test_what_is_saved_is_what_is_read(self, tmp_path: Path) -> None:
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

    def test_what_is_spread_without_copies_is_read_once(self) -> None:
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
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):
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
        assert len(lines) == len(measured.flops) + 6
        assert [path.name for path in tmp_path.iterdir()] == ["here.yaml"]

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
        [("cuda", "expected a CUDA device, found none"), ("meta", "expected a CUDA device or the CPU, got meta")],
    )
    def test_a_device_that_cannot_be_measured_is_told(self, device: str, message: str) -> None:
        if device == "cuda" and torch.cuda.is_available():
            pytest.skip("there is one")
        with pytest.raises(ConfigError, match=message):
            profile(device)
