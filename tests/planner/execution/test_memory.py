import torch

from planner.execution.memory import PeakMemory, waited_s

CPU = torch.device("cpu")
MEGABYTE = 2**20


def test_recorded_peak_counts_what_stood_at_the_same_time():
    memory = PeakMemory(CPU)

    def work():
        first = torch.ones(MEGABYTE)
        second = first + first
        del first
        third = second + second
        assert third.numel() == MEGABYTE

    memory.record(work, held_bytes=1000)
    assert 8 * MEGABYTE + 1000 <= memory.peak_bytes() <= 8 * MEGABYTE + 5000
    assert "warm-up" in memory.method


def test_without_a_record_the_growth_of_resident_memory_stands_in():
    memory = PeakMemory(CPU)
    memory.restart()
    held = torch.ones(16 * MEGABYTE)
    assert memory.peak_bytes() >= 60 * MEGABYTE
    assert held.numel()
    assert "resident" in memory.method


def test_waiting_never_shrinks():
    before = waited_s()
    assert before >= 0
    assert waited_s() >= before
