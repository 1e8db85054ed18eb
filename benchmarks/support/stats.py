"""Medians, their spread and their certainty."""

from collections.abc import Sequence

import numpy as np

PERCENTILES = (0, 10, 25, 50, 75, 90, 100)


def summary(samples: Sequence[float] | np.ndarray) -> dict[str, float]:
    """Percentiles of `samples`, their number and mean, for a result file."""
    values = np.percentile(samples, PERCENTILES)
    named = {f"p{percentile}": float(value) for percentile, value in zip(PERCENTILES, values, strict=True)}
    return {"count": len(samples), "mean": float(np.mean(samples))} | named


def median_interval(samples: Sequence[float] | np.ndarray, resamples: int = 2000) -> tuple[float, float, float]:
    """(median, lower, upper): a 95 % bootstrap interval of the median."""
    values = np.asarray(samples)
    draws = np.random.default_rng(0).integers(len(values), size=(resamples, len(values)))
    lower, upper = np.percentile(np.median(values[draws], axis=1), (2.5, 97.5))
    return float(np.median(values)), float(lower), float(upper)
