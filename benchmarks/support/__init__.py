"""What the benchmarks share: ranks, a common start, statistics, the machine's description."""
