"""The common parts of the benchmarks: ranks, a common start, statistics, the machine's description."""
