"""A path beside other work: the recorded order of calls. Streams themselves are not simulated."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch

from npu_backend import Indexer, Phase
from npu_backend.runtime import PreprocessResult


class Log:
    """Streams and events that write down what is asked of them."""

    def __init__(self):
        self.calls = []
        self.events = 0
        self.stream = self.main = self.named("main")

    def named(self, name):
        log = self

        class Stream:
            def wait_event(self, event):
                log.calls.append(f"{name} waits for {event}")

            def wait_stream(self, other):
                raise AssertionError("a stream object orders nothing that is enqueued later")

            def __str__(self):
                return name

        return Stream()

    def current(self):
        return self.stream

    def event(self):
        self.events += 1
        number, log = self.events, self

        class Event:
            def record(self, stream):
                log.calls.append(f"event {number} on {stream}")

            def __str__(self):
                return f"event {number}"

        return Event()

    @contextmanager
    def use(self, stream):
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def record(self, tensor, stream):
        self.calls.append(f"{self.names.get(id(tensor), 'result')} used on {stream}")


@pytest.fixture
def log():
    return Log()


def _layer(h):
    layer = h.layer(indexer=Indexer("own"))
    bound = h.bind(h.plan(layer))
    bound.prepare()
    inputs = (torch.ones(2, 64, dtype=torch.bfloat16), torch.tensor([3, 4]), torch.tensor([0, 1]))
    return bound, inputs


def test_the_order_of_calls(h, log):
    bound, inputs = _layer(h)
    log.names = dict(zip(map(id, inputs), ("hidden", "positions", "slots"), strict=True))
    path = bound._paths[Phase.DECODE]

    def spied(*args):
        log.calls.append(f"path on {log.stream}")
        return path(*args)

    bound._paths[Phase.DECODE] = spied
    side = log.named("side")
    bound.preprocess_beside(
        *inputs,
        phase=Phase.DECODE,
        other=lambda: log.calls.append(f"indexer on {log.stream}"),
        stream=side,
        streams=log,
    )
    assert log.calls == [
        "event 1 on main",
        "side waits for event 1",
        "hidden used on side",
        "positions used on side",
        "slots used on side",
        "path on side",
        "event 2 on side",
        "indexer on main",
        "main waits for event 2",
        "result used on main",  # q_nope
        "result used on main",  # q_pe
        "result used on main",  # q_lora
    ]


def test_with_and_without_a_stream_the_results_are_the_same(h, log):
    bound, inputs = _layer(h)
    log.names = {}
    plain, value = bound.preprocess_beside(*inputs, phase=Phase.DECODE, other=lambda: 7)
    beside, again = bound.preprocess_beside(
        *inputs, phase=Phase.DECODE, other=lambda: 7, stream=log.named("side"), streams=log
    )
    assert value == again == 7
    assert isinstance(beside, PreprocessResult)
    for a, b in zip(plain, beside, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_a_step_without_rows_goes_nowhere(h, log):
    bound, (hidden, positions, slots) = _layer(h)
    result, value = bound.preprocess_beside(
        hidden[:0], positions[:0], slots[:0], phase=Phase.DECODE, other=lambda: 7,
        stream=log.named("side"), streams=log,
    )  # fmt: skip
    assert value == 7
    assert result.q_nope.shape == (0, 2, 32)
    assert log.calls == []


@pytest.mark.npu
def test_on_the_simulated_npu_torch_npus_own_streams_are_asked(npu_device):
    """torch_npu's stream and event classes take the calls; that they overlap is not simulated."""
    from npu_backend.runtime.overlap import DeviceStreams, run_beside

    streams = DeviceStreams(npu_device)
    side = torch.npu.Stream()
    x = torch.arange(4.0, device=npu_device)
    result, value = run_beside(
        lambda t: (t + 1,),
        [x],
        lambda: (x * 2).cpu().tolist(),
        streams=streams,
        side=side,
        outputs=lambda result: result,
    )
    assert result[0].cpu().tolist() == [1.0, 2.0, 3.0, 4.0]
    assert value == [0.0, 2.0, 4.0, 6.0]
