"""Guards of a run: spikes, stalls, signals, memory and the run's folder."""
