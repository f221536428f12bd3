"""The pretended GPU itself: what a real one refuses, or answers wrongly now and then, fails here and says where."""

import re
import threading
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from tests.pretended_gpu.cuda import pretended_gpu
from tests.pretended_gpu.device import MixedDevicesError
from tests.pretended_gpu.graphs import CaptureError
from tests.pretended_gpu.order import RaceError

HERE = re.escape("tests/pretended_gpu/test_device.py:")


@pytest.fixture
def gpu():
    with pretended_gpu(2) as devices:
        yield devices


def on_side(side, make):
    """Run `make` on a stream."""
    with torch.cuda.stream(side):
        return make()


# --- Places ---


def test_a_tensor_left_behind_is_found_and_named(gpu):
    x = torch.arange(4, device="cuda")
    with pytest.raises(
        MixedDevicesError, match=rf"^add at {HERE}\d+ \(test_a_tensor_left.*\(4,\) torch.int64 is on the CPU"
    ):
        x + torch.arange(4)
    with pytest.raises(MixedDevicesError, match="index"):
        torch.arange(4)[x]
    with pytest.raises(MixedDevicesError, match="index_put"):
        x[torch.tensor([1, 2], device="cuda")] = torch.tensor([5, 6])
    with pytest.raises(MixedDevicesError, match="generator"):
        torch.rand(3, device="cuda", generator=torch.Generator())
    with pytest.raises(TypeError, match="cuda:0"):
        x.numpy()
    assert x[torch.arange(2)].tolist() == [0, 1], "a GPU's tensor takes indices from the CPU"
    assert (x + torch.tensor(1)).device == torch.device("cuda", 0), "and numbers"
    for mixed in (lambda: torch.zeros(()).add_(x[0]), lambda: torch.stack([x[0], torch.tensor(1)])):
        with pytest.raises(MixedDevicesError, match="on the CPU"):
            mixed()
    assert x.cpu().device.type == "cpu"
    assert torch.zeros_like(x).is_cuda


def test_two_devices_do_not_mix(gpu):
    x, y = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1")
    with pytest.raises(MixedDevicesError, match=r"on cuda:0, but one of .* is on cuda:1"):
        x + y
    assert (x.to("cuda:1") + y).device == torch.device("cuda", 1)
    y.copy_(x)
    assert gpu.counts.copies[-1].way == "device to device"
    with torch.cuda.device(1):
        assert torch.ones(1, device="cuda").get_device() == 1
    with pytest.raises(RuntimeError, match="invalid device ordinal 2"):
        torch.cuda.set_device(2)


def test_gradients_cross_devices_and_parameters_keep_their_identity(gpu):
    layer = torch.nn.Linear(3, 2)
    weight = layer.weight
    layer.to("cuda")
    assert layer.weight is weight
    assert weight.is_cuda
    x = torch.ones(1, 3, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        out = layer(x.to("cuda"))
        assert out.dtype == torch.bfloat16
        assert out.softmax(-1).dtype == torch.float32, "as autocast does on CUDA, not on a CPU"
    out.sum().backward()
    assert not x.grad.is_cuda
    assert weight.grad.is_cuda


# --- Counts ---


def test_kernels_waits_and_copies_are_counted(gpu):
    x = torch.ones(2, 3).to("cuda")
    with gpu.counts.during("work"):
        y = (x.view(3, 2) * 2)[0]
        assert bool((y > 1).all())
    there = "tests/pretended_gpu/test_device.py test_kernels_waits_and_copies_are_counted: "
    assert gpu.counts.table() == {
        "kernels": {"work": 3},
        "waits": {
            f"around: {there}a copy from host to device, pageable": 1,
            f"work: {there}_local_scalar_dense": 1,
        },
        "copies": {"around: host to device, pageable": "1 of 24 bytes"},
    }
    (line,) = gpu.counts.lines(f"work: {there}_local_scalar_dense")
    assert re.match(HERE + r"\d+", line)


@pytest.mark.parametrize("need_grad", [False, True])
def test_attention_and_norms_are_one_kernel(gpu, need_grad):
    q = torch.randn(1, 4, 5, 8).cuda().requires_grad_(need_grad)
    k, v = (torch.randn(1, 2, 5, 8).cuda() for _ in range(2))
    gpu.counts.clear()
    out = F.rms_norm(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), (8,))
    assert gpu.counts.table()["kernels"] == {"around": 2}
    near = q.detach().cpu().requires_grad_()
    expected = F.rms_norm(F.scaled_dot_product_attention(near, k.cpu(), v.cpu(), is_causal=True, enable_gqa=True), (8,))
    torch.testing.assert_close(out.detach().cpu(), expected)
    if need_grad:
        out.square().sum().backward()
        expected.square().sum().backward()
        torch.testing.assert_close(q.grad.cpu(), near.grad, atol=1e-5, rtol=1e-4)


def test_live_bytes_have_a_peak(gpu):
    kept = torch.zeros(100, dtype=torch.uint8, device="cuda")
    (kept + 1)[:50].add_(1)
    assert torch.cuda.memory_allocated() == 100
    assert torch.cuda.max_memory_allocated() == 200


# --- Order ---


def test_a_stream_waits_for_what_another_one_wrote(gpu):
    side, x = torch.cuda.Stream(), torch.ones(3, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    y = on_side(side, lambda: x * 2)
    with pytest.raises(RaceError, match=rf"^cuda:0 reads memory of \(3,\) at {HERE}\d+ .*be written by stream"):
        y + 1
    event = on_side(side, lambda: torch.cuda.current_stream().record_event())
    torch.cuda.current_stream().wait_event(event)
    assert (y + 1).tolist() == [3.0, 3.0, 3.0]


def test_what_another_stream_reads_is_not_overwritten(gpu):
    side, x = torch.cuda.Stream(), torch.ones(3, device="cuda")
    with pytest.raises(RaceError, match="written by cuda:0"):
        on_side(side, lambda: x * 2)
    torch.cuda.synchronize()
    y = on_side(side, lambda: x * 2)
    with pytest.raises(RaceError, match=r"writes .* read by stream"):
        x.add_(1)
    event = torch.cuda.Event()
    event.record(side)
    event.synchronize()
    x.add_(1)
    assert y.tolist() == [2.0, 2.0, 2.0], "the host waited, so every stream may read it"


def test_memory_is_not_freed_under_another_stream():
    def use(record: bool) -> None:
        with pretended_gpu():
            side, x = torch.cuda.Stream(), torch.ones(3, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            y = on_side(side, partial(torch.mul, x, 2))
            if record:
                x.record_stream(side)
            del x
            torch.cuda.current_stream().wait_stream(side)
            del y

    use(record=True)
    with pytest.raises(
        AssertionError, match=r"memory of \(3,\) of cuda:0 was freed while stream .* call record_stream"
    ):
        use(record=False)


def test_a_pinned_buffer_is_not_filled_again_before_its_copy_is_over(gpu):
    buffer = torch.empty(4, pin_memory=True)
    assert buffer.is_pinned()
    buffer.fill_(1)
    there = buffer.to("cuda", non_blocking=True)
    event = torch.cuda.current_stream().record_event()
    assert not gpu.counts.waits
    with pytest.raises(RaceError, match=r"^the host writes pinned memory of \(4,\).* be read by cuda:0"):
        buffer.fill_(2)
    assert buffer.sum() == 4, "it may be read"
    event.synchronize()
    buffer.fill_(2)
    assert there.tolist() == [1.0] * 4


def test_a_copy_to_the_host_is_not_read_before_it_is_there(gpu):
    x = torch.ones(3, device="cuda")
    here = x.to("cpu", non_blocking=True)
    for read in (here.tolist, here.numpy, lambda: here + 1):
        with pytest.raises(RaceError, match=r"the host reads pinned memory .* be written by cuda:0"):
            read()
    torch.cuda.current_stream().synchronize()
    assert here.tolist() == [1.0] * 3
    pageable = torch.empty(3)
    pageable.copy_(x, non_blocking=True)
    assert gpu.counts.waits[-1].what == "a copy from device to host, pageable"


def test_a_thread_has_streams_of_its_own_and_its_operations_count(gpu):
    found = []

    def work():
        with torch.cuda.stream(torch.cuda.Stream()):
            found.append(torch.ones(2, device="cuda"))

    class Worker(threading.Thread):
        def run(self):
            work()

    assert isinstance(torch.cuda.Stream(), torch.cuda.Stream)
    thread = Worker()
    thread.start()
    thread.join()
    with pytest.raises(RaceError, match="stream"):
        found[0] + 1
    torch.cuda.synchronize()
    assert (found[0] + 1).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("waits", [True, False])
def test_a_ring_of_pinned_buffers_feeds_another_stream(gpu, waits):
    side, ring = torch.cuda.Stream(), [torch.empty(4, pin_memory=True) for _ in range(2)]
    copied = [torch.cuda.Event() for _ in ring]

    def feed(number):
        buffer, event = ring[number % 2], copied[number % 2]
        if waits:
            event.synchronize()
        buffer.fill_(number)
        batch = on_side(side, lambda: buffer.to("cuda", non_blocking=True))
        event.record(side)
        return batch, event

    def use(number):
        batch, event = feed(number)
        torch.cuda.current_stream().wait_event(event)
        batch.record_stream(torch.cuda.current_stream())
        return batch * 2

    found = [use(number) for number in range(2)]
    if not waits:
        with pytest.raises(RaceError, match="the host writes pinned memory"):
            use(2)
        return
    found += [use(number) for number in range(2, 5)]
    assert [x[0].item() for x in found] == [0, 2, 4, 6, 8]
    copies = gpu.counts.table()["copies"]
    assert copies == {"around: host to device, pinned": "5 of 80 bytes"}


# --- Graphs ---


def test_a_graph_runs_again_on_the_memory_it_was_captured_with(gpu):
    x, total = torch.ones(3, device="cuda"), torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x * 2)[1:]
        total.add_(x)
    assert total.tolist() == [0.0] * 3, "a capture computes nothing"
    assert y.isnan().all()
    address, before = y.data_ptr(), sum(gpu.counts.kernels.values())
    for value in (1.0, 5.0):
        x.fill_(value)
        graph.replay()
        assert y.tolist() == [2 * value] * 2
    assert total.tolist() == [6.0] * 3
    assert y.data_ptr() == address
    assert sum(gpu.counts.kernels.values()) - before == 4, "two fills, and a launch for each replay"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda x: bool(x.any()), "_local_scalar_dense .* waits for the device while a graph is captured"),
        (lambda x: x.nonzero(), "nonzero"),
        (lambda x: x.tolist(), "tolist"),
        (lambda x: torch.cuda.synchronize(), "synchronize"),
        (lambda x: x + torch.tensor([1.0], device="cuda"), "a copy from host to device, pageable"),
        (lambda x: x.cpu(), "a copy from device to host, pageable"),
        (lambda x: on_side(torch.cuda.Stream(), lambda: x * 2), "does not wait for it"),
        (lambda x: fork(x, join=False), "has not waited for"),
    ],
    ids=["bool", "nonzero", "tolist", "synchronize", "literal", "cpu", "other stream", "not joined"],
)
def test_what_a_graph_cannot_hold_is_refused(gpu, body, message):
    x = torch.ones(3, device="cuda")
    with pytest.raises(CaptureError, match=message), torch.cuda.graph(torch.cuda.CUDAGraph()):
        body(x)


def fork(x, join):
    side, home = torch.cuda.Stream(), torch.cuda.current_stream()
    side.wait_stream(home)
    y = on_side(side, lambda: x * 2)
    if join:
        home.wait_stream(side)
    return y


def test_a_graph_holds_pinned_copies_and_streams_that_are_joined(gpu):
    buffer, x = torch.ones(3, pin_memory=True), torch.zeros(3, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.copy_(buffer, non_blocking=True)
        y = fork(x, join=True) + 1
    torch.cuda.synchronize()
    buffer.fill_(4)
    graph.replay()
    assert y.tolist() == [9.0] * 3


def test_two_rounds_are_equal_where_shapes_numbers_and_kept_memory_are(gpu):
    cache, x = torch.zeros(8, device="cuda"), torch.ones(3, device="cuda")

    def operations(work):
        with gpu.record() as recording:
            work()
        return recording.operations

    def grown(length):
        cache[length : length + 3] = x * 2

    def static(length):
        cache.index_copy_(0, torch.arange(3, device="cuda"), x * 2)

    assert operations(lambda: static(0)) == operations(lambda: static(4))
    assert operations(lambda: grown(0)) != operations(lambda: grown(4)), "at another address"
    assert operations(lambda: x * 2) != operations(lambda: x * 3), "a number would be frozen in a graph"
