import torch

from planner.execution.memory import PeakMemory, free_memory
from simulator import machine_memory
from simulator.calibration.messages import peak_growth

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
    def small_blocks():
        return [torch.ones(MEGABYTE // 64) for _ in range(1024)]

    freed, behind = small_blocks(), torch.ones(1)
    del freed  # the allocator keeps them, since something stands behind, and hands them out again
    memory = PeakMemory(CPU)
    memory.restart()
    held = small_blocks()
    assert memory.peak_bytes() >= 60 * MEGABYTE
    assert len(held) + behind.numel() > 1
    assert "resident" in memory.method


def test_a_container_leaves_less_than_the_machine_has(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_memory, "MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(machine_memory, "GROUP", tmp_path)
    assert free_memory("cpu", 0) is None
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    assert free_memory("cpu", 0) == 4000 * 1024
    for name, content in (("max", "3000000"), ("current", "1500000"), ("stat", "anon 1\nfile 500000\n")):
        (tmp_path / f"memory.{name}").write_text(content)
    assert free_memory("cpu", 0) == 2_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory("cpu", 0) == 4000 * 1024


def test_a_block_in_the_place_of_another_says_that_it_has_gone():
    assert peak_growth([(100, 10), (200, 10), (100, -10), (300, 5)]) == 20
    assert peak_growth([(100, 10), (200, 10), (105, 20)]) == 30
    assert peak_growth([(100, 10), (110, 10), (90, 25), (300, 1)]) == 26
    assert peak_growth([(50, -40), (100, 30), (200, 30)]) == 20
    assert peak_growth([(50, -40)]) == 0
