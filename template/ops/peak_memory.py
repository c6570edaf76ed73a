"""The most memory that a rehearsal holds, all its processes together."""

import threading

import psutil

from ops.simulated_slice import SimulatedSlices

SAMPLE_SECONDS = 5


class PeakMemory:
    """Samples the rehearsal's processes every SAMPLE_SECONDS; `gib` is the most they held so far."""

    def __init__(self) -> None:
        self.gib = 0.0
        self._done = threading.Event()

    def follow(self, slices: SimulatedSlices) -> None:
        """Start sampling in the background."""

        def sample() -> None:
            while not self._done.wait(SAMPLE_SECONDS):
                total = psutil.Process().memory_info().rss
                for process in slices.processes():
                    try:
                        memory = process.memory_full_info()
                    except psutil.Error:
                        continue
                    # Shared pages count once where the system can tell.
                    total += getattr(memory, "pss", memory.rss)
                self.gib = max(self.gib, total / 2**30)

        threading.Thread(target=sample, daemon=True).start()

    def stop(self) -> None:
        """End the sampling."""
        self._done.set()
