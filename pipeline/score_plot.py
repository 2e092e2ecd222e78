"""The reliability diagram: how often labels of a stated confidence are right. Needs matplotlib, which is loaded here alone."""

from __future__ import annotations

import io

import numpy as np

from askmany.engine.errors import ConfigError
from askmany.pipeline.score_labels import Calibration


def reliability_png(found: Calibration, title: str) -> bytes:
    """A PNG: accuracy by confidence above, how many labels below. ConfigError when matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("the reliability plot needs matplotlib; pip install 'askmany[plots]'") from error
    figure = Figure(figsize=(5, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    upper, lower = figure.subplots(2, 1, height_ratios=[3, 1], sharex=True)
    bins = len(found.counts)
    middles = (np.arange(bins) + 0.5) / bins
    upper.plot([0, 1], [0, 1], color="0.6", linestyle="--", linewidth=1)
    upper.bar(middles, np.nan_to_num(found.accuracy), width=0.9 / bins, color="tab:blue", alpha=0.7)
    upper.plot(found.confidence, found.accuracy, marker="o", linestyle="none", color="tab:red", markersize=4)
    upper.set(ylim=(0, 1), xlim=(0, 1), ylabel="share that is right", title=f"{title}: ECE {found.ece:.3f}, Brier {found.brier:.3f}")
    lower.bar(middles, found.counts, width=0.9 / bins, color="0.5")
    lower.set(xlabel="stated probability of the chosen label", ylabel="answers")
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=120)
    return sink.getvalue()
