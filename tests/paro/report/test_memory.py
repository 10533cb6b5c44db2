"""Memory is measured, not computed."""

import pytest
import torch

from paro.report.memory import MemoryForecast, memory_line, peak_memory_bytes


@pytest.mark.slow("fills memory until it shows")
def test_a_cpu_process_that_grows_has_a_higher_peak() -> None:
    size = 64 * 2**20
    before = peak_memory_bytes(torch.device("cpu"))
    # Larger than the peak so far, whatever earlier tests used and freed.
    block = torch.ones(before + size, dtype=torch.uint8)
    assert peak_memory_bytes(torch.device("cpu")) - before >= size
    del block


MIB = 2**20
FORECAST = MemoryForecast(predicted_bytes=5 * MIB, states_bytes=3 * MIB, bytes_before=2 * MIB)


def test_the_line_shows_the_peak_as_it_is_and_as_predicted() -> None:
    line = memory_line(torch.device("cpu"), rank=3, iteration=1, forecast=FORECAST)
    assert line.startswith("[Rank 3] (after 1 iterations) memory (MB) | max resident: ")
    assert line.endswith(
        " | before the model was built: 2.0 | model states: 3.0 | predicted peak: 7.0"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_the_allocator_is_asked() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.reset_peak_memory_stats(device)
    before = peak_memory_bytes(device)
    block = torch.empty(2**24, dtype=torch.uint8, device=device)
    del block
    assert peak_memory_bytes(device) == before + 2**24
    line = memory_line(device, rank=0, iteration=1, forecast=FORECAST)
    assert " | allocated: " in line
    assert " | max reserved: " in line
