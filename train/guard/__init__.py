"""Guards of a run: spikes, stalls, signals, memory, disk space and damaged data."""
